"""The examples, and the Python interface, in real jobs: a loop of one's own is the launcher's, bit for bit."""

import json
import subprocess
from pathlib import Path

import pytest
from job import ENGINE_ROUNDING, ROOT, environment

from rlhf_mp.api import Trainer
from rlhf_mp.host_allocator import find_library
from rlhf_mp.observe.sinks import read_jsonl

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
HERE = Path(__file__).parent
PPO = ["algorithm.adv_estimator=gae", "trainer.total_training_steps=2", "trainer.test_freq=-1"]
PPO += ["critic.fsdp_config.param_offload=false", "critic.fsdp_config.optimizer_offload=false"]
DECIDED = ("actor/", "critic/", "rollout/reward", "rollout/response", "algorithm/")


def decided(job) -> dict[int, dict[str, float]]:
    """What a step computed, without what it took to."""
    return {
        number: {
            name: value
            for name, value in record.items()
            if name.startswith(DECIDED) and not name.startswith(ENGINE_ROUNDING)
        }
        for number, record in job.steps().items()
    }


def test_a_loop_of_ones_own_trains_as_the_launcher_does(start, tmp_path):
    launched, own = start(tmp_path / "launched", *PPO), None
    assert launched.wait() == 0, launched.output()
    # it takes turns with its engines, too: more than the launcher's order of things has to work
    own = start(tmp_path / "own", *PPO, "trainer.offload_during_rollout=true", script=HERE / "own_loop.py")
    assert own.wait() == 0, own.output()
    own.assert_nothing_left()
    expected, found = decided(launched), decided(own)
    assert len(expected[1]) > 20
    assert {number: found[number] for number in (1, 2)} == expected
    said = json.loads(own.output().splitlines()[-1])
    assert said["same"] == [True, True, True] and 0 <= said["accuracy"] <= 1


def test_the_example_runs_on_two_ranks_and_an_error_in_a_loop_is_what_one_reads(start, tmp_path):
    example = start(
        tmp_path / "example",
        "trainer.total_training_steps=2",
        num_ranks=2,
        script=HERE.parents[1] / "examples" / "custom_loop.py",
    )
    assert example.wait() == 0, example.output()
    example.assert_nothing_left()
    assert "right held-out answers" in example.output()
    assert example.steps()[2]["actor/weight_mean"] == pytest.approx(1, abs=0.5)
    assert (
        "reference weights" not in example.output()
    )  # the advantages and the loss are its own: nothing else is scored


def test_a_wrong_config_ends_the_script_with_every_problem(capsys):
    with pytest.raises(SystemExit) as end:
        Trainer({"data": {"train_batch_sise": 1}}, ["trainer.nnodes=0"])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert "data.train_batch_size" in said and "trainer.nnodes = 0" in said


@pytest.mark.long
def test_ppo_with_every_memory_lever_on(inputs, tmp_path):
    """examples/run_memory_optimized_ppo.sh, on a model that is given and with the other ranks' malloc."""
    words = {word.split("=")[0]: word for word in inputs}
    model = words.pop("actor_rollout_ref.model.path").split("=")[1]
    own = [
        *words.values(),
        f"trainer.default_local_dir={tmp_path / 'run'}",
        "trainer.total_training_steps=2",
        "actor_rollout_ref.model.dtype=float32",
        "data.prompt_key=prompt",
        "data.apply_chat_template=false",
        "data.max_prompt_length=16",
        "data.max_response_length=8",
        "reward.name=exact",
        *(["trainer.host_allocator=jemalloc"] if find_library("jemalloc") else []),
    ]
    done = subprocess.run(
        [ROOT / "examples" / "run_memory_optimized_ppo.sh", *own],
        env=environment() | {"MODEL_PATH": model}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "jemalloc malloc" in done.stdout or not find_library("jemalloc")
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    record = [record for record in records if "time/step_s" in record][-1]
    assert record["train/padding_fraction"] == 0 and record["critic/grad_norm"] > 0
