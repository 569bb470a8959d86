"""Memory levers that would change nothing are told, each with what to type."""

import pytest

from rlhf_mp.config.critic_checks import critic_problems
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.errors import ConfigError

MODEL, ZERO = "actor_rollout_ref.model", "actor_rollout_ref.actor.deepspeed"
OFFLOAD = "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true"


@pytest.mark.parametrize(
    ("words", "key", "reason", "mended"),
    [
        (
            [f"{MODEL}.checkpoint_every_n_layers=2", f"{MODEL}.enable_gradient_checkpointing=false"],
            f"{MODEL}.checkpoint_every_n_layers",
            "no effect with",
            f"{MODEL}.enable_gradient_checkpointing=true",
        ),
        (
            [f"{MODEL}.checkpoint_every_n_layers=2", "actor_rollout_ref.actor.strategy=megatron"],
            f"{MODEL}.checkpoint_every_n_layers",
            "strategy=megatron",
            f"{MODEL}.checkpoint_every_n_layers=1",
        ),
        ([f"{ZERO}.nvme_path=/local"], f"{ZERO}.nvme_path", "no effect", f"{ZERO}.nvme_path=null"),
        ([OFFLOAD, f"{ZERO}.offload_device=nvme"], f"{ZERO}.offload_device", "is not set", f"{ZERO}.nvme_path=/local"),
        (
            [OFFLOAD, f"{ZERO}.offload_device=nvme", f"{ZERO}.nvme_path=/local", f"{ZERO}.zero_stage=2"],
            f"{ZERO}.offload_device",
            "only ZeRO-3",
            f"{ZERO}.zero_stage=3",
        ),
        (
            [f"{ZERO}.offload_device=nvme", f"{ZERO}.nvme_path=/local"],
            f"{ZERO}.offload_device",
            "nothing is offloaded",
            OFFLOAD,
        ),
        (
            [f"{MODEL}.activation_offload_layers=0"],
            f"{MODEL}.activation_offload_layers",
            "no effect with",
            f"{MODEL}.enable_activation_offload=true",
        ),
        (
            [f"{MODEL}.recompute=selective", f"{MODEL}.enable_gradient_checkpointing=false"],
            f"{MODEL}.recompute",
            "no effect with",
            f"{MODEL}.enable_gradient_checkpointing=true",
        ),
        (
            [f"{MODEL}.recompute=selective", "actor_rollout_ref.actor.strategy=megatron"],
            f"{MODEL}.recompute",
            "strategy=megatron",
            f"{MODEL}.recompute=full",
        ),
        (
            [f"{MODEL}.recompute=selective", f"{MODEL}.enable_activation_offload=true"],
            f"{MODEL}.recompute",
            "stays on the device",
            f"{MODEL}.enable_activation_offload=false",
        ),
        (
            ["trainer.empty_cache_every_n_steps=5", "trainer.device=cpu"],
            "trainer.empty_cache_every_n_steps",
            "no effect with",
            "trainer.device=auto",  # a GPU may be where it runs
        ),
        (
            ["trainer.memory_snapshot_on_oom=true", "trainer.device=cpu"],
            "trainer.memory_snapshot_on_oom",
            "no effect with",
            "trainer.memory_snapshot_on_oom=false",
        ),
        (
            ["trainer.per_process_memory_fraction=0.9", "trainer.device=cpu"],
            "trainer.per_process_memory_fraction",
            "no effect with",
            "trainer.per_process_memory_fraction=null",
        ),
    ],
)
def test_a_lever_without_effect_is_a_problem_and_its_fix_mends_it(words, key, reason, mended):
    given = ["data.train_files=x.jsonl", f"{MODEL}.path=x", *words]
    with pytest.raises(ConfigError) as caught:
        config_from_dict({}, given)
    (problem,) = caught.value.problems
    assert problem.key == key and reason in problem.reason
    config_from_dict({}, [*given, mended])


def with_critic(**model):
    """A resolved config that trains a critic."""
    config = config_from_dict({}, ["data.train_files=x.jsonl", f"{MODEL}.path=x"])
    config.critic.enable = True
    for name, value in model.items():
        setattr(config.critic.model, name, value)
    return config


@pytest.mark.parametrize(
    ("model", "key", "reason"),
    [
        ({"use_remove_padding": True}, "critic.model.use_remove_padding", "packs all or none"),
        ({"logits_chunk_mb": 1}, "critic.model.logits_chunk_mb", "no logits"),
    ],
)
def test_a_critic_packs_as_the_actor_does_and_has_no_logits(model, key, reason):
    def found(config) -> dict[str, str]:
        return {problem.key: problem.reason for problem in critic_problems(config)}

    assert reason in found(with_critic(**model))[key]
    assert not {"critic.model.use_remove_padding", "critic.model.logits_chunk_mb"} & {*found(with_critic())}


def test_what_the_critic_leaves_unset_is_the_actors():
    words = ["data.train_files=x.jsonl", f"{MODEL}.path=x", f"{MODEL}.use_remove_padding=true"]
    assert config_from_dict({}, words).critic.model.use_remove_padding is True
