"""The section ``reward_model``. A frozen model has fewer knobs than one that is trained."""

from dataclasses import dataclass
from typing import Literal

from rlhf_mp.config.knob import knob, section


@dataclass
class FrozenModelConfig:
    """The reward model's checkpoint and how it is held."""

    path: str = knob("", "Hugging Face checkpoint folder of an AutoModelForSequenceClassification with one label")
    dtype: Literal["float32", "bfloat16"] = knob("bfloat16", "of weights and activations")
    use_remove_padding: bool = knob(False, "micro-batches of sequences one after the other, instead of padded")
    trust_remote_code: bool = knob(False, "run code that comes with the checkpoint")


@dataclass
class FrozenOffloadConfig:
    """ZeRO settings under the names used for FSDP."""

    param_offload: bool = knob(False, "keep parameters in host memory, fetch a layer at a time (ZeRO-3)")


@dataclass
class RewardModelConfig:
    """A reward model in the loop of trainer.task=rl, scored on the training ranks."""

    enable: bool = knob(False, "score responses with a reward model")
    model: FrozenModelConfig = section(FrozenModelConfig)
    fsdp_config: FrozenOffloadConfig = section(FrozenOffloadConfig)
    coef: float = knob(1.0, "weight of its score in the reward")
    rule_coef: float = knob(0.0, "weight of the rule reward beside it; 0: the rule reward is only logged")
    normalize: bool = knob(False, "scores minus their running mean, divided by their running standard deviation")
    clip: float | None = knob(None, "scores beyond this distance from 0 count as it; unset: as they are", gt=0)
