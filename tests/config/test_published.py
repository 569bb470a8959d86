"""Configs as people published them for other trainers: each loads as it stands, or is told key and fix."""

import ast
import re
from pathlib import Path

import pytest
import yaml

from rlhf_mp.config.keys import KNOBS, canonical
from rlhf_mp.config.load import check_layers, load_config

DOCUMENTS = sorted((Path(__file__).parents[2].parent / "shared" / "seeds").glob("[0-9]*.txt"))
OTHER_ENGINES = {"actor_rollout_ref.rollout.name"}  # blocks for vLLM: refused with "rlhf_mp samples with SGLang"
MAY_BE_MISSING = {"trainer.logger"}  # wandb is not installed everywhere

pytestmark = pytest.mark.skipif(not DOCUMENTS, reason="the reference documents are not beside this checkout")


def yaml_blocks():
    for path in DOCUMENTS:
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL)):
            yield pytest.param(block, id=f"{path.stem[:3]}-{number}")


def python_configs():
    """``config = {...}`` and ``yaml.safe_load(\"\"\"...\"\"\")`` in blocks of Python."""
    for path in DOCUMENTS:
        for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.DOTALL):
            if "actor_rollout_ref" not in block or "config = " not in block or "class " in block:
                continue
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                    yield ast.literal_eval(node.value)
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "yaml.safe_load":
                    yield yaml.safe_load(node.args[0].value)


def leaves(tree, prefix=""):
    for name, value in tree.items():
        key = f"{prefix}{name}"
        yield from leaves(value, f"{key}.") if isinstance(value, dict) else [(key, value)]


def lookup(config, key):
    for name in canonical(key).split("."):
        config = getattr(config, name)
    return config


def check(config, problems, tree):
    for problem in problems:
        assert problem.key in OTHER_ENGINES | MAY_BE_MISSING
        assert problem.reason and problem.fix
    refused = {problem.key for problem in problems}
    for key, value in leaves(tree):
        if key not in refused:
            assert lookup(config, key) == type(lookup(config, key))(value), f"{key} was lost"


@pytest.mark.parametrize("block", yaml_blocks())
def test_a_published_yaml_block_loads_as_it_stands_or_names_key_and_fix(tmp_path, block):
    (tmp_path / "block.yaml").write_text(block)
    tree = yaml.safe_load(block)
    config, problems = check_layers([tree], [])
    check(config, problems, tree)
    if not problems:
        assert load_config(tmp_path / "block.yaml") == config


def test_published_configs_in_python_load_or_name_key_and_fix():
    trees = list(python_configs())
    assert len(trees) == 2
    for tree in trees:
        config, problems = check_layers([tree], [])
        check(config, problems, tree)
        assert {p.key: p.fix for p in problems}[
            "actor_rollout_ref.rollout.name"
        ] == "actor_rollout_ref.rollout.name=sglang"
        config, problems = check_layers([tree], ["actor_rollout_ref.rollout.name=sglang", "trainer.logger=[console]"])
        assert problems == []


def test_the_documents_hold_the_blocks_they_are_known_for():
    assert len(list(yaml_blocks())) == 15
    written = {key for block in yaml_blocks() for key, _ in leaves(yaml.safe_load(block.values[0]))}
    assert {canonical(key) for key in written} <= set(KNOBS)
