"""Selective checkpointing computes the cheap again and nothing else: counted in operations and in bytes."""

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_mp.config.schema import ModelConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Trajectory
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint
from rlhf_mp.observe.live_bytes import LiveBytes
from rlhf_mp.train.build import model_builder

LAYERS = 3
MODES = {
    "none": {"enable_gradient_checkpointing": False},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("small")
    make_checkpoint(folder, character_tokenizer("0123456789+="), TinyShape(hidden=32, layers=LAYERS), std=0.2)
    return str(folder)


def trained(path: str, *, packed: bool = False, **memory) -> nn.Module:
    model, head = ModelConfig(path, "float32", **memory), PolicyHead(packed=packed)
    return model_builder(model, "torch", head, checkpointing=model.enable_gradient_checkpointing)().train()


def loss_of(module: nn.Module, *, packed: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randint(2, 14, (n,), generator=generator).tolist() for n in (40, 25, 33)]
    batch = collate([Trajectory(row[:5], row[5:], [0.0] * (len(row) - 5), [True] * (len(row) - 5), 0.0, 0, 0, "stop")
                     for row in rows])  # fmt: skip
    return (PolicyHead(packed=packed).forward(module, batch).logprobs * batch.mask).sum()


class Counted(TorchDispatchMode):
    """How often each operation runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("packed", [False, True])
def test_gradients_are_bit_for_bit_those_without_it(path, packed, every):
    found = []
    for memory in (MODES["none"], MODES["selective"] | {"checkpoint_every_n_layers": every}):
        module = trained(path, packed=packed, **memory)
        loss = loss_of(module, packed=packed)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(x.abs().max() > 0 for x in found[0])


def test_gradients_in_lower_precision_are_the_same_too(path):
    found = []
    for memory in (MODES["none"], MODES["selective"]):
        module = trained(path, **memory)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(module)
        loss.backward()
        found.append([p.grad for p in module.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_no_matrix_product_and_no_attention_runs_again_but_norms_do(path):
    calls = {}
    for mode, memory in MODES.items():
        module = trained(path, **memory)
        with Counted() as counted:
            loss_of(module).backward()
        calls[mode] = counted.calls
    attention = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert [calls[mode][attention] for mode in MODES] == [LAYERS, LAYERS, 2 * LAYERS]
    # a layer has 7 matrices; the last product is not computed again, nothing needs what it gives
    assert calls["selective"]["aten.mm"] == calls["none"]["aten.mm"] == calls["full"]["aten.mm"] - 6 * LAYERS
    for cheap in ("aten.silu", "aten.rsqrt"):
        assert calls["selective"][cheap] == calls["full"][cheap] > calls["none"][cheap]


def test_what_is_kept_between_none_and_a_layers_input_is_what_products_and_attention_give(path):
    kept = {}
    for mode, memory in MODES.items():
        module = trained(path, **memory)
        with LiveBytes([*module.parameters(), *module.buffers()]) as live:
            loss = loss_of(module)
            kept[mode] = live.now
        loss.backward()
    shape = module.config
    q = shape.num_attention_heads * shape.head_dim
    k = shape.num_key_value_heads * shape.head_dim
    outputs = q + 2 * k + q + shape.hidden_size + 2 * shape.intermediate_size + shape.hidden_size
    positions = 3 * 40
    logsumexp = 4 * shape.num_attention_heads
    assert kept["selective"] - kept["full"] == LAYERS * positions * (4 * outputs + logsumexp)
    assert kept["selective"] < 0.75 * kept["none"]
