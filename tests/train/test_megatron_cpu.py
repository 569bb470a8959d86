"""Megatron's source for the CPU: only names change, only there, and only when asked."""

import types
from importlib.util import find_spec

import pytest
import torch

from rlhf_mp.train import megatron_cpu


def run(source: str, **names) -> dict:
    space = {"torch": torch, megatron_cpu.NAME: megatron_cpu.cpu_accelerator(), **names}
    exec(megatron_cpu.retargeted(source, "source.py"), space)
    return space


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("got = torch.zeros(2, device='cuda').device.type", "cpu"),
        ("n = 3\ngot = torch.zeros(2, device=f'cuda:{n}').device.type", "cpu"),
        ("got = torch.zeros(2, device=torch.cuda.current_device()).device.type", "cpu"),
        ("got = torch.ones(2).cuda(0, non_blocking=True).sum().item()", 2.0),
        ("got = torch.ones(2).is_cuda", True),
        ("kept = torch.ones(2).cpu().pin_memory()\ngot = kept.is_cuda", False),
        ("kept = torch.ones(2).cpu().pin_memory()\ngot = kept.detach().clone().float().is_cuda", False),
        ("got = torch.ones(2).type() == 'torch.cuda.FloatTensor'", True),
        ("got = torch.empty(2, pin_memory=True).is_pinned()", False),
        ("got = 'a cuda stream'", "a cuda stream"),
        ("got = torch.arange(3).mul(2).tolist()", [0, 2, 4]),
    ],
)
def test_names_of_the_gpu_mean_the_cpu_and_everything_else_stays(source, expected):
    assert run(source)["got"] == expected


def test_a_stream_is_not_recorded_on():
    assert run("x = torch.ones(1)\ngot = x.record_stream(None) is x")["got"]


def test_lines_of_errors_are_those_of_the_original():
    with pytest.raises(ZeroDivisionError) as error:
        run("x = torch.zeros(1, device='cuda')\n\nx = x.cuda()\ny = 1 / 0")
    assert error.traceback[-1].lineno == 3  # counted from 0


@pytest.mark.skipif(find_spec("mbridge") is None, reason="Megatron is not installed")
def test_only_megatron_is_rewritten():
    before = torch.cuda
    megatron_cpu.install()
    megatron_cpu.install()  # once is enough, twice is harmless
    from megatron.core import parallel_state

    assert isinstance(vars(parallel_state)[megatron_cpu.NAME], types.ModuleType)
    assert torch.cuda is before
    assert megatron_cpu.NAME not in vars(torch.nn.functional)
