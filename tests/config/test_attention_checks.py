"""An implementation of attention that cannot be, or changes nothing, is told with what to type."""

import pytest

from rlhf_mp.config import attention_checks
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.errors import ConfigError

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
EAGER, FLASH = f"{MODEL}.attn_implementation=eager", f"{MODEL}.attn_implementation=flash_attention_2"
GIVEN = ["data.train_files=x.jsonl", f"{MODEL}.path=x"]


@pytest.fixture
def flash_is_installed(monkeypatch):
    monkeypatch.setattr(attention_checks, "find_spec", lambda name: True)


def problem_of(words):
    with pytest.raises(ConfigError) as caught:
        config_from_dict({}, [*GIVEN, *words])
    (problem,) = caught.value.problems
    return problem


@pytest.mark.parametrize(
    ("words", "key", "reason", "mended"),
    [
        ([EAGER, f"{ACTOR}.strategy=megatron"], MODEL, "no effect with", f"{ACTOR}.strategy=deepspeed"),
        ([EAGER, f"{MODEL}.use_remove_padding=true"], MODEL, "packed row", f"{MODEL}.use_remove_padding=false"),
        ([FLASH, "trainer.device=cpu"], MODEL, "trainer.device=cpu", "trainer.device=auto"),
        ([FLASH, f"{MODEL}.dtype=float32"], MODEL, "16 bits", f"{MODEL}.dtype=bfloat16"),
        (
            ["algorithm.adv_estimator=gae", "critic.model.dtype=float32", FLASH],
            "critic.model",
            "16 bits",
            "critic.model.attn_implementation=sdpa",
        ),
        (
            [
                "reward_model.enable=true",
                "reward_model.model.path=x",
                "reward_model.model.attn_implementation=eager",
                f"{ACTOR}.strategy=megatron",
            ],
            "reward_model.model",
            "no effect with",
            "reward_model.model.attn_implementation=auto",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_its_fix_mends_it(flash_is_installed, words, key, reason, mended):
    problem = problem_of(words)
    assert problem.key == f"{key}.attn_implementation" and reason in problem.reason
    config_from_dict({}, [*GIVEN, *words, mended])


def test_flash_attention_needs_its_package(monkeypatch):
    monkeypatch.setattr(attention_checks, "find_spec", lambda name: None)
    assert "pip install flash-attn" in problem_of([FLASH]).fix


def test_the_critic_attends_as_the_actor_does_where_its_backend_lets_it():
    words = [*GIVEN, "algorithm.adv_estimator=gae", EAGER]
    assert config_from_dict({}, words).critic.model.attn_implementation == "eager"
    mixed = config_from_dict({}, [*words, "critic.strategy=megatron"])
    assert mixed.critic.model.attn_implementation == "auto"


def test_verls_spelling_is_understood():
    config = config_from_dict({}, [*GIVEN, f"{MODEL}.override_config.attn_implementation=eager"])
    assert config.actor_rollout_ref.model.attn_implementation == "eager"
