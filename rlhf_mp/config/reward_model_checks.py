"""Rules of a reward model in the loop: knobs without effect, what it cannot be combined with, where its servers go."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from importlib.util import find_spec

from rlhf_mp.config.algorithm import needs_of
from rlhf_mp.config.keys import KNOBS
from rlhf_mp.config.knob import default_of
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.config.task_checks import no_effect, read
from rlhf_mp.errors import Problem

ACTOR, OWN = "actor_rollout_ref.actor", "reward_model"
SERVERS, SERVED = f"{OWN}.rollout", f"{OWN}.strategy=sglang"
ON_RANKS = (
    f"{OWN}.model.use_remove_padding",
    f"{OWN}.model.trust_remote_code",
    f"{OWN}.model.quantization",
    f"{OWN}.fsdp_config.param_offload",
)
"""How the training ranks hold it."""


def written_problems(config: RunConfig, given: AbstractSet[str]) -> Iterator[Problem]:
    """Knobs that somebody set and that nothing reads: there is no reward model, or it is elsewhere."""
    own = config.reward_model
    if config.trainer.task != "rl":  # task_checks.py says so
        return
    for key in sorted(key for key in given if key.startswith(f"{OWN}.")):
        if read(config, key) == default_of(KNOBS[key]):
            continue
        if not own.enable:
            yield no_effect(key, read(config, key), f"{OWN}.enable=false")
        elif own.served and key in ON_RANKS:
            yield no_effect(key, read(config, key), SERVED)
        elif not own.served and key.startswith(f"{SERVERS}."):
            yield no_effect(key, read(config, key), f"{OWN}.strategy={own.strategy}")


def reward_model_problems(config: RunConfig) -> Iterator[Problem]:
    """Rules of a config whose derived knobs are filled in."""
    own = config.reward_model
    if not own.enable:
        return
    if not own.model.path:
        key = f"{OWN}.model.path"
        fix = f"{key}=<the huggingface folder of a run with trainer.task=reward_model>, or {OWN}.enable=false"
        yield Problem(key, own.model.path, "there is no model to score with", fix)
    if own.coef == 0:
        yield Problem(
            f"{OWN}.coef",
            own.coef,
            "a reward model would be held and run for a weight of 0",
            f"{OWN}.coef=1.0, or {OWN}.enable=false",
        )
    yield from _server_problems(config) if own.served else _rank_problems(config)


def _rank_problems(config: RunConfig) -> Iterator[Problem]:
    own, algorithm, strategy = config.reward_model, config.algorithm, config.actor_rollout_ref.actor.strategy
    unseen = "the responses it looks at have only their rule reward yet: training ranks score them later"
    if needs_of(algorithm.adv_estimator).greedy_baseline:
        yield Problem("algorithm.adv_estimator", algorithm.adv_estimator, unseen, f"{SERVED}, or rloo")
    if algorithm.filter_groups.enable:
        key = "algorithm.filter_groups.enable"
        yield Problem(key, True, unseen, f"{SERVED}, or {key}=false")
    if own.fsdp_config.param_offload and strategy != "deepspeed":
        key = f"{OWN}.fsdp_config.param_offload"
        yield Problem(key, True, f"no effect with {ACTOR}.strategy={strategy}", f"{key}=false")
    if own.model.quantization is not None:
        yield from _quantization_problems(own.model.quantization, strategy)


def _quantization_problems(quantization: str, strategy: str) -> Iterator[Problem]:
    key = f"{OWN}.model.quantization"
    if strategy == "megatron":
        reason = f"{ACTOR}.strategy=megatron holds whole matrices only"
        yield Problem(key, quantization, reason, f"{key}=null, or {ACTOR}.strategy=deepspeed")
    if find_spec("bitsandbytes") is None:
        fix = f"pip install bitsandbytes, or {key}=null"
        yield Problem(key, quantization, "the package bitsandbytes is not installed", fix)


def _server_problems(config: RunConfig) -> Iterator[Problem]:
    own, trainer = config.reward_model.rollout, config.trainer
    servers = -(-own.num_engines // trainer.nnodes)  # of the machine that has most
    needed = servers * own.tensor_model_parallel_size
    if trainer.placement == "colocated" and trainer.device != "cpu" and needed > trainer.n_gpus_per_node:
        yield Problem(
            f"{SERVERS}.num_engines",
            own.num_engines,
            f"{servers} server(s) of {own.tensor_model_parallel_size} GPU(s) on a machine share the "
            f"{trainer.n_gpus_per_node} of its ranks",
            f"fewer servers or {SERVERS}.tensor_model_parallel_size, or trainer.placement=disjoint with more GPUs",
        )
