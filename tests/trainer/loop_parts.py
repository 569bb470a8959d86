"""A trainer whose parts write down what they are asked."""

from contextlib import contextmanager

import torch

from rlhf_mp.algorithms.advantages import Estimate
from rlhf_mp.algorithms.base import Algorithm
from rlhf_mp.config.algorithm import AlgorithmConfig
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.types import MiniBatch, Passes, SampleText, Share, Totals, Trajectory
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.phase import Phase
from rlhf_mp.trainer.loop import Schedule
from rlhf_mp.trainer.trainer import Trainer

# Two prompts with two responses each; rows of 3, 5, 4 and 3 tokens.
TRAJECTORIES = [
    Trajectory([7], [2, 1], [-0.1, -0.2], [True] * 2, 1.0, 0, 0, "stop"),
    Trajectory([7], [3, 3, 3, 3], [-0.3] * 4, [True] * 4, 0.0, 0, 0, "length"),
    Trajectory([8, 8], [4, 1], [-0.4] * 2, [True] * 2, 0.0, 1, 0, "stop"),
    Trajectory([8, 8], [5], [-0.5], [True], 1.0, 1, 0, "length"),
]
CRITIC = Passes(score_rows=[[1, 0], [2, 3]], minibatches=[MiniBatch([[0], [1]], Totals(12, 4))] * 2)
SHARE = Share(
    TRAJECTORIES,
    score_rows=[[1], [2, 0], [3]],
    minibatches=[MiniBatch([[1, 0]], Totals(12, 4)), MiniBatch([[2], [3]], Totals(6, 4))],
    metrics={"rollout/reward_mean": (2.0, 4)},
    samples=[SampleText("7", "21", 1.0, "21")],
)


def token_times(factor: float, batch) -> torch.Tensor:
    """Log-probs that tell which token of which model they are of."""
    return batch.tokens * factor * batch.mask


class Scorer:
    def __init__(self, name: str, factor: float, events: list):
        self.name, self.factor, self.events = name, factor, events

    def score(self, micro_batches):
        self.events.append(("score", self.name))
        return [token_times(self.factor, batch) for batch in micro_batches]


class Actor(Scorer):
    """Its weight is how many optimizer steps it has taken."""

    grad_norm = 0.5

    def __init__(self, events: list):
        super().__init__("actor", 0.01, events)
        self.weight, self.batches = 0, []

    def train_step(self, micro_batches, totals, loss_fn):
        self.events.append(("train", totals.num_tokens))
        self.batches.append((micro_batches, loss_fn))
        self.weight += 1
        return {"grad_norm": (self.grad_norm, 1), "pg_loss": (6.0, 2.0)}


class Critic(Actor):
    grad_norm = 0.25

    def __init__(self, events: list):
        super().__init__(events)
        self.name, self.factor = "critic", 0.03

    def train_step(self, micro_batches, totals, loss_fn):
        metrics = super().train_step(micro_batches, totals, loss_fn)
        self.events[-1] = ("train critic", totals.num_tokens)
        return metrics


class Rollouts:
    def __init__(self, events: list):
        self.events, self.share = events, SHARE

    def fetch(self, step):
        self.events.append(("fetch", step))
        return self.share

    def publish(self, version):
        self.events.append(("live", version))

    def evaluate(self):
        self.events.append(("evaluate",))
        return {"accuracy": (3.0, 4.0)}, [SampleText("9", "9", 1.0, "9")]


class Swap:
    def __init__(self, events: list):
        self.events, self.must_differ = events, []

    def push(self, actor, version, *, must_differ):
        self.events.append(("push", version, actor.weight))
        self.must_differ.append(must_differ)
        return {"sync/bytes": (100.0, 1)}

    def sleep(self):
        return {"sleep/s": (0.5, 1)}

    def reclaim(self):
        pass


class Checkpoints:
    """Resumes at ``step`` if it is not 0."""

    def __init__(self, events: list, step: int):
        self.events, self.step = events, step

    def save(self, trainer):
        self.events.append(("save", trainer.step))

    def settle(self, *, wait):
        pass

    def load_newest(self, trainer):
        trainer.step = self.step

    def write(self, trainer, folder):
        self.events.append(("write", trainer.step, folder.name))

    def read(self, trainer, folder):
        self.events.append(("read", folder.name))
        trainer.step = int(folder.name)


class Sink:
    def __init__(self):
        self.written, self.texts = [], []

    def write(self, step, metrics):
        self.written.append((step, dict(metrics)))

    def samples(self, step, texts):
        self.texts.append((step, [text.response for text in texts]))

    def close(self):
        pass


def trainer(num_steps: int, events: list, *, resumed_at: int = 0, reference: bool = False, **changed) -> Trainer:
    schedule = {"test_freq": -1, "save_freq": -1, "val_before_train": False, "critic_warmup": 0}
    schedule |= {name: changed.pop(name) for name in list(changed) if name in schedule}

    @contextmanager
    def watch(phase: Phase):
        watched.append(phase)
        yield
        watched.pop()

    watched: list[Phase] = []
    algorithm = Algorithm(
        estimator=lambda batch, settings: Estimate(batch.rewards[:, None] * batch.mask),
        settings=AlgorithmConfig(),
        actor=ActorConfig(),
        policy_loss=lambda output, batch, totals: None,
        needs_old_logprobs=changed.pop("needs_old_logprobs", False),
        needs_reference=reference,
    )
    parts = {
        "actor": Actor(events),
        "reference": Scorer("reference", 0.02, events) if reference else None,
        "rollouts": Rollouts(events),
        "swap": Swap(events),
        "checkpoints": Checkpoints(events, resumed_at),
        "log": MetricLog([Sink()], lambda sums: sums),
        "has_validation": True,
    }
    made = Trainer(schedule=Schedule(num_steps, **schedule), algorithm=algorithm, watch=watch, **parts | changed)
    made.watched = watched
    return made
