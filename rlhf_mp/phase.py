"""The parts of a training step. Timers, metrics, the planner and the tables all use these names."""

from enum import Enum


class Phase(Enum):
    rollout = "rollout"  # engines sample, rewards are computed
    score = "score"  # old and reference log-probs
    train = "train"  # forward, backward, optimizer
    sync = "sync"  # new weights into the engines
