"""What a reader may assume about a file without opening it: where its imports point, how long it is, what it omits."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import distribution, entry_points, packages_distributions
from pathlib import Path

import pytest

from rlhf_mp.config.load import load_config

ROOT = Path(__file__).parents[1]
PACKAGE = sorted((ROOT / "rlhf_mp").rglob("*.py"))
PRODUCT = [*PACKAGE, *sorted((ROOT / "launch").rglob("*.py"))]
PYTHON = [*PRODUCT, *sorted((ROOT / "benchmarks").rglob("*.py")), *sorted((ROOT / "tests").rglob("*.py"))]

# Imports point up this list or stay within a line. A longer name wins: cluster.guard is not in the layer of cluster.
LAYERS = [
    "errors registry phase",
    "config planner checkpoint host_allocator cluster.guard cluster.watch cluster.alert cluster.first_failure "
    "cluster.local_ranks cluster.processes cluster.shared_memory cluster.stacks "
    "cluster.launcher cluster.network",  # before torch is touched
    "data algorithms models",
    "observe rewards train rollout weights environments",
    "cluster",
    "trainer",
    "prepare assemble assemble_supervised replay replay_report run api quickstart rlhf_demo episode_quickstart",
    "launch benchmarks",
]
LAYER = {name: number for number, names in enumerate(LAYERS) for name in names.split()}
HEAVY = {"torch", "ray", "deepspeed", "sglang", "transformers", "numpy", "pyarrow", "datasets"}
ADAPTERS = {
    "ray": r"cluster/bootstrap",
    "deepspeed": r"train/deepspeed_engine",
    "sglang": r"rollout/(sglang_plugin|seeded_draw)|weights/(tensor|distributed)",
    "transformers": r"models/(hf|packed_attention|quantized|scalar|tiny)|train/(deepspeed_engine|megatron_\w+)",
    "megatron": r"train/megatron_\w+",
    "mbridge": r"train/megatron_\w+",
    "peft": r"models/lora",
    "bitsandbytes": r"models/quantized",
    "wandb": r"observe/sinks",
}
OPTIONAL = {
    "bitsandbytes",
    "sglang",
    "wandb",
    "megatron",
    "mbridge",
    "PIL",
}  # installed apart, see setup.py; asked for by a knob
PROTOCOLS = [
    ("train/base.py", "Scorer", "train/torch_engine.py", "TorchScorer"),
    ("train/base.py", "Scorer", "train/deepspeed_engine.py", "DeepSpeedScorer"),
    ("train/base.py", "Scorer", "train/adapted.py", "BaseScorer"),
    ("train/base.py", "TrainEngine", "train/torch_engine.py", "TorchEngine"),
    ("train/base.py", "ModuleEngine", "train/torch_engine.py", "TorchEngine"),
    ("train/base.py", "ModuleEngine", "train/deepspeed_engine.py", "DeepSpeedEngine"),
    ("train/base.py", "TrainEngine", "train/deepspeed_engine.py", "DeepSpeedEngine"),
    ("train/base.py", "Scorer", "train/megatron_engine.py", "MegatronScorer"),
    ("train/base.py", "TrainEngine", "train/megatron_engine.py", "MegatronEngine"),
    ("rollout/base.py", "RolloutEngine", "rollout/sglang_client.py", "SGLangClient"),
    ("rewards/base.py", "Reward", "rewards/base.py", "TextRule"),
    ("rewards/base.py", "Reward", "rewards/code.py", "CodeReward"),
    ("rewards/base.py", "Reward", "rewards/function.py", "FunctionReward"),
    ("rewards/base.py", "Reward", "rewards/judge.py", "JudgeReward"),
    ("rewards/base.py", "Reward", "rewards/math.py", "MathReward"),
    ("rewards/base.py", "Reward", "rewards/regex.py", "RegexReward"),
    ("rewards/base.py", "Reward", "rewards/remote.py", "RemoteReward"),
    ("weights/base.py", "Transport", "weights/tensor.py", "TensorTransport"),
    ("weights/base.py", "Transport", "weights/distributed.py", "DistributedTransport"),
    ("weights/base.py", "Transport", "weights/disk.py", "DiskTransport"),
    ("trainer/trainer.py", "Rollouts", "cluster/client.py", "RolloutClient"),
    ("trainer/supervised.py", "Batches", "data/batches.py", "Batches"),
    ("trainer/trainer.py", "Swap", "weights/swap.py", "VerifiedSwap"),
    ("trainer/loop.py", "Checkpoints", "trainer/checkpoints.py", "RunCheckpoints"),
    ("trainer/checkpoints.py", "Ranks", "cluster/ranks.py", "Ranks"),
]
CONFIG_NAMES = {"config", "actor", "rollout", "policy", "trainer", "knobs", "data", "optim", "fsdp", "actor_config"}
FOREIGN = re.compile(r"/work[/]|/farm[/]|sub[a]gent|\.lib[r]ary", re.IGNORECASE)  # does not match itself


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    return name_of(path).removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [*ast.walk(tree(path))]


def imported(found: Iterable[ast.AST]) -> set[str]:
    """Dotted names of modules; ``from package import module`` counts as the module."""
    modules = set()
    for node in found:
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            for below in (f"{node.module}.{alias.name}" for alias in node.names):
                modules.add(below if file_of(below).exists() else node.module)
    return modules


def file_of(module: str) -> Path:
    return (ROOT / module.replace(".", "/")).with_suffix(".py")


def layer_of(module: str) -> int:
    parts = module.removeprefix("rlhf_mp.").split(".")
    return next(LAYER[key] for n in range(len(parts), 0, -1) if (key := ".".join(parts[:n])) in LAYER)


def test_imports_point_up_the_list_of_layers():
    downward = [
        f"{name_of(path)} imports {module}"
        for path in PRODUCT
        if path != ROOT / "rlhf_mp/__init__.py"
        for module in imported(nodes(path))
        if module.startswith("rlhf_mp.") and layer_of(module) > layer_of(module_of(path))
    ]
    assert downward == []


def test_modules_do_not_import_each_other_in_a_circle():
    graph = {module_of(path): imported(tree(path).body) for path in PACKAGE}
    assert len([*TopologicalSorter(graph).static_order()]) >= len(graph)  # raises CycleError, naming the circle


def test_frameworks_stay_in_their_adapters():
    strays = [
        f"{name_of(path)} imports {framework}"
        for path in PRODUCT
        for framework in {module.split(".")[0] for module in imported(nodes(path))} & ADAPTERS.keys()
        if not re.fullmatch(f"rlhf_mp/({ADAPTERS[framework]}).py", name_of(path))
    ]
    assert strays == []


@pytest.mark.parametrize("start", ["launch", "rlhf_mp/config", "rlhf_mp/planner"])
def test_a_bad_config_is_told_before_anything_heavy_is_imported(start):
    reached, waiting = set(), [*(ROOT / start).rglob("*.py")]
    while waiting:
        for module in imported(tree(waiting.pop()).body) - reached:
            reached.add(module)
            waiting += [file] if (file := file_of(module)).exists() else []
    assert {module.split(".")[0] for module in reached} & HEAVY == set()


def test_the_loop_knows_protocols_only():
    known = set().union(*(imported(nodes(path)) for path in (ROOT / "rlhf_mp" / "trainer").glob("*.py")))
    implementations = ("rlhf_mp.cluster", "rlhf_mp.rollout", "rlhf_mp.weights", "rlhf_mp.models", "rlhf_mp.train.")
    assert {m for m in known if m.startswith(implementations)} == {"rlhf_mp.train.base"}


def methods(path: Path, name: str) -> dict[str, list[str]]:
    """Public methods of a class with the names of their arguments, those of its bases in the same file included."""
    classes = {node.name: node for node in nodes(path) if isinstance(node, ast.ClassDef)}
    found = {}
    for base in classes[name].bases:
        if isinstance(base, ast.Name) and base.id in classes:
            found |= methods(path, base.id)
    for node in classes[name].body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            is_async = ["async"] if isinstance(node, ast.AsyncFunctionDef) else []
            found[node.name] = is_async + [a.arg for a in [*node.args.args, *node.args.kwonlyargs]]
    return found


@pytest.mark.parametrize(("where", "protocol", "path", "name"), PROTOCOLS)
def test_an_implementation_has_the_methods_its_protocol_promises(where, protocol, path, name):
    promised, kept = methods(ROOT / "rlhf_mp" / where, protocol), methods(ROOT / "rlhf_mp" / path, name)
    assert promised and {method: kept.get(method) for method in promised} == promised


def functions(body: Iterable[ast.AST]) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_no_file_is_longer_than_400_lines_and_no_function_than_60():
    files = {name_of(p): n for p in PYTHON if (n := len(p.read_text().splitlines())) > 400}
    assert files == {}
    lengths = {f"{name_of(p)} {f.name}": f.end_lineno - f.lineno + 1 for p in PYTHON for f in functions(nodes(p))}
    assert {name: lines for name, lines in lengths.items() if lines > 60} == {}


def unannotated(path: Path) -> list[str]:
    """What a reader has to guess of public functions and methods. ``__init__`` returns nothing without saying so."""
    owners = [tree(path), *(node for node in tree(path).body if isinstance(node, ast.ClassDef))]
    missing = []
    for function in functions(node for owner in owners for node in owner.body):
        if function.name.startswith("_") and function.name != "__init__":
            continue
        arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
        missing += [f"{function.name}({a.arg})" for a in arguments if not a.annotation and a.arg not in ("self", "cls")]
        if function.returns is None and function.name != "__init__":
            missing.append(f"{function.name} -> ?")
    return missing


def test_every_public_function_is_annotated():
    assert {name_of(path): missing for path in PRODUCT if (missing := unannotated(path))} == {}


def is_config(node: ast.expr) -> bool:
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name) and node.id in CONFIG_NAMES


def is_defensive(node: ast.AST) -> bool:
    """``getattr(config, name, default)`` or ``config.get(name, default)``."""
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Attribute):
        return node.func.attr == "get" and len(node.args) == 2 and is_config(node.func.value)
    return ast.unparse(node.func) == "getattr" and len(node.args) == 3 and is_config(node.args[0])


def test_a_knob_is_read_as_what_it_is():
    """A second default beside a read would win over the documented one without a word."""
    found = {name_of(path): [ast.unparse(node) for node in nodes(path) if is_defensive(node)] for path in PRODUCT}
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_names_are_those_of_the_house():
    """One concept, one name: config, num_tokens, logprobs; and no file for whatever did not fit elsewhere."""
    used = {name_of(p): re.findall(r"\bcfg\b|\bn_(?:tokens|ranks|steps|engines)\b", p.read_text()) for p in PRODUCT}
    assert {name: words for name, words in used.items() if words} == {}
    assert [name_of(p) for p in PYTHON if re.fullmatch(r"(utils?|helpers?|managers?|common|misc)", p.stem)] == []


def test_every_test_file_has_a_name_of_its_own():
    """pytest imports them by it; a second one of the same name is not collected."""
    times = Counter(path.name for path in PYTHON if path.name.startswith("test_"))
    assert [name for name, count in times.items() if count > 1] == []


def test_nothing_tells_where_the_project_was_written():
    kinds = {".py", ".md", ".yaml", ".txt", ".ini", ".toml", ".sh", ""}
    folders = ("rlhf_mp", "launch", "configs", "docs", "tests", "benchmarks", "examples", ".ci")
    files = [p for folder in folders for p in (ROOT / folder).rglob("*")] + [*ROOT.glob("*")]
    texts = [p for p in files if p.is_file() and p.suffix in kinds and not re.search(r"_cache|/.git$", str(p))]
    assert len(texts) > 100
    told = {name_of(p): found for p in texts if (found := FOREIGN.findall(p.read_text(errors="replace")))}
    assert told == {}


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_a_config_is_short_and_loads(path):
    assert len(path.read_text().splitlines()) < 40
    load_config(path)


def normalized(distributions: Iterable[str]) -> set[str]:
    return {re.split(r"[<>=\[]", name)[0].lower().replace("_", "-") for name in distributions}


def test_what_is_imported_is_declared_and_what_is_declared_is_installed():
    assignments = [n for n in tree(ROOT / "setup.py").body if isinstance(n, ast.Assign) and n.targets[0].id == "CORE"]
    core = normalized(ast.literal_eval(assignments[0].value))
    for name in core:
        distribution(name)  # raises PackageNotFoundError
    origins = packages_distributions()
    modules = {module.split(".")[0] for path in PRODUCT for module in imported(nodes(path))} - OPTIONAL - {"rlhf_mp"}
    assert {m for m in modules & origins.keys() if not normalized(origins[m]) & core} == set()


def test_sglang_finds_the_plugin_through_the_entry_point():
    (plugin,) = entry_points(group="sglang.srt.plugins", name="rlhf_mp")
    assert f"rlhf_mp = {plugin.value}" in (ROOT / "setup.py").read_text()
    assert callable(plugin.load())
