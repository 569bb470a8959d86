"""Fine-tuning, preference optimisation and reward models: two real ranks compute what one process computes."""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from torchrun import on_ranks

from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint

pytestmark = pytest.mark.engine
WORKER = Path(__file__).with_name("task_worker.py")
ACTOR = "actor_rollout_ref.actor"
ZERO = [f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.fsdp_config.optimizer_offload=true"]
MEGATRON = f"{ACTOR}.strategy=megatron"
needs_megatron = pytest.mark.skipif(find_spec("mbridge") is None, reason="Megatron is not installed")
BACKENDS = [
    pytest.param(ZERO, id="ZeRO-3 with offload"),
    pytest.param([MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=2"], id="Megatron TP2", marks=needs_megatron),
    pytest.param(
        [MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=2"], id="Megatron PP2", marks=needs_megatron
    ),
]
TOLERANCE = 1e-5
OF_SCORES = 5e-5  # log-probs add up what weights differ by


@pytest.fixture(scope="module", params=BACKENDS)
def report(request, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("tasks")
    shape = TinyShape(hidden=32, layers=2, heads=2, kv_heads=2, head_dim=16)
    make_checkpoint(folder / "model", character_tokenizer("0123456789+="), shape, std=0.2)
    sums = [(a, b) for a in range(8) for b in range(0, 80, 11)]
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "chosen": str(a + b), "rejected": "1234"} for a, b in sums]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    on_ranks(WORKER, 2, folder, str(folder), *request.param)
    return json.loads((folder / "report.json").read_text())


@pytest.mark.parametrize("task", ["sft", "dpo", "reward_model"])
def test_two_ranks_train_like_one_process(report, task):
    found = report[task]
    assert found["fell"] > 1e-3, "standing still would agree too"
    for what in ("loss", "accuracy", "grad_norm", "weights"):
        assert found[what] <= TOLERANCE, (what, found)
    assert found["score"] <= OF_SCORES, found
