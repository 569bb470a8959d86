"""The pipeline's stages hand their models on, on either backend, and the table says what each of them changed."""

from pathlib import Path

import pytest

from rlhf_mp.config.load import load_config
from rlhf_mp.quickstart import preferences, problems
from rlhf_mp.rlhf_demo import ROOT, stages, table, words

OUT = Path("runs/demo")
STAGES = {stage.name: stage for stage in stages(OUT)}


@pytest.mark.parametrize("strategy", ["deepspeed", "megatron"])
@pytest.mark.parametrize("name", STAGES)
def test_every_stage_is_a_valid_run_on_either_backend(name, strategy):
    config = load_config(ROOT / "configs" / STAGES[name].config, words(STAGES[name], OUT, strategy))
    assert config.actor_rollout_ref.actor.strategy == strategy
    assert config.trainer.default_local_dir == str(OUT / name)
    assert config.data_parallel_size == 2


def test_each_stage_starts_from_what_the_one_before_left():
    given = {name: dict(word.split("=") for word in words(stage, OUT, "deepspeed")) for name, stage in STAGES.items()}
    model = "actor_rollout_ref.model.path"
    assert given["sft"][model] == str(OUT / "base")
    assert given["rm_base"][model] == str(OUT / "sft" / "huggingface")
    assert given["rm"][model] == str(OUT / "rm_base" / "huggingface")
    assert given["ppo"][model] == str(OUT / "sft" / "huggingface")
    assert given["ppo"]["reward_model.model.path"] == str(OUT / "rm" / "huggingface")


def test_the_table_by_hand():
    summaries = {
        STAGES["sft"]: {"num_steps": 300, "seconds": 75, "eval/loss_first": 3.4671, "eval/loss_last": 0.25},
        STAGES["ppo"]: {"num_steps": 150, "seconds": 400, "eval/accuracy_first": 0.31, "eval/accuracy_last": 0.875},
    }
    assert table(summaries).splitlines() == [
        "stage     steps     time  measure                       before   after",
        "sft         300    1m15s  loss of held-out answers       3.467   0.250",
        "ppo         150    6m40s  right held-out answers         0.310   0.875",
    ]


def test_a_wrong_answer_is_never_the_right_one_and_comes_in_all_kinds():
    rows = problems(seed=0)[:500]
    pairs = preferences(rows, seed=0)
    answers = {row["prompt"]: row["answer"] for row in rows}
    assert len(pairs) == 4 * len(rows) and preferences(rows, seed=0) == pairs
    assert all(pair["chosen"] == answers[pair["prompt"]] != pair["rejected"] for pair in pairs)
    lengths = [len(pair["rejected"]) for pair in pairs]
    assert {n: round(lengths.count(n) / len(lengths), 1) for n in (2, 3, 4)} == {2: 0.1, 3: 0.8, 4: 0.1}
