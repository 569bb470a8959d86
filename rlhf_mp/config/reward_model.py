"""The section ``reward_model``. A frozen model has fewer knobs than one that is trained."""

from dataclasses import dataclass
from typing import Any, Literal

from rlhf_mp.config.knob import knob, section


@dataclass
class FrozenModelConfig:
    """The reward model's checkpoint and how it is held."""

    path: str = knob("", "Hugging Face checkpoint folder of an AutoModelForSequenceClassification with one label")
    dtype: Literal["float32", "bfloat16"] = knob("bfloat16", "of weights and activations")
    quantization: Literal["nf4", "int8"] | None = knob(None, "its matrices in 4 or 8 bits (bitsandbytes); unset: none")
    use_remove_padding: bool = knob(False, "micro-batches of sequences one after the other, instead of padded")
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = knob(
        "auto", "as actor_rollout_ref.model.attn_implementation"
    )
    trust_remote_code: bool = knob(False, "run code that comes with the checkpoint")


@dataclass
class FrozenOffloadConfig:
    """ZeRO settings under the names used for FSDP."""

    param_offload: bool = knob(False, "keep parameters in host memory, fetch a layer at a time (ZeRO-3)")


@dataclass
class RewardServerConfig:
    """SGLang servers of the reward model's own, with strategy=sglang."""

    num_engines: int = knob(1, "servers", ge=1)
    tensor_model_parallel_size: int = knob(1, "GPUs per server", ge=1)
    max_num_batched_tokens: int = knob(
        8192, "tokens scored at once, and slots of the cache that this takes; at least one sequence", ge=1
    )
    engine_args: dict[str, Any] = knob({}, "passed on to sglang.launch_server as they are")
    request_timeout_s: float = knob(600, "one group of responses may take so long", gt=0)


@dataclass
class RewardModelConfig:
    """A reward model in the loop of trainer.task=rl."""

    enable: bool = knob(False, "score responses with a reward model")
    strategy: Literal["actor", "sglang"] = knob(
        "actor",
        "actor: scored on the training ranks, by the actor's backend and in its layout; "
        "sglang: as soon as a group is sampled, by SGLang servers of its own",
    )
    model: FrozenModelConfig = section(FrozenModelConfig)
    fsdp_config: FrozenOffloadConfig = section(FrozenOffloadConfig)
    rollout: RewardServerConfig = section(RewardServerConfig)
    coef: float = knob(1.0, "weight of its score in the reward")
    rule_coef: float = knob(0.0, "weight of the rule reward beside it; 0: the rule reward is only logged")
    normalize: bool = knob(False, "scores minus their running mean, divided by their running standard deviation")
    clip: float | None = knob(None, "scores beyond this distance from 0 count as it; unset: as they are", gt=0)

    @property
    def served(self) -> bool:
        """Scores come with the responses, from servers of its own."""
        return self.enable and self.strategy == "sglang"
