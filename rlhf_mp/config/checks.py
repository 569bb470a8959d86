"""Rules between knobs: one ``if`` and one ``yield`` each. Nothing here looks at files or at the machine's GPUs."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from importlib.util import find_spec

from rlhf_mp.config import (
    algorithm_checks,
    async_checks,
    backend_checks,
    critic_checks,
    data_checks,
    lora_checks,
    reward_model_checks,
    task_checks,
)
from rlhf_mp.config.multi_turn_checks import multi_turn_problems
from rlhf_mp.config.reward_checks import reward_problems, written_reward_problems
from rlhf_mp.config.schema import ActorConfig, RunConfig
from rlhf_mp.errors import Problem

ACTOR, ROLLOUT, SYNC = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.weight_sync"


def written_problems(config: RunConfig, given: AbstractSet[str]) -> Iterator[Problem]:
    """Contradictions and knobs without effect in what somebody wrote. A default without effect is no problem.

    Args:
        config: before knobs that follow from others are filled in.
        given: the keys written in a file or override.
    """
    yield from _written_actor_problems(config)
    yield from algorithm_checks.written_problems(config)
    yield from critic_checks.written_problems(config)
    yield from backend_checks.written_problems(config, given)
    yield from data_checks.written_problems(config)
    yield from task_checks.written_problems(config, given)
    yield from reward_model_checks.written_problems(config, given)
    yield from written_reward_problems(config.reward)
    yield from lora_checks.written_problems(config)
    trainer = config.trainer
    if config.data.system_prompt and not config.data.apply_chat_template:
        yield Problem(
            "data.system_prompt",
            config.data.system_prompt,
            "no effect with data.apply_chat_template=false",
            "data.apply_chat_template=true, or remove it",
        )
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        yield Problem(
            "trainer.resume_from_path",
            trainer.resume_from_path,
            f"no effect with trainer.resume_mode={trainer.resume_mode}",
            "trainer.resume_mode=resume_path",
        )


def _written_actor_problems(config: RunConfig) -> Iterator[Problem]:
    actor = config.actor_rollout_ref.actor
    if actor.kl_loss_coef not in (0, ActorConfig().kl_loss_coef) and not actor.use_kl_loss:
        yield Problem(
            f"{ACTOR}.kl_loss_coef",
            actor.kl_loss_coef,
            f"no effect with {ACTOR}.use_kl_loss=false",
            f"{ACTOR}.use_kl_loss=true, or {ACTOR}.kl_loss_coef=0",
        )


def cross_problems(config: RunConfig) -> Iterator[Problem]:
    """Rules that need two knobs of a config whose derived knobs are filled in."""
    if config.trainer.task == "rl":
        yield from _batch_problems(config)
        yield from _engine_problems(config)
        yield from algorithm_checks.algorithm_problems(config)
        yield from async_checks.async_problems(config)
        yield from reward_model_checks.reward_model_problems(config)
    else:
        yield from task_checks.without_rl_problems(config)
    yield from _length_problems(config)
    yield from _actor_problems(config)
    yield from backend_checks.backend_problems(config)
    yield from critic_checks.critic_problems(config)
    yield from _trainer_problems(config)
    yield from data_checks.data_problems(config)
    yield from reward_problems(config)
    yield from multi_turn_problems(config)
    yield from lora_checks.lora_problems(config)


def _batch_problems(config: RunConfig) -> Iterator[Problem]:
    policy, ranks = config.actor_rollout_ref, config.data_parallel_size
    prompts, mini = config.data.train_batch_size, policy.actor.ppo_mini_batch_size
    if prompts % mini:
        yield Problem(
            f"{ACTOR}.ppo_mini_batch_size",
            mini,
            f"does not divide data.train_batch_size = {prompts}; both count prompts",
            f"{ACTOR}.ppo_mini_batch_size={_largest_divisor(prompts, mini)}",
        )
    if mini < ranks:
        yield Problem(
            f"{ACTOR}.ppo_mini_batch_size",
            mini,
            f"fewer prompts than the {ranks} ranks that get data of their own; "
            "the responses to one prompt stay on one rank, so some would have nothing to train on",
            f"{ACTOR}.ppo_mini_batch_size={ranks}, or fewer ranks",
        )


def _length_problems(config: RunConfig) -> Iterator[Problem]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = config.data.max_length
    what = f"data.max_prompt_length + data.max_response_length = {longest}"
    if actor.use_dynamic_bsz:
        together = task_checks.sequences_per_example(config.trainer.task) * longest
        reason = (
            f"a pair may be longer, twice {longest}" if together > longest else f"one sequence may be longer: {what}"
        )
        for name in ("ppo_max_token_len_per_gpu", "log_prob_max_token_len_per_gpu"):
            if getattr(actor, name) < together:
                fix = f"{ACTOR}.{name}={together}, or shorter sequences"
                yield Problem(f"{ACTOR}.{name}", getattr(actor, name), reason, fix)
    if config.trainer.task != "rl":
        return
    if rollout.max_model_len < longest:
        yield Problem(
            f"{ROLLOUT}.max_model_len",
            rollout.max_model_len,
            f"one sequence may be longer: {what}",
            f"{ROLLOUT}.max_model_len={longest}, or shorter sequences",
        )
    if rollout.max_total_tokens is not None and rollout.max_total_tokens < rollout.max_model_len:
        yield Problem(
            f"{ROLLOUT}.max_total_tokens",
            rollout.max_total_tokens,
            f"the KV cache holds less than one sequence of {ROLLOUT}.max_model_len = {rollout.max_model_len}",
            f"{ROLLOUT}.max_total_tokens={rollout.max_model_len}",
        )


def _actor_problems(config: RunConfig) -> Iterator[Problem]:
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    if ref.fsdp_config.optimizer_offload:
        yield Problem(
            "actor_rollout_ref.ref.fsdp_config.optimizer_offload",
            True,
            "the reference model is frozen and has no optimizer",
            "actor_rollout_ref.ref.fsdp_config.optimizer_offload=false",
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield Problem(
            f"{ACTOR}.kl_loss_coef",
            actor.kl_loss_coef,
            "a reference model would be held and run for a loss term of weight 0",
            f"{ACTOR}.kl_loss_coef=0.001, or {ACTOR}.use_kl_loss=false",
        )


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    tp, engines = rollout.tensor_model_parallel_size, rollout.num_engines
    colocated = trainer.placement == "colocated"
    if rollout.nnodes and colocated:
        yield Problem(
            f"{ROLLOUT}.nnodes",
            rollout.nnodes,
            "trainer.placement=colocated has every engine on a machine of ranks",
            f"trainer.placement=disjoint, or {ROLLOUT}.nnodes=0",
        )
    if engines * config.machines_per_engine < rollout.nnodes:
        yield Problem(
            f"{ROLLOUT}.num_engines",
            engines,
            f"a machine of the {rollout.nnodes} that are for engines would have none",
            f"{ROLLOUT}.num_engines={rollout.nnodes}, or {ROLLOUT}.nnodes={engines}",
        )
    if spanning := list(_spanning_problems(config)):
        yield from spanning
    elif colocated and trainer.device != "cpu" and trainer.num_ranks % (tp * engines):
        yield Problem(
            f"{ROLLOUT}.num_engines",
            engines,
            f"{engines} engines of {tp} GPU(s) cannot share {trainer.num_ranks} GPUs evenly",
            f"{ROLLOUT}.num_engines={trainer.num_ranks // tp}, or trainer.device=cpu where any number goes",
        )
    if config.actor_rollout_ref.weight_sync.transport == "tensor" and trainer.nnodes + rollout.nnodes > 1:
        yield Problem(
            f"{SYNC}.transport",
            "tensor",
            f"shared memory ends at the machine, and trainer.nnodes = {trainer.nnodes}, "
            f"{ROLLOUT}.nnodes = {rollout.nnodes}",
            f"{SYNC}.transport=distributed",
        )
    if rollout.enforce_eager and rollout.cudagraph_capture_sizes:
        yield Problem(
            f"{ROLLOUT}.cudagraph_capture_sizes",
            rollout.cudagraph_capture_sizes,
            f"nothing is captured with {ROLLOUT}.enforce_eager=true",
            f"{ROLLOUT}.enforce_eager=false, or {ROLLOUT}.cudagraph_capture_sizes=null",
        )
    if rollout.top_k == 0:
        yield Problem(f"{ROLLOUT}.top_k", 0, "no token would be left", f"{ROLLOUT}.top_k=-1")
    if rollout.val_kwargs.temperature == 0 and rollout.val_kwargs.n > 1:
        yield Problem(
            f"{ROLLOUT}.val_kwargs.n",
            rollout.val_kwargs.n,
            "greedy responses (val_kwargs.temperature=0) to one prompt are all the same",
            f"{ROLLOUT}.val_kwargs.n=1, or {ROLLOUT}.val_kwargs.temperature=1",
        )


def _spanning_problems(config: RunConfig) -> Iterator[Problem]:
    """Of engines and the borders of machines."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    key, tp = f"{ROLLOUT}.tensor_model_parallel_size", rollout.tensor_model_parallel_size
    per_node, machines = trainer.n_gpus_per_node, rollout.nnodes or trainer.nnodes
    wider = tp > per_node and machines * per_node % tp == tp % per_node == 0
    if rollout.allow_cross_node and tp > per_node:
        if not wider:
            reason = (
                f"an engine on several machines has all of trainer.n_gpus_per_node = {per_node} on each, as many "
                f"machines as every other, and {machines} are for engines"
            )
            whole = _largest_divisor(machines, tp // per_node)
            yield Problem(key, tp, reason, f"{key}={whole * per_node}")
    elif trainer.placement == "colocated" and per_node % tp:
        reason = f"does not divide trainer.n_gpus_per_node = {per_node}, so an engine would span machines"
        inside = f"{key}={_largest_divisor(per_node, tp)}"
        yield Problem(key, tp, reason, f"{inside}, or {ROLLOUT}.allow_cross_node=true" if wider else inside)


def _trainer_problems(config: RunConfig) -> Iterator[Problem]:
    trainer, data = config.trainer, config.data
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield Problem(
            "trainer.resume_from_path",
            None,
            "trainer.resume_mode=resume_path needs it",
            "trainer.resume_from_path=<a global_step_* folder>, or trainer.resume_mode=auto",
        )
    for key, value in (
        ("trainer.test_freq", trainer.test_freq),
        ("trainer.save_freq", trainer.save_freq),
        ("data.train_max_samples", data.train_max_samples),
        ("data.val_max_samples", data.val_max_samples),
    ):
        if value == 0:
            yield Problem(key, value, "must be -1 or at least 1", f"{key}=-1")
    if trainer.test_freq > 0 and not data.val_files:
        yield Problem(
            "trainer.test_freq",
            trainer.test_freq,
            "there is nothing to validate on: data.val_files is empty",
            "data.val_files=<file>, or trainer.test_freq=-1",
        )
    for package in ("tensorboard", "wandb"):
        if package in trainer.logger and find_spec(package) is None:
            others = [name for name in trainer.logger if name != package]
            yield Problem(
                "trainer.logger",
                trainer.logger,
                f"the package {package} is not installed",
                f"pip install {package}, or trainer.logger=[{','.join(others or ['console'])}]",
            )


def _largest_divisor(number: int, at_most: int) -> int:
    return next(d for d in range(min(at_most, number), 0, -1) if number % d == 0)
