"""``attn_implementation`` says how attention is computed, not what it computes."""

import pytest
import torch

from rlhf_mp.config.schema import ModelConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Trajectory
from rlhf_mp.models import packed_attention
from rlhf_mp.models.heads import Head, PolicyHead, RewardHead, ValueHead
from rlhf_mp.models.packed_attention import PACKED_SDPA, attention_for
from rlhf_mp.train.build import model_builder

BF16, FP32 = torch.bfloat16, torch.float32


def result_and_gradients(path, head: Head, attention: str) -> list[torch.Tensor]:
    """Of three sequences of unequal lengths, through a model that the config asks for."""
    model = ModelConfig(str(path), "float32", attn_implementation=attention)
    module = model_builder(model, "torch", head)()
    assert module.config._attn_implementation == ("sdpa" if attention == "auto" else attention)
    if "score" in head.new_modules:  # a new one is 0, and so would be every result
        torch.nn.init.normal_(module.score.weight, std=0.02, generator=torch.Generator().manual_seed(0))
    rows = [([3, 4, 5], [6, 7]), ([8], [9, 10, 11, 12]), ([5, 9, 4, 3], [13])]
    batch = collate([Trajectory(*row, [0.0] * len(row[1]), [True] * len(row[1]), 0.0, 0, 0, "stop") for row in rows])
    result = head.score(head.forward(module, batch), batch)
    result.sum().backward()
    return [result.detach(), *(p.grad for p in module.parameters() if p.grad is not None)]


@pytest.mark.parametrize("head", [PolicyHead(), ValueHead(), RewardHead()], ids=lambda head: head.task)
def test_eager_attention_computes_what_sdpa_does(tiny_checkpoint, head):
    eager = result_and_gradients(tiny_checkpoint, head, "eager")
    assert len(eager) > 20 and all(x.abs().max() > 0 for x in eager)
    for chosen in ("sdpa", "auto"):
        other = result_and_gradients(tiny_checkpoint, head, chosen)
        torch.testing.assert_close(other, eager, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("chosen", "dtype", "packed", "flash_is_there", "expected"),
    [
        ("auto", BF16, False, True, "sdpa"),
        ("eager", BF16, False, True, "eager"),
        ("flash_attention_2", BF16, False, True, "flash_attention_2"),
        ("auto", BF16, True, True, "flash_attention_2"),
        ("auto", FP32, True, True, PACKED_SDPA),
        ("auto", BF16, True, False, PACKED_SDPA),
        ("sdpa", BF16, True, True, PACKED_SDPA),
        ("flash_attention_2", FP32, True, True, "flash_attention_2"),  # weights of plain torch; it computes in less
    ],
)
def test_packed_rows_take_the_kernel_that_can(monkeypatch, chosen, dtype, packed, flash_is_there, expected):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: flash_is_there)
    monkeypatch.setattr(packed_attention, "find_spec", lambda name: flash_is_there or None)
    assert attention_for(chosen, dtype, packed=packed) == expected


def test_eager_attention_of_packed_rows_is_refused():
    with pytest.raises(ValueError, match="packed row"):
        attention_for("eager", FP32, packed=True)
