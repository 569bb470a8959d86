"""Low-rank adapters beside the linear layers of a frozen model. The only module that imports peft.

Source: LoRA, arXiv:2106.09685.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import save_file
from torch import Tensor, nn

from rlhf_mp.config.lora_checks import ALL_LINEAR
from rlhf_mp.config.schema import ModelConfig
from rlhf_mp.errors import ConfigError, Problem
from rlhf_mp.models.heads import Head
from rlhf_mp.models.merge import ADAPTER

PEFT_TASKS = {"CausalLM": "CAUSAL_LM", "TokenClassification": "TOKEN_CLS", "SequenceClassification": "SEQ_CLS"}


def add_adapter(
    module: nn.Module, layers: Sequence[nn.Module], model: ModelConfig, head: Head, dtype: torch.dtype
) -> nn.Module:
    """``module``, changed: frozen but for new adapters in ``layers`` and for what its head has brought.

    Its state dict then holds nothing but what is trained. Adapters begin with B = 0: the model is still its base.

    Args:
        dtype: of the adapters.

    Raises:
        ConfigError: a layer that is to be adapted does not exist.
    """
    config = LoraConfig(
        task_type=PEFT_TASKS[head.task],
        base_model_name_or_path=model.path,
        r=model.lora_rank,
        lora_alpha=model.lora_alpha,
        lora_dropout=model.lora_dropout,
        target_modules=_targets(layers, model),
    )
    inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    config.modules_to_save = list(head.new_modules) or None  # told to readers; peft would wrap what it is told itself
    for name in head.new_modules:
        module.get_submodule(name).requires_grad_(True)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    _leave_out_frozen(module)
    return module


def _targets(layers: Sequence[nn.Module], model: ModelConfig) -> list[str]:
    parts = [(name.rpartition(".")[2], part) for layer in layers for name, part in layer.named_modules()]
    linear = sorted({name for name, part in parts if isinstance(part, nn.Linear)})
    chosen = linear if model.target_modules == [ALL_LINEAR] else model.target_modules
    if not chosen or not set(chosen) <= set(linear):
        reason = f"the linear layers of this model are {', '.join(linear) or 'none'}"
        raise ConfigError([Problem("target_modules", model.target_modules, reason, "name some of these")])
    return chosen


def _leave_out_frozen(module: nn.Module) -> None:
    """Checkpoints of the module have what is trained and no more, whoever writes and reads them."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}

    def leave_out(_: nn.Module, state: dict[str, Tensor], prefix: str, __: dict) -> None:
        for name in [name for name in state if name.startswith(prefix)]:
            if name.removeprefix(prefix) not in trained:
                del state[name]

    def not_missing(_: nn.Module, keys: object) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name in trained]

    module.register_state_dict_post_hook(leave_out)
    module.register_load_state_dict_post_hook(not_missing)


@contextmanager
def without_adapter(module: nn.Module) -> Iterator[None]:
    """The base alone: adapters are not computed."""
    layers = [part for part in module.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def save_adapter(weights: Iterable[tuple[str, Tensor]], module: nn.Module, directory: Path) -> None:
    """Write what ``PeftModel.from_pretrained`` reads.

    Args:
        weights: whole, under peft's names (``merge.adapter_tensors``); each is copied before the next is asked for.
    """
    directory.mkdir(parents=True, exist_ok=True)
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in weights}
    save_file(copies, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    module.peft_config[ADAPTER].save_pretrained(str(directory))
