"""GPUs and links, as numbers with a source."""

import re
from dataclasses import dataclass
from difflib import get_close_matches

from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.planner.amount import GIB, MIB

PCIE4, PCIE5 = 31.5e9, 63.0e9  # 16 lanes, one direction: PCI-SIG's rates after encoding


@dataclass(frozen=True)
class Gpu:
    """One card. Rates are peaks of dense arithmetic, one direction of a link."""

    name: str
    memory: float  # bytes that nvidia-smi reports; more than the printed GB, which are rounded
    bf16_flops: float  # per second, tensor cores, float32 accumulation, no sparsity
    memory_rate: float  # bytes per second
    peer_rate: float  # bytes per second to the other GPUs of the machine
    host_rate: float  # bytes per second to host memory
    source: str


def _gpu(name: str, mib: float, tflops: float, tb_s: float, peer_gb_s: float, host: float, source: str) -> Gpu:
    return Gpu(name, mib * MIB, tflops * 1e12, tb_s * 1e12, peer_gb_s * 1e9, host, source)


_CARDS = (
    _gpu("RTX3090", 24576, 71, 0.936, 31.5, PCIE4, "NVIDIA GA102 whitepaper, appendix A"),
    _gpu("RTX4090", 24564, 165.2, 1.008, 31.5, PCIE4, "NVIDIA Ada GPU architecture whitepaper, appendix A"),
    _gpu("T4", 15360, 65, 0.320, 15.75, 15.75e9, "NVIDIA T4 data sheet; float16, it has no bfloat16"),
    _gpu("A10G", 23028, 70, 0.600, 31.5, PCIE4, "AWS EC2 G5 page (tensor peak), NVIDIA A10 data sheet (bandwidth)"),
    _gpu("L40S", 46068, 362, 0.864, 31.5, PCIE4, "NVIDIA L40S data sheet"),
    _gpu("A100-40G", 40960, 312, 1.555, 300, PCIE4, "NVIDIA A100 data sheet (SXM4)"),
    _gpu("A100-80G", 81920, 312, 2.039, 300, PCIE4, "NVIDIA A100 data sheet (SXM4)"),
    _gpu("H100-80G", 81559, 989.4, 3.35, 450, PCIE5, "NVIDIA H100 data sheet (SXM5)"),
    _gpu("H200", 143771, 989.4, 4.8, 450, PCIE5, "NVIDIA H200 data sheet (SXM)"),
    _gpu("B200", 183359, 2250, 8.0, 900, PCIE5, "NVIDIA DGX B200 data sheet, an eighth of the system"),
)
GPUS = {card.name: card for card in _CARDS}
SHORT = {"a100": "A100-80G", "h100": "H100-80G", "3090": "RTX3090", "4090": "RTX4090"}
NETWORK_RATE = 25e9
"""Bytes per second and GPU between machines: 200 Gbit/s, a common choice; an assumption, not a fact about a cluster."""

CONTEXT = 0.55 * GIB
"""A CUDA context with cuBLAS and NCCL buffers, for every process on a card. An assumption: it differs by driver."""
FRAGMENTATION = 0.05
"""Of what comes and goes on a card, lost between blocks of the allocator. An assumption until measured."""
USABLE = 0.97
"""Of a card's memory; the rest covers what no formula knows (driver reserve, workspaces)."""


def find_gpu(name: str) -> Gpu:
    """A card by name, e.g. "h100".

    Raises:
        ConfigError: no such card is known.
    """
    known = {_plain(card.name): card for card in _CARDS} | {short: GPUS[name] for short, name in SHORT.items()}
    key = _plain(name)
    if key in known:
        return known[key]
    close = get_close_matches(key, known, n=1, cutoff=0.3)
    fix = f"one of {', '.join(GPUS)}" + (f"; nearest: {known[close[0]].name}" if close else "")
    raise ConfigError([Problem("gpu", name, "a GPU the planner has no numbers of", fix)])


def _plain(name: str) -> str:
    """Without case, spaces and maker: "NVIDIA H100 80GB" and "h100-80g" are one card."""
    return re.sub("[^a-z0-9]", "", name.lower()).removeprefix("nvidia").replace("gb", "g")


def recognise_gpu(reported_name: str, memory: float) -> Gpu | None:
    """The card that nvidia-smi calls ``reported_name`` and gives ``memory`` bytes; None if it is not in the table."""
    text = reported_name.lower().replace(" ", "")
    family = [card for card in _CARDS if card.name.lower().split("-")[0].removeprefix("rtx") in text]
    exact = [card for card in family if abs(card.memory - memory) < 0.1 * memory]
    return exact[0] if exact else None
