"""The loop of tasks without sampling, with the real one-process engine: what it learns, saves, resumes and exports."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from rlhf_mp.algorithms.supervised import make_task
from rlhf_mp.cluster.ranks import Ranks
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.data.batches import Batches
from rlhf_mp.data.collate import collate
from rlhf_mp.data.examples import ExampleReader
from rlhf_mp.data.order import PromptOrder
from rlhf_mp.data.partition import Cut
from rlhf_mp.models.hf import load_tokenizer, save_checkpoint, stop_token_ids
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.phase import Phase
from rlhf_mp.train.build import make_actor, make_reference, trained_head
from rlhf_mp.trainer.checkpoints import RunCheckpoints
from rlhf_mp.trainer.loop import Schedule
from rlhf_mp.trainer.supervised import SupervisedTrainer

CPU = torch.device("cpu")
TASKS = ["sft", "dpo", "reward_model"]


class Sink:
    def __init__(self):
        self.written = []

    def write(self, step, metrics):
        self.written.append(
            (step, {name: x for name, x in metrics.items() if not name.startswith(("time", "mem", "thr"))})
        )

    def samples(self, step, texts): ...
    def close(self): ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny model, and additions with a right and a wrong answer."""
    path = tmp_path_factory.mktemp("tasks")
    shape = TinyShape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16)
    make_checkpoint(path / "model", character_tokenizer("0123456789+="), shape, std=0.1)
    sums = [(a, b) for a in range(10) for b in range(10)]
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b), "chosen": str(a + b), "rejected": "99"} for a, b in sums]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trainer(
    folder: Path, task: str, run_dir: Path, num_steps: int, *, packed: bool = False, **schedule
) -> SupervisedTrainer:
    config = config_from_dict(
        {
            "trainer": {"task": task, "n_gpus_per_node": 1},
            "data": {"train_batch_size": 16, "max_length": 16, "apply_chat_template": False},
            "actor_rollout_ref": {
                "model": {"path": str(folder / "model"), "dtype": "float32", "use_remove_padding": packed},
                "actor": {"strategy": "torch", "optim": {"lr": 3e-3, "lr_warmup_steps": 2}},
            },
        }
    )
    model = str(folder / "model")
    tokenizer = load_tokenizer(model)
    reader = ExampleReader(task, tokenizer, stop_token_ids(model, tokenizer), config.data)
    examples = reader.read([str(folder / "rows.jsonl")]).examples
    cut = Cut(max_tokens=64, packed=packed)
    batches = Batches(examples[20:], PromptOrder(80, 16, 1, True), (cut, cut), 0, 1)
    engine, task_parts = make_actor(config, CPU, 100), make_task(config)
    checkpoints = RunCheckpoints(
        run_dir,
        Ranks(0, 1),
        keep=1,
        resume_from=None,
        resume=True,
        identity={},
        trained={},
        export=None,
        say=lambda text: None,
    )
    made = SupervisedTrainer(
        schedule=Schedule(num_steps, **({"test_freq": -1, "save_freq": -1, "val_before_train": True} | schedule)),
        task=task_parts,
        actor=engine,
        reference=make_reference(config, CPU, engine) if task_parts.needs_reference else None,
        batches=batches,
        validation=batches.share(examples[:20]),
        checkpoints=checkpoints,
        log=MetricLog([Sink()], lambda sums: sums),
        watch=lambda phase: nullcontext(),
        packed=packed,
    )
    made.config = config
    return made


def written(made: SupervisedTrainer) -> list:
    return made.log.sinks[0].written


@pytest.mark.parametrize("task", TASKS)
def test_it_learns_and_held_out_examples_say_so(folder, tmp_path, task):
    made = trainer(folder, task, tmp_path, num_steps=12)
    made.train()
    losses = [metrics["eval/loss"] for _, metrics in written(made) if "eval/loss" in metrics]
    assert len(losses) == 2 and losses[1] < 0.8 * losses[0]
    steps = [step for step, metrics in written(made) if "train/loss" in metrics]
    assert steps == list(range(1, 13))
    if task != "sft":
        accuracies = [metrics["eval/accuracy"] for _, metrics in written(made) if "eval/accuracy" in metrics]
        assert accuracies[0] == 0.5 and accuracies[1] == 1.0  # equal at first: the reference itself, or a head of 0
        assert losses[0] == pytest.approx(0.693147, abs=1e-5)


def test_a_requested_stop_saves_after_the_step_and_the_resumed_run_takes_it_from_there(folder, tmp_path):
    made = trainer(folder, "sft", tmp_path, num_steps=8)
    made.stop_requested = iter([False, True]).__next__
    made.train()
    assert (made.step, made.finished) == (2, False)
    resumed = trainer(folder, "sft", tmp_path, num_steps=8)
    resumed.resume()
    assert resumed.step == 2


@pytest.mark.parametrize("task", TASKS)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(folder, tmp_path, task):
    straight = trainer(folder, task, tmp_path / "straight", num_steps=8, test_freq=2, save_freq=8)
    straight.train()
    first = trainer(folder, task, tmp_path / "cut", num_steps=4, test_freq=2, save_freq=4)
    first.train()
    second = trainer(folder, task, tmp_path / "cut", num_steps=8, test_freq=2, save_freq=8)
    second.resume()
    assert second.step == 4
    second.train()
    assert without_rss(written(first) + written(second)) == without_rss(written(straight))
    for (name, ours), (_, theirs) in zip(second.actor.weights(), straight.actor.weights(), strict=True):
        assert torch.equal(ours, theirs), name


def without_rss(records):
    return [(step, {name: x for name, x in metrics.items() if "rss" not in name}) for step, metrics in records]


@pytest.mark.parametrize("task", TASKS)
def test_validation_is_the_loss_of_all_held_out_examples_whatever_the_cut(folder, tmp_path, task):
    made = trainer(folder, task, tmp_path, num_steps=3)
    made.train()
    found = made.evaluate()
    batch = collate(made.validation.trajectories)
    everything = [list(range(len(batch.tokens)))]
    made.score(batch, everything)
    scores = made.actor.score([batch])[0]
    loss, _ = made.task.loss(made.task.output(scores), batch, made.validation.minibatches[0].totals)
    assert found["eval/loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_packing_changes_neither_losses_nor_metrics_and_leaves_no_padding(folder, tmp_path, task):
    padded, packed = (trainer(folder, task, tmp_path / str(p), num_steps=3, packed=p) for p in (False, True))
    padded.train()
    packed.train()
    for (step, ours), (_, theirs) in zip(written(packed), written(padded), strict=True):
        names = [name for name in theirs if name.endswith(("loss", "accuracy", "reward", "grad_norm"))]
        assert names and [ours[n] for n in names] == pytest.approx([theirs[n] for n in names], rel=1e-3, abs=1e-5), step
    assert written(packed)[1][1]["train/padding_fraction"] == 0 < written(padded)[1][1]["train/padding_fraction"]


def test_the_reference_scores_held_out_pairs_once(folder, tmp_path):
    made = trainer(folder, "dpo", tmp_path, num_steps=1)
    calls = []
    original = made.reference.score
    made.reference.score = lambda batches: calls.append(1) or original(batches)
    made.evaluate()
    made.evaluate()
    assert len(calls) == 1


def test_without_held_out_examples_nothing_is_evaluated(folder, tmp_path):
    made = trainer(folder, "sft", tmp_path, num_steps=1)
    made.validation = None
    made.train()
    assert made.evaluate() == {} and [step for step, _ in written(made)] == [1]


def test_every_phase_is_watched(folder, tmp_path):
    made, seen = trainer(folder, "dpo", tmp_path, num_steps=1), []
    made.watch = lambda phase: seen.append(phase) or nullcontext()
    made.train_step()
    assert seen == [Phase.score, Phase.train]


def test_a_rank_with_a_part_of_anothers_model_counts_nothing_twice(folder, tmp_path):
    made = trainer(folder, "sft", tmp_path, num_steps=1)
    made.counts = False
    made.train()
    assert [metrics.keys() & {"train/tokens", "eval/loss"} for _, metrics in written(made)] == [set()] * 3


def test_a_reward_model_is_what_transformers_loads_and_is_loaded_back(folder, tmp_path):
    made = trainer(folder, "reward_model", tmp_path / "run", num_steps=3)
    made.train()
    head = trained_head(made.config)
    source = str(folder / "model")
    save_checkpoint(made.actor.weights(), source, tmp_path / "saved", torch.float32, head.saved_config)

    with torch.no_grad():
        batch = collate(made.validation.trajectories)
        ours = made.actor.score([batch])[0]
        theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", dtype=torch.float32).eval()
        assert type(theirs).__name__ == "Qwen3ForSequenceClassification" and theirs.config.num_labels == 1
        assert theirs.config.pad_token_id == 0  # of padding tokens it takes the one before
        torch.testing.assert_close(theirs(batch.tokens).logits[:, 0], ours, atol=1e-5, rtol=0)

        theirs.score.weight.mul_(2.0)  # anybody's reward model
        theirs.save_pretrained(tmp_path / "others")
        loaded = head.load(str(tmp_path / "others"), torch.float32)
        torch.testing.assert_close(head.forward(loaded, batch).rewards, 2 * ours, atol=1e-5, rtol=0)
