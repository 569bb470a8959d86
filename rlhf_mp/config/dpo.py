"""The section ``dpo``."""

from dataclasses import dataclass
from typing import Literal

from rlhf_mp.config.knob import knob


@dataclass
class DpoConfig:
    """Direct preference optimisation (trainer.task=dpo)."""

    beta: float = knob(0.1, "how dear it is to leave the reference model", gt=0)
    loss_type: Literal["sigmoid", "ipo"] = knob("sigmoid", "registered preference loss")
    label_smoothing: float = knob(0.0, "share of pairs taken to be labelled the wrong way round", ge=0, le=0.5)
