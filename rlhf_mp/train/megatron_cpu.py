"""Megatron-Core on a machine without GPUs: its own, unmodified source, with CUDA's names meaning the CPU.

``install()`` puts a loader in front of the packages in ``PACKAGES``. It compiles their source with a few mechanical
substitutions in the syntax tree:

    torch.cuda                         -> the ``accelerator`` module made here: the same names, for the CPU
    "cuda", f"cuda:{n}"                -> "cpu"
    "torch.cuda.XTensor"               -> "torch.XTensor"
    x.cuda(...), x.record_stream(...)  -> x
    f(..., pin_memory=True)            -> f(..., pin_memory=False)
    x.pin_memory()                     -> x as a ``HostTensor``: what Megatron keeps beside the accelerator
    x.is_cuda                          -> whether x is none

No computation is replaced, and nothing is patched globally: ``torch.cuda`` stays what it is for every other package.
With a GPU nobody calls ``install()``.
"""

import ast
import contextlib
import importlib.abc
import importlib.machinery
import logging
import re
import sys
import time
import types
from collections.abc import Sequence

import torch

PACKAGES = ("megatron.core", "mbridge")
TENSOR_TYPE = re.compile(r"torch\.cuda\.(\w+Tensor)")
NAME = "_accelerator"  # under which rewritten modules find what stands for torch.cuda


def install() -> None:
    """Make every later import of Megatron one for the CPU.

    Raises:
        RuntimeError: Megatron has been imported already, for the GPU.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    early = [name for name in sys.modules if name.startswith(PACKAGES)]
    if early:
        raise RuntimeError(f"megatron_cpu.install() must come before the first import of {early[0]}")
    sys.meta_path.insert(0, _Finder(cpu_accelerator()))
    # The RNG tracker forks the CPU generator here, and would warn each time that it has moved.
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


class HostTensor(torch.Tensor):
    """In memory that the accelerator has not. What is computed from it stays there."""


class _Accelerator(types.ModuleType):
    """What Megatron sees under the name ``torch.cuda``."""

    def __getattr__(self, name: str):  # what is not set below: the real torch.cuda, with its errors
        return getattr(torch.cuda, name)


class _Event:
    """On the CPU everything has happened by the time somebody asks."""

    def __init__(self, *args, **kwargs):
        self.at = time.perf_counter()

    def record(self, stream: object = None) -> None:
        self.at = time.perf_counter()

    def elapsed_time(self, end: "_Event") -> float:
        return (end.at - self.at) * 1e3

    def query(self) -> bool:
        return True

    def wait(self, stream: object = None) -> None:
        pass

    synchronize = wait


class _Stream:
    def __init__(self, *args, **kwargs):
        pass

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event

    def wait_event(self, event: _Event) -> None:
        pass

    wait_stream = wait_event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def cpu_accelerator() -> _Accelerator:
    cpu, only_stream = torch.device("cpu"), _Stream()
    accelerator = _Accelerator("accelerator")
    accelerator.current_device = lambda: cpu
    accelerator.is_available = lambda: False
    accelerator.device_count = lambda: 1
    accelerator.set_device = lambda device: None
    accelerator.synchronize = lambda device=None: None
    accelerator.empty_cache = lambda: None
    accelerator.Stream, accelerator.Event = _Stream, _Event
    accelerator.stream = lambda stream: contextlib.nullcontext()
    accelerator.current_stream = accelerator.default_stream = lambda device=None: only_stream
    accelerator.get_rng_state = lambda device=None: torch.get_rng_state()
    accelerator.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    accelerator.manual_seed = torch.manual_seed
    accelerator.random = types.SimpleNamespace(get_rng_state=accelerator.get_rng_state)
    accelerator.memory_allocated = accelerator.memory_reserved = lambda device=None: 0
    for kind in ("Float", "Half", "BFloat16", "Int", "Long"):
        setattr(accelerator, f"{kind}Tensor", getattr(torch, f"{kind}Tensor"))
    accelerator.move = lambda x, *args, **kwargs: x
    accelerator.pinned = lambda x: x.as_subclass(HostTensor)
    accelerator.holds = lambda x: not isinstance(x, HostTensor)
    return accelerator


def _call(name: str, at: ast.AST, arguments: list[ast.expr], keywords: Sequence[ast.keyword] = ()) -> ast.Call:
    """A call of the accelerator's ``name`` in the place of ``at``."""
    function = ast.Attribute(ast.Name(NAME, ast.Load()), name, ast.Load())
    return ast.fix_missing_locations(ast.copy_location(ast.Call(function, arguments, list(keywords)), at))


class _Retarget(ast.NodeTransformer):
    """The substitutions."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(NAME, node.ctx), node)
        if node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            return _call("holds", node, [node.value])
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        for keyword in node.keywords:
            if keyword.arg == "pin_memory" and isinstance(keyword.value, ast.Constant):
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        called = node.func
        if isinstance(called, ast.Attribute) and called.attr in ("cuda", "record_stream"):
            return _call("move", node, [called.value, *node.args], node.keywords)
        if isinstance(called, ast.Attribute) and called.attr == "pin_memory" and not node.args:
            return _call("pinned", node, [called.value])
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.values[0], ast.Constant) and node.values[0].value == "cuda:":
            return ast.copy_location(ast.Constant("cpu"), node)
        return node

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and (match := TENSOR_TYPE.fullmatch(node.value)):
            return ast.copy_location(ast.Constant(f"torch.{match[1]}"), node)
        return node


def retargeted(source: str | bytes, path: str) -> types.CodeType:
    """Compiled ``source`` with the substitutions made."""
    return compile(_Retarget().visit(ast.parse(source, path)), path, "exec", dont_inherit=True)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, accelerator: _Accelerator):
        super().__init__(fullname, path)
        self.accelerator = accelerator

    def get_code(self, fullname: str) -> types.CodeType:  # never the cached bytecode, which is of the original
        path = self.get_filename(fullname)
        return retargeted(self.get_data(path), path)

    def exec_module(self, module: types.ModuleType) -> None:
        setattr(module, NAME, self.accelerator)
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            module.disable_jit_fuser()  # torch.compile of small pointwise functions: a GPU's concern


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, accelerator: _Accelerator):
        self.accelerator = accelerator

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not any(fullname == package or fullname.startswith(f"{package}.") for package in PACKAGES):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path, self.accelerator)
        return spec
