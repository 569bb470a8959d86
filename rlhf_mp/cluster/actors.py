"""The scheduler as Ray runs it: a thin shell around plain classes."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_mp.cluster.answers import Answers
from rlhf_mp.cluster.engine_host import RemoteHost
from rlhf_mp.cluster.engine_pool import EnginePool, News, Rules, Target
from rlhf_mp.cluster.reward_pool import RewardPool
from rlhf_mp.cluster.scheduler import Evaluation, RolloutScheduler
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.order import make_order
from rlhf_mp.data.prompt_table import DataFile, compare_files
from rlhf_mp.data.prompts import Row, given_prompts, load_prompts
from rlhf_mp.data.types import Share
from rlhf_mp.environments.registered import environment_maker
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.models.hf import PreTrainedTokenizerBase, load_tokenizer, stop_token_ids
from rlhf_mp.observe.timeline import Timeline, make_timeline
from rlhf_mp.rewards.base import Setting
from rlhf_mp.rewards.registered import make_reward
from rlhf_mp.rollout.episodes import Episodes
from rlhf_mp.rollout.reward_server import RewardClient
from rlhf_mp.rollout.sampler import Sampler
from rlhf_mp.rollout.sglang_client import SGLangClient
from rlhf_mp.rollout.sglang_server import Address, Kind
from rlhf_mp.rollout.turns import TurnEncoder
from rlhf_mp.rollout.validation import file_names


def write_output_to(log_file: Path) -> None:
    """All output of this process, down to the C level, into one file a person finds."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


@dataclass(frozen=True)
class DataFacts:
    """What the data turned out to be."""

    num_prompts: int
    num_dropped: int
    num_truncated: int
    num_validation: int
    steps_per_epoch: int
    stop_token_ids: list[int]
    notes: list[str] = field(default_factory=list)  # of the reward's terms, for the user


def make_episodes(config: RunConfig, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> Episodes | None:
    """How responses of several turns come about; None where every response is one turn."""
    knobs = config.actor_rollout_ref.rollout.multi_turn
    if not knobs.enable:
        return None
    try:
        make = environment_maker(knobs.environment, knobs.environment_args)
    except (ImportError, AttributeError, TypeError) as error:
        key, reason = "actor_rollout_ref.rollout.multi_turn.environment", f"{type(error).__name__}: {error}"
        fix = "correct it or its environment_args; it is imported from where the run is started"
        raise ConfigError([Problem(key, knobs.environment, reason, fix)]) from error
    encoder = TurnEncoder(
        tokenizer,
        chat=config.data.apply_chat_template,
        stop_token_ids=stop_ids,
        max_tokens=knobs.max_tool_response_length,
    )
    return Episodes(make, knobs, encoder, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))


def rules_of(config: RunConfig) -> Rules:
    rollout = config.actor_rollout_ref.rollout
    return Rules(config.trainer.max_engine_restarts, rollout.health_check_interval_s, rollout.health_check_timeout_s)


def make_pool(config: RunConfig, timeline: Timeline) -> EnginePool:
    timeout_s = config.actor_rollout_ref.rollout.request_timeout_s
    return EnginePool(
        rules_of(config),
        lambda name, address: SGLangClient(name, address, timeout_s),
        lambda name, responses: timeline.level(f"{name}: responses", responses),
    )


def make_reward_pool(config: RunConfig, news: asyncio.Queue[News]) -> RewardPool | None:
    """The servers of a reward model that has its own; None where there are none."""
    if not config.reward_model.served:
        return None
    timeout_s = config.reward_model.rollout.request_timeout_s
    return RewardPool(rules_of(config), lambda name, address: RewardClient(name, address, timeout_s), news)


class SchedulerActor:
    """The scheduler with everything it owns: data, tokenizer, reward, connections to the engines."""

    def __init__(self, config: RunConfig, log_file: Path):
        write_output_to(log_file)
        model, data = config.actor_rollout_ref.model, config.data
        self.tokenizer = tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        train = load_prompts(data.train_files, tokenizer, data).first(data.train_max_samples)
        validation = {
            name: load_prompts([file], tokenizer, data).first(data.val_max_samples)
            for name, file in zip(file_names(data.val_files), data.val_files, strict=True)
        }
        self.files = {"data.train_files": train.facts.files}
        self.files |= {"data.val_files": [file for prompts in validation.values() for file in prompts.facts.files]}
        setting = Setting(data.max_response_length, config.reward.startup_timeout_s)
        reward = make_reward(config.reward, setting, log=log_file.with_name("reward_failures.jsonl"))
        reward.check_sources(chain(train, *validation.values()))
        stop_ids = stop_token_ids(model.path, tokenizer, trust_remote_code=model.trust_remote_code)
        order = make_order(train.facts.sizes, train.curriculum, data)
        sampler = Sampler(tokenizer, reward, make_episodes(config, tokenizer, stop_ids))
        timeline = make_timeline(config, log_file.parents[1], "scheduler", 0)
        self.scheduler = RolloutScheduler(config, sampler, reward, train, order, validation, stop_ids, timeline)
        self.pool = make_pool(config, timeline)
        self.reward_pool = make_reward_pool(config, self.pool.news)
        sampler.connect(self.pool, self.reward_pool)
        self.answers = Answers(self.pool.swap_needed)
        self._evaluation: asyncio.Future[Evaluation] | None = None
        self.found = DataFacts(
            num_prompts=len(train),
            num_dropped=train.facts.num_dropped,
            num_truncated=train.facts.num_truncated,
            num_validation=sum(map(len, validation.values())),
            steps_per_epoch=order.batches_per_epoch,
            stop_token_ids=stop_ids,
        )

    async def facts(self) -> DataFacts:
        """Starts the reward too: a judge that is not there ends the run before anything trains."""
        return replace(self.found, notes=await self.scheduler.reward.start())

    async def connect(self, kind: Kind, hosts: Sequence[Any], addresses: Sequence[Address]) -> None:
        """Use these servers, and see to them from now on.

        Args:
            hosts: actors that own them.
        """
        pool = self.pool if kind == "engine" else self.reward_pool
        pool.adopt([RemoteHost(index, actor, kind) for index, actor in enumerate(hosts)], addresses)

    async def targets(self) -> list[Target]:
        return self.pool.targets()

    async def lost(self, index: int, start: int, reason: str) -> None:
        self.pool.lost(index, start, reason)

    async def settle(self, version: int, served: Sequence[Target]) -> None:
        self.pool.settle(version, served)

    async def rest(self) -> None:
        self.pool.rest()

    async def news(self) -> News:
        """The next thing to tell the user about an engine; waits for it. Fails when this process dies."""
        news = await self.pool.news.get()
        print(f"{news.name}: {news.text}", flush=True)
        return news

    async def publish(self, version: int) -> None:
        await self.scheduler.publish(version)

    async def fetch(self, step: int, rank: int, question: int) -> Share | None:
        """None: no engine has the live weights, push them and ask again.

        Args:
            question: the so-manieth of this rank; every rank asks the same ones.
        """
        return await self._shared(question, lambda: self.scheduler.fetch(step, rank))

    async def sample(self, step: int, rows: Sequence[Row], rank: int, question: int) -> Share | None:
        """As ``fetch``."""
        prompts = given_prompts(rows, self.tokenizer, self.scheduler.config.data)
        return await self._shared(question, lambda: self.scheduler.sample(step, prompts, rank))

    async def _shared(self, question: int, fetch: Callable[[], Awaitable[Share]]) -> Share | None:
        """Each rank's own share, or None for all of them."""

        async def sampled() -> bool:
            await fetch()
            return True

        return await fetch() if await self.answers.to(question, sampled) else None

    async def evaluate(self, question: int) -> Evaluation | None:
        """As ``fetch``. An evaluation that waits for engines goes on when it is asked for again."""
        return await self.answers.to(question, self._evaluated)

    async def _evaluated(self) -> Evaluation:
        if self._evaluation is None:
            self._evaluation = asyncio.ensure_future(self.scheduler.evaluate())
        evaluation = await asyncio.shield(self._evaluation)
        self._evaluation = None
        return evaluation

    async def state_dict(self, step: int) -> dict[str, Any]:
        files = {knob: [asdict(file) for file in files] for knob, files in self.files.items()}
        return {"order": self.scheduler.state_dict(step), "files": files}

    async def load_state_dict(self, state: dict[str, Any]) -> list[str]:
        """Returns what the user should know of, though the run can continue.

        Raises:
            CheckpointError: the training files have changed, or what decides the order of their prompts.
        """
        then = {knob: [DataFile(**file) for file in files] for knob, files in state["files"].items()}
        remarks = compare_files(then, self.files)
        self.scheduler.load_state_dict(state["order"])
        return remarks
