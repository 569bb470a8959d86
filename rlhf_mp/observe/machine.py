"""Where numbers were measured: machine, versions, commit. The host's name is nobody's business."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import rlhf_mp

PACKAGES = ("torch", "deepspeed", "sglang", "ray", "transformers", "tokenizers", "safetensors", "omegaconf", "numpy")


def machine() -> dict[str, Any]:
    """CPU, memory, GPUs and operating system; sizes in GiB."""
    cuda = torch.cuda
    return {
        "cpu": _cpu_model(),
        "num_cores": len(os.sched_getaffinity(0)),  # those this process may use, in a container too
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": [_gpu(i) for i in range(cuda.device_count())] if cuda.is_available() else [],
        "cuda": torch.version.cuda,
        "os": platform.platform(),
        "python": platform.python_version(),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()  # ARM kernels give no name


def _gpu(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}


def versions() -> dict[str, str]:
    """This package and the installed ones of those it builds on."""
    found = {"rlhf_mp": rlhf_mp.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # not every backend is installed everywhere
            continue
    return found


def git_commit() -> str | None:
    """The commit this package runs from, with ``-dirty`` if changed since; None outside a checkout."""
    root = Path(rlhf_mp.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:  # no git on this machine
        return None
    return result.stdout.strip() if result.returncode == 0 else None
