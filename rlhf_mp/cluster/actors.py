"""What Ray runs: one host per SGLang server, and the scheduler. Each is a thin shell around a plain class."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

from rlhf_mp.cluster.scheduler import Evaluation, RolloutScheduler
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.order import make_order
from rlhf_mp.data.prompt_table import DataFile, compare_files
from rlhf_mp.data.prompts import load_prompts
from rlhf_mp.data.types import Share
from rlhf_mp.environments.registered import environment_maker
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.models.hf import PreTrainedTokenizerBase, load_tokenizer, stop_token_ids
from rlhf_mp.rewards.base import Setting
from rlhf_mp.rewards.registered import make_reward
from rlhf_mp.rollout.episodes import Episodes
from rlhf_mp.rollout.sampler import Sampler
from rlhf_mp.rollout.sglang_client import SGLangClient
from rlhf_mp.rollout.sglang_server import Address, ServerPlan, SGLangServer, describe_exit
from rlhf_mp.rollout.turns import TurnEncoder
from rlhf_mp.rollout.validation import file_names


def write_output_to(log_file: Path) -> None:
    """All output of this process, down to the C level, into one file a person finds."""
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)


class EngineHost:
    """Owns one SGLang server: the server ends with this actor, this actor with the job."""

    def __init__(self, plan: ServerPlan, config: RunConfig, log_file: Path, address: str):
        """
        Args:
            address: of this host, where the server shall listen.
        """
        rollout = config.actor_rollout_ref.rollout
        context = config.data.max_prompt_length + config.data.max_response_length
        self.server = SGLangServer(plan, rollout, context, log_file, host=address)
        self.timeout_s = rollout.startup_timeout_s

    async def ready(self) -> Address:
        """Where the server answers, once it does."""
        await asyncio.to_thread(self.server.wait_ready, self.timeout_s)
        return self.server.address

    async def ended(self) -> str:
        """Waits for the server's end, and says what it was."""
        return describe_exit(await asyncio.to_thread(self.server.process.wait))


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


class SchedulerActor:
    """The scheduler with everything it owns: data, tokenizer, reward, connections to the engines."""

    def __init__(self, config: RunConfig, log_file: Path):
        write_output_to(log_file)
        model, data = config.actor_rollout_ref.model, config.data
        tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
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
        self.scheduler = RolloutScheduler(config, sampler, reward, train, order, validation, stop_ids)
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

    async def connect(self, addresses: Sequence[Address]) -> None:
        """Sample from these servers."""
        timeout_s = self.scheduler.config.actor_rollout_ref.rollout.request_timeout_s
        self.scheduler.sampler.connect(
            [SGLangClient(f"SGLang engine {i}", address, timeout_s) for i, address in enumerate(addresses)]
        )

    async def publish(self, version: int) -> None:
        await self.scheduler.publish(version)

    async def fetch(self, step: int, rank: int) -> Share:
        return await self.scheduler.fetch(step, rank)

    async def evaluate(self) -> Evaluation:
        return await self.scheduler.evaluate()

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

    async def ended(self) -> str:
        """Never returns; the call fails when this process dies."""
        return await asyncio.Event().wait()
