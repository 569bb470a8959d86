"""An adapter that an engine serves beside its base: empty at the start, replaced whole by every swap.

Shapes: A [rank in], B [out rank], one pair for each matrix that is adapted.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_mp.config.lora_checks import ALL_LINEAR, IN_A_LAYER, PEFT_PREFIX, linear_names
from rlhf_mp.config.model_folder import stored_shapes
from rlhf_mp.config.schema import ModelConfig

NAME = "policy"  # of the adapter, in every request
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
TENSORS = "rlhf_mp_tensors"  # beside peft's own keys: what every version consists of


@dataclass(frozen=True)
class AdapterPlan:
    """What an engine knows of the adapter before it has any."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # last names of what is adapted
    tensors: tuple[str, ...]  # under peft's names


def plan_adapter(model: ModelConfig) -> AdapterPlan:
    """From the headers of the checkpoint: what the trainer sends is compared with it."""
    folder = Path(model.path)
    chosen = linear_names(folder) if model.target_modules == [ALL_LINEAR] else model.target_modules
    adapted = [
        name.removesuffix(".weight")
        for name, shape in stored_shapes(folder).items()
        if len(shape) == 2 and (found := IN_A_LAYER.search(name)) and found[1] in chosen
    ]
    tensors = [f"{PEFT_PREFIX}{name}.lora_{part}.weight" for name in adapted for part in "AB"]
    return AdapterPlan(model.lora_rank, model.lora_alpha, tuple(chosen), tuple(tensors))


def write_empty(plan: AdapterPlan, folder: Path) -> None:
    """What a server starts from: an adapter without tensors adds nothing."""
    from safetensors.torch import save_file

    own = {"peft_type": "LORA", "r": plan.rank, "lora_alpha": plan.alpha, "target_modules": list(plan.modules)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(own | {TENSORS: list(plan.tensors)}))
    save_file({}, folder / WEIGHTS_FILE)


def tensors_of(folder: Path) -> list[str]:
    """Names of what a version must have, as ``write_empty`` has left them."""
    return json.loads((folder / CONFIG_FILE).read_text())[TENSORS]


def adapter_arguments(plan: AdapterPlan, folder: Path, on_cpu: bool) -> dict[str, Any]:
    """SGLang's, for one adapter and the base, which its own health probe asks."""
    arguments = {
        "enable-lora": True,
        "lora-paths": [f"{NAME}={folder}"],
        "max-lora-rank": plan.rank,
        "lora-target-modules": list(plan.modules),
        "max-loras-per-batch": 2,
    }
    return arguments | {"lora-backend": "torch_native"} if on_cpu else arguments
