"""What a short run leaves behind, over the transports that are not the default, and that others can use its model."""

import asyncio
import json
from pathlib import Path

import pytest
import torch
from job import Job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from rlhf_mp.config.load import config_to_dict, load_config
from rlhf_mp.config.schema import RolloutConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Trajectory
from rlhf_mp.rollout.base import SamplingParams
from rlhf_mp.rollout.sglang_client import SGLangClient
from rlhf_mp.rollout.sglang_server import ServerPlan, SGLangServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]
SHORT = [
    "trainer.timeline=true",
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
    "trainer.save_freq=1",
    "trainer.max_actor_ckpt_to_keep=1",
]
DISK = ["actor_rollout_ref.weight_sync.transport=disk"]
DISTRIBUTED = [
    "actor_rollout_ref.weight_sync.transport=distributed",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.free_cache_engine=true",
]
EXACT = 1e-4  # log-probs of float32 models computed in different ways, in nats


def finished(job: Job) -> Job:
    assert job.wait() == 0, job.output()
    job.assert_nothing_left()
    return job


@pytest.fixture(scope="module")
def disk(start, tmp_path_factory) -> Job:
    """One rank, plain PyTorch, weights through files."""
    return finished(start(tmp_path_factory.mktemp("disk") / "run", *SHORT, *DISK))


@pytest.fixture(scope="module")
def distributed(start, tmp_path_factory) -> Job:
    """Two DeepSpeed ranks, weights by broadcast to one engine of two workers, which sleeps while they train."""
    return finished(start(tmp_path_factory.mktemp("distributed") / "run", *SHORT, *DISTRIBUTED, num_ranks=2))


@pytest.fixture(params=["disk", "distributed"])
def job(request) -> Job:
    return request.getfixturevalue(request.param)


def test_every_version_reaches_the_engines_and_is_what_they_sample_from(job):
    assert list(job.steps()) == [1, 2]
    for record in job.steps().values():
        assert record["sync/changed_tensors_fraction"] == 1
        assert record["sync/canary_logprob_diff"] < EXACT
        assert record["actor/rollout_logprob_difference"] < EXACT
        assert record["rollout/staleness_mean"] == 0


def test_engines_slept_while_the_ranks_worked_where_they_were_asked_to(distributed, disk):
    assert all(record["sleep/s"] < 30 for record in distributed.steps().values())
    assert all("sleep/s" not in record for record in disk.steps().values())  # on a CPU nobody needs the memory


STATES = {"weights", "gradients", "master weights", "optimizer moments"}


def test_what_its_memory_held_is_what_was_planned(job):
    rows = {row["what"]: row["difference"] for row in job.summary()["memory"]}
    held = {what: off for what, off in rows.items() if what.split(" ", 1)[1].removesuffix(" on host") in STATES}
    assert {"actor weights on host", "actor gradients on host", "actor optimizer moments on host"} <= held.keys()
    assert {what: off for what, off in held.items() if abs(off) > 0.05} == {}
    assert {"score peak", "train peak", "sync peak"} <= rows.keys()
    assert "memory of rank 0" in job.output()


def test_the_summary_says_what_came_out_and_from_what(job):
    summary = job.summary()
    assert summary["num_steps"] == 2
    for phase in ("step", "rollout", "score", "train"):
        assert summary["phases"][phase]["mean_s"] > 0
        assert summary["phases"][phase]["tokens_per_s"] > 0
    assert summary["phases"]["sync"]["mean_s"] > 0
    accuracies = [record["eval/accuracy"] for record in job.metrics() if "eval/accuracy" in record]
    assert len(accuracies) == 3
    assert (summary["eval/accuracy_first"], summary["eval/accuracy_last"]) == (accuracies[0], accuracies[-1])
    assert {"rlhf_mp", "torch", "deepspeed", "sglang", "ray", "transformers"} <= summary["versions"].keys()
    assert {"cpu", "num_cores", "memory_gib"} <= summary["machine"].keys()
    assert all(Path(path).exists() for path in summary["paths"].values())


def test_the_resolved_config_starts_the_same_run(job):
    config = load_config(job.run_dir / "config.yaml", [])
    assert config_to_dict(config) == job.summary()["config"]
    assert config.trainer.default_local_dir == str(job.run_dir)


def test_tensorboard_shows_what_metrics_jsonl_holds(job):
    board = EventAccumulator(str(job.run_dir / "tensorboard")).Reload()
    for name in ("rollout/reward_mean", "actor/grad_norm", "time/step_s"):
        shown = {event.step: event.value for event in board.Scalars(name)}
        assert shown == pytest.approx({step: record[name] for step, record in job.steps().items()}, rel=1e-6)


def test_every_validation_leaves_a_page_of_its_rollouts(job):
    pages = sorted((job.run_dir / "rollouts").iterdir())
    assert [page.name for page in pages] == [f"step_{step:06d}.html" for step in range(3)]
    assert f"rollouts {pages[-1]}" in job.output()
    first, last = pages[0].read_text(), pages[-1].read_text()
    assert "log-prob" in first and "advantage -" not in first  # nothing was trained before it
    assert last.count("<article>") == 8 + 2  # log_val_generations, log_samples
    assert "mean advantage" in last and "log-ratio to the reference" in last


def test_prompts_are_tokenised_once_for_all_starts(job):
    assert len([*(job.run_dir / "prompts").glob("*/facts.json")]) == 2  # training, validation


def test_the_timeline_has_every_process_and_adds_up_to_the_metrics(distributed):
    events = json.loads((distributed.run_dir / "timeline.json").read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert sorted(names) == ["rank 0", "rank 1", "scheduler"]
    ranks = [[event for event in events if event["ph"] == "X" and event["pid"] == pid] for pid in (1, 2)]
    steps = [[span for span in spans if span["name"].startswith("step ")] for spans in ranks]
    assert [[span["name"] for span in own] for own in steps] == [["step 1", "step 2"]] * 2
    assert {"rollout", "score", "train", "sync", "validation", "checkpoint"} <= {span["name"] for span in ranks[0]}
    for number, metrics in distributed.steps().items():
        seconds = [train_seconds(own[number - 1], spans) for own, spans in zip(steps, ranks, strict=True)]
        assert sum(seconds) / 2 == pytest.approx(metrics["time/train_s"], rel=0.1, abs=0.05), number
    responses = [event["args"]["value"] for event in events if event["name"] == "SGLang engine 0: responses"]
    assert max(responses) > 0 and responses[-1] == 0


def train_seconds(step: dict, spans: list[dict]) -> float:
    inside = [s for s in spans if s["name"] == "train" and step["ts"] < s["ts"] < step["ts"] + step["dur"]]
    return sum(span["dur"] for span in inside) / 1e6


def test_checkpoint_and_export_take_the_disk_that_was_planned(job):
    job.assert_disk_as_planned()


def test_only_as_many_checkpoints_as_wanted_stay(job):
    assert [folder.name for folder in (job.run_dir / "checkpoints").iterdir()] == ["global_step_000002"]


def test_other_processes_see_nothing_of_the_swaps_on_disk(disk):
    assert not (disk.run_dir / "weights").exists()


@torch.no_grad()
def test_the_exported_model_computes_what_the_trained_one_does(disk):
    exported = AutoModelForCausalLM.from_pretrained(disk.run_dir / "huggingface", dtype=torch.float32).eval()
    trained = AutoModelForCausalLM.from_config(exported.config, dtype=torch.float32).eval()
    state = torch.load(disk.run_dir / "checkpoints/global_step_000002/actor/torch_engine.pt", weights_only=True)
    trained.load_state_dict(state["module"])
    tokens = torch.arange(14)[None]
    torch.testing.assert_close(exported(tokens).logits, trained(tokens).logits, rtol=0, atol=0)


@torch.no_grad()
def test_a_fresh_server_serves_the_exported_model(distributed, tmp_path):
    folder = distributed.run_dir / "huggingface"
    plan = ServerPlan(index=0, model_path=str(folder), on_cpu=True, gpus=(), seed=1)
    rollout = RolloutConfig(dtype="float32", max_model_len=64, max_num_seqs=8)
    server = SGLangServer(plan, rollout, context=64, log_file=tmp_path / "engine.log")
    try:
        server.wait_ready(600)
        prompt = [5, 12, 7, 13]  # "3+5="
        completions = asyncio.run(sample(server, prompt))
    finally:
        server.stop()
    batch = collate(
        [Trajectory(prompt, c.ids, c.logprobs, [True] * len(c.ids), 0.0, 0, 0, c.finish_reason) for c in completions]
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logprobs = model(batch.tokens).logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
    ours = batch.mask[:, 1:]
    torch.testing.assert_close(logprobs * ours, batch.rollout_logprobs[:, 1:] * ours, rtol=0, atol=EXACT)


async def sample(server: SGLangServer, prompt: list[int]) -> list:
    client = SGLangClient(server.name, server.address, timeout_s=60)
    try:
        return await client.generate(prompt, SamplingParams(1.0, 1.0, -1, 16, (1,)), seeds=range(8))
    finally:
        await client.close()
