"""Rules of ``attn_implementation``: what a backend, a packed row, a device or a type of weights leaves to choose."""

from collections.abc import Iterator
from importlib.util import find_spec

from rlhf_mp.config.reward_model import FrozenModelConfig
from rlhf_mp.config.schema import ModelConfig, RunConfig
from rlhf_mp.errors import Problem


def attention_problems(config: RunConfig) -> Iterator[Problem]:
    """Of every model, once knobs that follow from others are filled in."""
    for trained in config.trained:
        strategy = f"{trained.key}.strategy={trained.updates.strategy}"
        yield from _problems(trained.model_key, trained.model, strategy, config.trainer.device)
    if config.reward_model.enable:
        strategy = f"actor_rollout_ref.actor.strategy={config.actor_rollout_ref.actor.strategy}"
        yield from _problems("reward_model.model", config.reward_model.model, strategy, config.trainer.device)


def _problems(key: str, model: ModelConfig | FrozenModelConfig, strategy: str, device: str) -> Iterator[Problem]:
    chosen, auto = model.attn_implementation, f"{key}.attn_implementation=auto"

    def problem(reason: str, fix: str = auto) -> Problem:
        return Problem(f"{key}.attn_implementation", chosen, reason, fix)

    if chosen != "auto" and strategy.endswith("megatron"):
        yield problem(f"no effect with {strategy}, which has attention of its own")
    elif chosen == "eager" and model.use_remove_padding:
        reason = "sequences of a packed row would see each other"
        yield problem(f"{reason} ({key}.use_remove_padding=true)", f"{auto}, or {key}.use_remove_padding=false")
    elif chosen == "flash_attention_2" and device == "cpu":
        yield problem("it runs on a GPU only, and trainer.device=cpu")
    elif chosen == "flash_attention_2" and model.dtype == "float32":
        yield problem("it computes in 16 bits only", f"{auto}, or {key}.dtype=bfloat16")
    elif chosen == "flash_attention_2" and find_spec("flash_attn") is None:
        yield problem("the package flash-attn is not installed", f"pip install flash-attn, or {auto}")
