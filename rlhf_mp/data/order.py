"""The order prompts are visited in: a function of the seed and the position, so a resumed run sees the same ones."""

import hashlib
import random
from array import array
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from rlhf_mp.config.schema import DataConfig
from rlhf_mp.errors import CheckpointError, ConfigError, Problem


class Order(Protocol):
    """Batches without end."""

    batches_per_epoch: int

    def next(self) -> tuple[int, list[int]]:
        """The epoch, counted from 0, and the indices of the next batch's prompts."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where ``state_dict`` was taken.

        Raises:
            CheckpointError: it was taken with other prompts, batch size, seed or settings.
        """
        ...


def make_order(sizes: Sequence[int], keys: np.ndarray | None, data: DataConfig) -> Order:
    """What ``data`` asks for.

    Args:
        sizes: prompts of each entry of ``data.train_files``; their indices follow each other.
        keys: what ``data.curriculum_key`` says of each prompt, None without it.

    Raises:
        ConfigError: too few prompts for a batch, or none of a file that has a share of it.
    """
    if keys is not None and data.curriculum_order == "descending":
        keys = -keys
    if data.train_weights:
        if empty := [file for file, size in zip(data.train_files, sizes, strict=True) if not size]:
            reason = f"no prompt is left of {', '.join(empty)}: all are longer than data.max_prompt_length"
            fix = "a larger data.max_prompt_length, or leave the file out"
            raise ConfigError([Problem("data.train_weights", data.train_weights, reason, fix)])
        return MixedOrder(sizes, data.train_weights, data.train_batch_size, data.seed, data.shuffle, keys)
    return PromptOrder(sum(sizes), data.train_batch_size, data.seed, data.shuffle, keys)


class Permutations:
    """Passes over some prompts, each in an order of its own.

    Args:
        keys: visit small ones first in every pass; equal ones are shuffled, or stay as they are in the file.
    """

    def __init__(self, num_prompts: int, seed: str, shuffle: bool, keys: np.ndarray | None):
        self.num_prompts, self.seed, self.shuffle, self.keys = num_prompts, seed, shuffle, keys
        self._made: tuple[int, array] | None = None

    def __getitem__(self, number: int) -> array:
        """The order of pass ``number``. The last one is kept: shuffling a million takes half a second."""
        if self._made is None or self._made[0] != number:
            order = array("q", range(self.num_prompts))
            if self.shuffle:
                random.Random(f"{self.seed}/{number}").shuffle(order)
            if self.keys is not None:
                order = array("q", np.asarray(order)[np.argsort(self.keys[order], kind="stable")].tobytes())
            self._made = number, order
        return self._made[1]


class PromptOrder:
    """All prompts alike. An epoch is one pass.

    The last, incomplete batch of an epoch is dropped; with shuffling other prompts fall into it every epoch.
    """

    def __init__(self, num_prompts: int, batch_size: int, seed: int, shuffle: bool, keys: np.ndarray | None = None):
        check_batch_size(num_prompts, batch_size)
        self.batch_size, self.batches_per_epoch = batch_size, num_prompts // batch_size
        self._passes = Permutations(num_prompts, str(seed), shuffle, keys)
        self._identity = identity(num_prompts, batch_size, seed, shuffle, keys)
        self.epoch = self.batch = 0  # of the next batch

    def next(self) -> tuple[int, list[int]]:
        epoch, start = self.epoch, self.batch * self.batch_size
        indices = list(self._passes[epoch][start : start + self.batch_size])
        epochs, self.batch = divmod(self.batch + 1, self.batches_per_epoch)
        self.epoch += epochs
        return epoch, indices

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity, "epoch": self.epoch, "batch": self.batch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(self._identity, state)
        self.epoch, self.batch = state["epoch"], state["batch"]


class MixedOrder:
    """Files take turns by weight. After any number of prompts each has given its share, to within one prompt.

    A file goes through its prompts in passes of its own: none comes again before all of the file were there.
    An epoch is as many batches as all prompts together fill, whatever the weights.

    Args:
        sizes: prompts of each file.
        weights: one for each file; only their ratios matter.

    Source: the quota method of Balinski and Young, "The Quota Method of Apportionment" (1975): of the files that
        would not exceed their share, rounded up, the one whose next prompt is due first.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        batch_size: int,
        seed: int,
        shuffle: bool,
        keys: np.ndarray | None = None,
    ):
        check_batch_size(sum(sizes), batch_size)
        self.batch_size, self.batches_per_epoch = batch_size, sum(sizes) // batch_size
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means a tenth, not its nearest float
        self.shares = [weight / sum(exact) for weight in exact]
        self._starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._passes = [
            Permutations(size, f"{seed}/{i}", shuffle, None if keys is None else keys[start : start + size])
            for i, (start, size) in enumerate(zip(self._starts, sizes, strict=True))
        ]
        self._identity = identity(sum(sizes), batch_size, seed, shuffle, keys)
        self._identity |= {"sizes": list(sizes), "weights": list(weights)}
        self.drawn = [0] * len(sizes)

    def next(self) -> tuple[int, list[int]]:
        epoch = sum(self.drawn) // self.batch_size // self.batches_per_epoch
        return epoch, [self._next_prompt() for _ in range(self.batch_size)]

    def _next_prompt(self) -> int:
        number = sum(self.drawn) + 1
        eligible = [i for i, share in enumerate(self.shares) if self.drawn[i] < number * share]
        file = min(eligible, key=lambda i: (self.drawn[i] + 1) / self.shares[i])
        passed, position = divmod(self.drawn[file], self._passes[file].num_prompts)
        self.drawn[file] += 1
        return self._starts[file] + self._passes[file][passed][position]

    def state_dict(self) -> dict[str, Any]:
        return {**self._identity, "drawn": list(self.drawn)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_identity(self._identity, state)
        self.drawn = list(state["drawn"])


def identity(num_prompts: int, batch_size: int, seed: int, shuffle: bool, keys: np.ndarray | None) -> dict[str, Any]:
    """What must be equal for an order to continue."""
    found: dict[str, Any] = {"num_prompts": num_prompts, "batch_size": batch_size, "seed": seed, "shuffle": shuffle}
    return found if keys is None else found | {"curriculum": hash_of(keys)}


def hash_of(keys: np.ndarray) -> str:
    """Of the order that ``keys`` give, so that another column or direction is noticed."""
    return hashlib.sha256(np.argsort(keys, kind="stable").tobytes()).hexdigest()[:16]


def check_batch_size(num_prompts: int, batch_size: int) -> None:
    if num_prompts < batch_size:
        reason = f"there are only {num_prompts} prompts, so no batch is ever complete"
        fix = f"data.train_batch_size={num_prompts} or less"
        raise ConfigError([Problem("data.train_batch_size", batch_size, reason, fix)])


def check_identity(own: dict[str, Any], state: dict[str, Any]) -> None:
    settings = {name: state[name] for name in state if name not in ("epoch", "batch", "drawn")}
    if settings != own:
        raise CheckpointError(f"the order of prompts was {settings} in the checkpoint, now it is {own}")
