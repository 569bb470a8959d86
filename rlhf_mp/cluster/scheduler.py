"""Decides what is sampled when, and who trains on it. Plain asyncio: no Ray here, so tests need no cluster."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rlhf_mp.algorithms.contract import checked_estimator
from rlhf_mp.cluster.groups import Group, filled, numbered, require_numbers, shaped, step_metrics, worth_of
from rlhf_mp.cluster.queue_clock import QueueClock
from rlhf_mp.cluster.staleness import staleness_metrics
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.feed import PromptFeed
from rlhf_mp.data.order import Order
from rlhf_mp.data.partition import Cut, Cuts, plan_step
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import SampleText, Share, Sums, TokenTrace, Trajectory
from rlhf_mp.observe.timeline import Timeline
from rlhf_mp.rewards.vote import vote
from rlhf_mp.rewards.weighted import WeightedReward
from rlhf_mp.rollout.base import SamplingParams
from rlhf_mp.rollout.episodes import episode_metrics
from rlhf_mp.rollout.sampler import Sampler, response_seed
from rlhf_mp.rollout.validation import Judged, validation_metrics


@dataclass(frozen=True)
class Evaluation:
    """Held-out prompts under the live weights."""

    metrics: Sums
    samples: list[SampleText]


def training_params(config: RunConfig, stop_token_ids: Sequence[int]) -> SamplingParams:
    rollout = config.actor_rollout_ref.rollout
    length = config.data.max_response_length
    return SamplingParams(rollout.temperature, rollout.top_p, rollout.top_k, length, tuple(stop_token_ids))


def validation_params(config: RunConfig, stop_token_ids: Sequence[int]) -> SamplingParams:
    own = config.actor_rollout_ref.rollout.val_kwargs
    return SamplingParams(own.temperature, own.top_p, -1, config.data.max_response_length, tuple(stop_token_ids))


def cuts(config: RunConfig) -> tuple[Cut, Cut]:
    """How training and forward-only micro-batches are cut."""
    actor, packed = config.actor_rollout_ref.actor, config.actor_rollout_ref.model.use_remove_padding
    if actor.use_dynamic_bsz:
        limits = actor.ppo_max_token_len_per_gpu, actor.log_prob_max_token_len_per_gpu
        return tuple(Cut(max_tokens=limit, packed=packed) for limit in limits)
    train, score = actor.ppo_micro_batch_size_per_gpu, actor.log_prob_micro_batch_size_per_gpu
    return Cut(max_sequences=train), Cut(max_sequences=score)


def critic_cuts(config: RunConfig) -> Cuts | None:
    """The same for the critic; None where there is none."""
    critic = config.critic
    if not critic.enable:
        return None
    if config.actor_rollout_ref.actor.use_dynamic_bsz:
        train, score = critic.ppo_max_token_len_per_gpu, critic.forward_max_token_len_per_gpu
        packed = critic.model.use_remove_padding
        return Cuts(Cut(max_tokens=train, packed=packed), Cut(max_tokens=score, packed=packed), critic.ppo_epochs)
    train, score = critic.ppo_micro_batch_size_per_gpu, critic.forward_micro_batch_size_per_gpu
    return Cuts(Cut(max_sequences=train), Cut(max_sequences=score), critic.ppo_epochs)


def shares_of(config: RunConfig, trajectories: Sequence[Trajectory]) -> list[Share]:
    """What each data-parallel rank gets of a step."""
    actor, (train_cut, score_cut) = config.actor_rollout_ref.actor, cuts(config)
    plans = plan_step(
        [t.num_tokens for t in trajectories],
        [sum(t.loss_mask) for t in trajectories],
        [t.group_id for t in trajectories],
        num_ranks=config.data_parallel_size,
        groups_per_minibatch=actor.ppo_mini_batch_size,
        ppo_epochs=actor.ppo_epochs,
        train_cut=train_cut,
        score_cut=score_cut,
        critic=critic_cuts(config),
    )
    return [
        Share([trajectories[row] for row in plan.rows], plan.score_rows, plan.minibatches, critic=plan.critic)
        for plan in plans
    ]


class RolloutScheduler:
    """Samples step s once a weight version >= s - max_staleness is live (R1); hands each rank its share."""

    def __init__(
        self,
        config: RunConfig,
        sampler: Sampler,
        reward: WeightedReward,
        train: Sequence[Prompt],
        order: Order,
        validation: Mapping[str, Sequence[Prompt]],
        stop_token_ids: Sequence[int],
        timeline: Timeline | None = None,
    ):
        """
        Args:
            order: which of ``train`` each step uses.
            validation: the prompts of each validation file, by its name.
        """
        self.config, self.sampler, self.reward, self.timeline = config, sampler, reward, timeline or Timeline()
        self.train, self.validation, self.stop_token_ids = train, validation, stop_token_ids
        self.feed, self.clock = PromptFeed(order, config.actor_rollout_ref.rollout.max_staleness), QueueClock()
        self.needs_baselines = checked_estimator(config)[1].greedy_baseline
        self.max_staleness = config.actor_rollout_ref.rollout.max_staleness
        self.num_steps = config.trainer.total_training_steps or config.trainer.total_epochs * order.batches_per_epoch
        self.version = -1  # nothing published yet
        self._published = asyncio.Condition()
        self._steps: dict[int, asyncio.Task[list[Share]]] = {}
        self._filling = asyncio.Lock()
        self._epochs: dict[int, int] = {}  # of the prompts of each step
        self._aborted: dict[int, int] = {}  # groups of each step that were not among the first to end

    async def publish(self, version: int) -> None:
        """Rank 0 says that ``version`` is loaded in every engine."""
        async with self._published:
            self.version = version
            self._published.notify_all()

    async def fetch(self, step: int, dp_rank: int) -> Share:
        """One data-parallel rank's share of ``step``; waits for it. An engine's failure raises here, on every rank."""
        for ahead in range(step, max(step + 1, min(step + self.max_staleness + 1, self.num_steps))):
            if ahead not in self._steps:
                self._steps[ahead] = asyncio.create_task(self._sample(ahead))
        return await self._share(step, dp_rank)

    async def sample(self, step: int, prompts: Sequence[Prompt], dp_rank: int) -> Share:
        """``fetch`` for a step whose prompts are given; every rank gives the same. The data stays where it is."""
        if step not in self._steps:
            self._steps[step] = asyncio.create_task(self._sample(step, prompts))
        return await self._share(step, dp_rank)

    async def _share(self, step: int, dp_rank: int) -> Share:
        self.clock.asked(step)
        self._steps.pop(step - 1, None)  # no rank can be a whole step behind: every step has collectives
        self.feed.forget(step - 1)
        share = (await asyncio.shield(self._steps[step]))[dp_rank]
        if dp_rank != 0:
            return share
        ready = sum(task.done() for ahead, task in self._steps.items() if ahead > step)
        return replace(share, metrics=share.metrics | self.clock.served(step, ready=ready))

    async def evaluate(self) -> Evaluation:
        """Sample the validation prompts from the live weights."""
        own, seed = self.config.actor_rollout_ref.rollout.val_kwargs, self.config.trainer.seed
        prompts = [prompt for of_file in self.validation.values() for prompt in of_file]
        seeds = [
            [response_seed(seed, -1 - file, g, i) for i in range(own.n)]
            for file, of_file in enumerate(self.validation.values())
            for g in range(len(of_file))
        ]
        params = validation_params(self.config, self.stop_token_ids)
        found = await self.sampler.groups(prompts, params, seeds)
        require_numbers([Group(*pair) for pair in zip(prompts, found, strict=True)], self.sampler.text)
        rest = iter(found)
        groups = {name: [next(rest) for _ in of_file] for name, of_file in self.validation.items()}
        judged = {name: [[self._judged(t) for t in group] for group in of_file] for name, of_file in groups.items()}
        samples = [
            sample
            for name, of_file in self.validation.items()
            for sample in self._texts(of_file, groups[name], name, self.config.trainer.log_val_generations)
        ]
        return Evaluation(validation_metrics(judged) | self.reward.settle(), samples)

    def _judged(self, response: Trajectory) -> Judged:
        said = vote(self.sampler.text(response.response_ids))
        return Judged(response.reward, len(response.response_ids), said, response.rm_score)

    def state_dict(self, step: int) -> dict[str, Any]:
        """Where the data stands once ``step`` steps are done, whatever has been sampled ahead since."""
        return self.feed.state_dict(step)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What has been sampled since, or for another run, is forgotten."""
        for task in self._steps.values():
            task.cancel()
        for remembered in (self._steps, self._epochs, self._aborted):
            remembered.clear()
        self.clock = QueueClock()
        self.feed.load_state_dict(state)

    async def _sample(self, step: int, given: Sequence[Prompt] | None = None) -> list[Share]:
        async with self._published:
            await self._published.wait_for(lambda: self.version >= max(0, step - self.max_staleness))
        with self.clock.sampling(), self.timeline.overlapping(f"sampling for step {step + 1}"):
            return await self._sample_now(step, given)

    async def _sample_now(self, step: int, given: Sequence[Prompt] | None) -> list[Share]:
        filter_groups = self.config.algorithm.filter_groups
        if given is not None:
            self.feed.draw(step, 0)  # the data stays where it is
            chosen, metrics = [*(await self._answered(given, step, 0, len(given))).values()], {}
        elif filter_groups.enable:
            async with self._filling:  # a step draws its last prompt before the next one draws its first
                chosen, metrics = await filled(
                    lambda number: self._draw(step, number),
                    self.config.data.train_batch_size,
                    filter_groups.max_num_gen_batches,
                    worth_of(self.config.reward_model),
                )
        else:
            chosen, metrics = await self._draw(step, 0), {}
        groups = numbered(chosen)
        metrics |= staleness_metrics([t for group in groups for t in group], step)
        metrics |= step_metrics(groups, step) | self.reward.settle() | self.sampler.metrics()
        if given is None:
            metrics["rollout/epoch"] = (self._epochs.pop(step), 1)
            metrics["rollout/aborted_groups"] = (self._aborted.pop(step), 1)
        trajectories = [t for group in groups for t in group]
        if self.config.actor_rollout_ref.rollout.multi_turn.enable:
            metrics |= episode_metrics(trajectories)
        buffer, max_length = self.config.reward.overlong_buffer, self.config.data.max_response_length
        if buffer.enable:  # last: what is solved, and which groups differ, is for the reward itself to say
            before = sum(t.reward for t in trajectories)
            trajectories = [shaped(t, max_length, buffer) for t in trajectories]
            metrics["rollout/overlong_penalty_mean"] = (sum(t.reward for t in trajectories) - before, len(trajectories))
        return self._shares([group.prompt for group in chosen], trajectories, metrics)

    async def _draw(self, step: int, number: int) -> list[Group]:
        """Sample the next batch of prompts, the so-manieth of this step."""
        size, extra = self.config.data.train_batch_size, self.config.actor_rollout_ref.rollout.over_sample_rate
        asked = self.feed.draw(step, math.ceil(size * (1 + extra)))
        self._epochs[step] = asked[0].epoch
        answered = await self._answered([self.train[one.index] for one in asked], step, number, size)
        self.feed.settle(step, asked, answered.keys())
        self._aborted[step] = self._aborted.get(step, 0) + len(asked) - len(answered)
        return list(answered.values())

    async def _answered(self, prompts: Sequence[Prompt], step: int, number: int, num: int) -> dict[int, Group]:
        """Responses to the ``num`` of the so-manieth prompts of this step that are complete first, by position."""
        rollout, seed = self.config.actor_rollout_ref.rollout, self.config.trainer.seed

        def seed_of(group: int, response: int) -> int | None:
            place = number * len(prompts) + group
            return response_seed(seed, step, place, response) if rollout.reproducible else None

        seeds = [[seed_of(group, i) for i in range(rollout.n)] for group in range(len(prompts))]
        params = training_params(self.config, self.stop_token_ids)
        groups, baselines = await asyncio.gather(
            self.sampler.first_groups(prompts, params, seeds, num), self._baselines(prompts, params)
        )
        answered = {i: Group(prompts[i], [replace(t, **baselines[i]) for t in group]) for i, group in groups.items()}
        require_numbers([*answered.values()], self.sampler.text)
        return answered

    async def _baselines(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[dict[str, float]]:
        """What trajectories say of the greedy responses, where the estimator compares with them."""
        if not self.needs_baselines:
            return [{} for _ in prompts]
        greedy = replace(params, temperature=0.0, top_p=1.0, top_k=-1)
        found = [t for (t,) in await self.sampler.groups(prompts, greedy, [[0]] * len(prompts))]
        buffer = self.config.reward.overlong_buffer
        if buffer.enable:
            found = [shaped(t, self.config.data.max_response_length, buffer) for t in found]
        return [{"baseline": t.reward, "baseline_rm_score": t.rm_score} for t in found]

    def _shares(self, prompts: Sequence[Prompt], trajectories: list[Trajectory], metrics: Sums) -> list[Share]:
        shares = shares_of(self.config, trajectories)
        shares[0] = replace(shares[0], metrics=metrics, samples=self._training_texts(prompts, shares[0].trajectories))
        return shares

    def _training_texts(self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory]) -> list[SampleText]:
        """Some of what rank 0 trains on, with its rows: rank 0 adds what training makes of it."""
        rows: dict[int, list[int]] = {}
        for row, t in enumerate(trajectories):
            rows.setdefault(t.group_id, []).append(row)
        shown = dict(list(rows.items())[: self.config.trainer.log_samples])
        texts = self._texts(
            [prompts[group] for group in shown],
            [[trajectories[row] for row in of_group] for of_group in shown.values()],
            "training",
            len(shown),
        )
        in_order = [row for of_group in shown.values() for row in of_group]
        return [replace(text, row=row) for text, row in zip(texts, in_order, strict=True)]

    def _texts(
        self, prompts: Sequence[Prompt], groups: Sequence[Sequence[Trajectory]], source: str, num_shown: int
    ) -> list[SampleText]:
        """All responses to the first prompts; the first response to each of fewer is for the log too."""
        num_logged = self.config.trainer.log_samples
        return [
            SampleText(
                prompt.text,
                self.sampler.text(t.response_ids),
                t.reward,
                prompt.answer,
                source,
                in_log=g < num_logged and i == 0,
                trace=TokenTrace(t.response_ids, t.response_logprobs, t.loss_mask, t.finish_reason),
            )
            for g, (prompt, group) in enumerate(zip(prompts, groups, strict=True))
            if g < max(num_logged, num_shown)
            for i, t in enumerate(group)
            if g < num_shown or i == 0
        ]
