"""Who trains on what: a step's trajectories cut into mini-batches, ranks and micro-batches. Pure Python.

The rules: a prompt's group is never split over ranks or mini-batches (R2); counts are of the whole mini-batch over
all ranks (R3); every rank gets equally many micro-batches, because each forward and backward is collective.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_mp.data.types import MiniBatch, Passes, Totals


@dataclass(frozen=True)
class Cut:
    """How much one micro-batch may hold: tokens or sequences, exactly one of them."""

    max_tokens: int | None = None
    max_sequences: int | None = None
    packed: bool = False  # a row takes its own tokens, and not as many as the longest

    def __post_init__(self) -> None:
        if (self.max_tokens is None) == (self.max_sequences is None):
            raise ValueError(f"{self}: set exactly one of max_tokens and max_sequences")

    def room(self, longest: int) -> int:
        """Of an empty micro-batch whose first row will be its longest, in tokens if packed, otherwise in rows."""
        if self.max_sequences is not None:
            return self.max_sequences
        return self.max_tokens if self.packed else self.max_tokens // longest

    def need(self, length: int) -> int:
        """Of a row, in the same unit."""
        return length if self.packed and self.max_tokens is not None else 1


@dataclass(frozen=True)
class Cuts:
    """How a model beside the actor goes over the same rows."""

    train: Cut
    score: Cut
    epochs: int


@dataclass(frozen=True)
class RankPlan:
    """One data-parallel rank's part of a step."""

    rows: list[int]  # its trajectories, as indices of the step's list
    score_rows: list[list[int]]  # forward-only micro-batches, as indices of ``rows``
    minibatches: list[MiniBatch]  # also as indices of ``rows``
    critic: Passes | None = None


def plan_step(
    lengths: Sequence[int],
    mask_counts: Sequence[int],
    group_ids: Sequence[int],
    *,
    num_ranks: int,
    groups_per_minibatch: int,
    ppo_epochs: int,
    train_cut: Cut,
    score_cut: Cut,
    critic: Cuts | None = None,
    whole_groups: bool = False,
) -> list[RankPlan]:
    """Cut a step for all ranks, the same way wherever it is called.

    Args:
        lengths: prompt and response tokens of each trajectory.
        mask_counts: tokens of each trajectory that the policy chose.
        group_ids: mini-batches take groups in order of appearance, so the order of prompts decides.
        ppo_epochs: how often the list of mini-batches is repeated.
        critic: it gets the actor's mini-batches, cut by itself.
        whole_groups: keep a group in one micro-batch too, in its own order.

    Raises:
        ValueError: a mini-batch has fewer groups than there are ranks, or a row is longer than ``max_tokens``.
    """
    if not len(lengths) == len(mask_counts) == len(group_ids):
        raise ValueError(f"{len(lengths)} lengths, {len(mask_counts)} mask counts and {len(group_ids)} group ids")
    groups = rows_of_groups(group_ids)
    chunks = [groups[i : i + groups_per_minibatch] for i in range(0, len(groups), groups_per_minibatch)]
    shares = [balance(chunk, lengths, num_ranks) for chunk in chunks]  # [mini-batch][rank] -> rows
    totals = [count(chunk, mask_counts) for chunk in chunks]

    rows_by_rank = [[row for share in shares for row in share[rank]] for rank in range(num_ranks)]
    local = [{row: i for i, row in enumerate(rows)} for rows in rows_by_rank]

    units = rows_of_groups(group_ids if whole_groups else range(len(group_ids)))  # what stays in one micro-batch
    unit_of = {rows[0]: rows for rows in units}

    def cut(rows_by_rank: Sequence[list[int]], by: Cut) -> list[list[list[int]]]:
        return cut_equally([[unit_of[row] for row in rows if row in unit_of] for rows in rows_by_rank], lengths, by)

    def passes(of: Cuts) -> list[Passes]:
        scored = cut(rows_by_rank, of.score)
        cuts = [cut(share, of.train) for share in shares]  # [mini-batch][rank] -> micro-batches
        found = []
        for rank in range(num_ranks):
            parts = (relabel(of_ranks[rank], local[rank]) for of_ranks in cuts)
            minibatches = [MiniBatch(part, total) for part, total in zip(parts, totals, strict=True)]
            found.append(Passes(relabel(scored[rank], local[rank]), minibatches * of.epochs))
        return found

    of_actor = passes(Cuts(train_cut, score_cut, ppo_epochs))
    of_critic = passes(critic) if critic else [None] * num_ranks
    return [
        RankPlan(rows, own.score_rows, own.minibatches, other)
        for rows, own, other in zip(rows_by_rank, of_actor, of_critic, strict=True)
    ]


def rows_of_groups(group_ids: Sequence[int]) -> list[list[int]]:
    """The rows of each group, groups in order of appearance."""
    groups: dict[int, list[int]] = {group: [] for group in group_ids}
    for row, group in enumerate(group_ids):
        groups[group].append(row)
    return list(groups.values())


def balance(groups: Sequence[list[int]], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Groups to ranks, the longest first, each to the rank with the fewest tokens so far. Returns rows per rank."""
    if len(groups) < num_ranks:
        raise ValueError(
            f"a mini-batch of {len(groups)} prompt(s) cannot feed {num_ranks} ranks, as a prompt's responses stay "
            f"together: use at least {num_ranks} prompts per mini-batch"
        )
    num_tokens = [0] * num_ranks
    rows: list[list[int]] = [[] for _ in range(num_ranks)]
    for group in sorted(groups, key=lambda group: -sum(lengths[row] for row in group)):
        rank = min(range(num_ranks), key=lambda rank: (num_tokens[rank], len(rows[rank])))
        rows[rank] += group
        num_tokens[rank] += sum(lengths[row] for row in group)
    return rows


def cut_equally(units_by_rank: Sequence[list[list[int]]], lengths: Sequence[int], cut: Cut) -> list[list[list[int]]]:
    """Micro-batches of every rank, as many on each: empty ones are added where fewer are needed."""
    micro_batches = [cut_rows(units, lengths, cut) for units in units_by_rank]
    most = max(len(mine) for mine in micro_batches)
    return [mine + [[] for _ in range(most - len(mine))] for mine in micro_batches]


def cut_rows(units: Sequence[list[int]], lengths: Sequence[int], cut: Cut) -> list[list[int]]:
    """Micro-batches of rows of similar length, the longest first: if memory runs out, it does so at once.

    Args:
        units: rows that stay together.
    """

    def longest(rows: list[int]) -> int:
        return max(lengths[row] for row in rows)

    micro_batches: list[list[int]] = []
    rooms: list[int] = []  # left in each
    for unit in sorted(units, key=lambda unit: -longest(unit)):
        need = sum(cut.need(lengths[row]) for row in unit)
        place = next((i for i, room in enumerate(rooms) if room >= need), len(rooms))  # first-fit decreasing
        if place == len(rooms):
            micro_batches.append([])
            rooms.append(cut.room(longest(unit)))
        if rooms[place] < need:
            others = f" and {len(unit) - 1} that stay with it" if len(unit) > 1 else ""
            limit = f"{cut.max_sequences} sequences" if cut.max_tokens is None else f"the {cut.max_tokens}"
            what = f"trajectory {unit[0]}{others} has {longest(unit)} tokens"
            raise ValueError(f"{what}, more than {limit} of a micro-batch")
        micro_batches[place] += unit
        rooms[place] -= need
    return micro_batches


def count(groups: Sequence[list[int]], mask_counts: Sequence[int]) -> Totals:
    rows = [row for group in groups for row in group]
    num_tokens = sum(mask_counts[row] for row in rows)
    # At least 1: with every token masked out each sum is 0, and 0 / 1 makes the update nothing where 0 / 0 is nan.
    return Totals(num_tokens=max(1, num_tokens), num_sequences=len(rows))


def relabel(micro_batches: Sequence[list[int]], local: dict[int, int]) -> list[list[int]]:
    return [[local[row] for row in rows] for rows in micro_batches]
