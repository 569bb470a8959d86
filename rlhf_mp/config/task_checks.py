"""Which knobs act in which ``trainer.task``, and the rules of the tasks that sample nothing."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from copy import deepcopy
from functools import reduce
from typing import Any

from rlhf_mp.config.derive import derive
from rlhf_mp.config.keys import KNOBS, typed
from rlhf_mp.config.knob import default_of
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Problem

ACTOR = "actor_rollout_ref.actor"
PAIRS = {"dpo", "reward_model"}
"""Tasks whose examples are a chosen and a rejected response: they are trained on together, in one micro-batch."""
RL, WITHOUT_RL, EVERY = {"rl"}, {"sft", "dpo", "reward_model"}, {"rl", "sft", "dpo", "reward_model"}
ACTS_IN = {
    "algorithm": RL,
    "critic": RL,
    "trainer.critic_warmup": RL,
    "trainer.placement": RL,
    "trainer.offload_during_rollout": RL,
    "reward": RL,
    "reward_model": RL,
    "dpo": {"dpo"},
    "actor_rollout_ref.model.logits_chunk_mb": {"rl", "sft", "dpo"},
    "actor_rollout_ref.rollout": RL,
    "actor_rollout_ref.weight_sync": RL,
    "actor_rollout_ref.ref": {"rl", "dpo"},
    f"{ACTOR}.ppo_mini_batch_size": RL,
    f"{ACTOR}.ppo_epochs": RL,
    f"{ACTOR}.policy_loss": RL,
    f"{ACTOR}.clip_ratio": RL,
    f"{ACTOR}.clip_ratio_low": RL,
    f"{ACTOR}.clip_ratio_high": RL,
    f"{ACTOR}.entropy_coeff": RL,
    f"{ACTOR}.use_kl_loss": RL,
    f"{ACTOR}.kl_loss_coef": RL,
    f"{ACTOR}.kl_loss_type": RL,
    f"{ACTOR}.loss_agg_mode": {"rl", "sft"},
    "data.answer_key": RL,
    "data.train_weights": RL,
    "data.truncation": RL,
    "data.curriculum_key": RL,
    "data.reward_fn_key": RL,
    "data.curriculum_order": RL,
    "data.cache_dir": RL,
    "data.response_key": {"sft"},
    "data.messages_key": {"sft"},
    "data.chosen_key": PAIRS,
    "data.rejected_key": PAIRS,
    "data.margin_key": {"reward_model"},
    "data.max_length": WITHOUT_RL,
    "trainer.log_samples": RL,
    "trainer.max_engine_restarts": RL,
    "trainer.log_val_generations": RL,
}
"""Keys, or sections, that do not act in every task."""


def sequences_per_example(task: str) -> int:
    """Rows of a batch that one example of a task without rl becomes."""
    return 2 if task in PAIRS else 1


def acts_in(key: str) -> set[str]:
    """The tasks in which a knob, or else its section, acts."""
    parts = key.split(".")
    names = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((ACTS_IN[name] for name in names if name in ACTS_IN), EVERY)


def written_problems(config: RunConfig, given: AbstractSet[str]) -> Iterator[Problem]:
    """Knobs that somebody set to something and that do not act in this task.

    A value that the knob would have anyway is no problem: a resolved configuration names all of them.
    """
    task = config.trainer.task
    idle = sorted(key for key in given if task not in acts_in(key))
    plain = deepcopy(config)
    for key in idle:
        _set(plain, key, default_of(KNOBS[key]))
    derive(plain)
    for key in idle:
        if read(config, key) not in (default_of(KNOBS[key]), read(plain, key)):
            yield no_effect(key, read(config, key), f"trainer.task={task}")
    yield from _written_data_problems(config, given)


def _written_data_problems(config: RunConfig, given: AbstractSet[str]) -> Iterator[Problem]:
    data, plain = config.data, type(config.data)()
    if config.trainer.task != "sft" or data.messages_key is None:
        return
    for name in ("prompt_key", "response_key", "system_prompt"):
        if f"data.{name}" in given and getattr(data, name) != getattr(plain, name):
            yield no_effect(f"data.{name}", getattr(data, name), f"data.messages_key={data.messages_key}")
    if not data.apply_chat_template:
        yield Problem(
            "data.apply_chat_template",
            False,
            f"the conversations of data.messages_key={data.messages_key} are written by the chat template",
            "data.apply_chat_template=true, or data.messages_key=null",
        )


def no_effect(key: str, value: Any, because: str) -> Problem:
    return Problem(key, value, f"no effect with {because}", f"remove it, or {typed(key, default_of(KNOBS[key]))}")


def read(config: RunConfig, key: str) -> Any:
    return reduce(getattr, key.split("."), config)


def _set(config: RunConfig, key: str, value: Any) -> None:
    section, _, name = key.rpartition(".")
    setattr(read(config, section), name, value)


def without_rl_problems(config: RunConfig) -> Iterator[Problem]:
    """Rules of a task that learns from examples."""
    actor, data, ranks = config.actor_rollout_ref.actor, config.data, config.data_parallel_size
    if data.train_batch_size < ranks:
        yield Problem(
            "data.train_batch_size",
            data.train_batch_size,
            f"fewer examples than the {ranks} ranks that get data of their own",
            f"data.train_batch_size={ranks}, or fewer ranks",
        )
    if config.trainer.task not in PAIRS:
        return
    for name in ("ppo_micro_batch_size_per_gpu", "log_prob_micro_batch_size_per_gpu"):
        if not actor.use_dynamic_bsz and getattr(actor, name) < 2:
            yield Problem(
                f"{ACTOR}.{name}",
                getattr(actor, name),
                "the two responses of a pair stay together",
                f"{ACTOR}.{name}=2",
            )
