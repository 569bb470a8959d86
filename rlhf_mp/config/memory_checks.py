"""Rules of the memory levers of one trained model: a knob that changes nothing is a problem."""

from collections.abc import Iterator

from rlhf_mp.config.schema import ModelConfig, TrainedModel
from rlhf_mp.errors import Problem


def memory_problems(trained: TrainedModel) -> Iterator[Problem]:
    """Once knobs that follow from others are filled in."""
    model, key = trained.model, trained.model_key
    every, layers = model.checkpoint_every_n_layers, model.activation_offload_layers
    if every != 1 and not model.enable_gradient_checkpointing:
        yield Problem(
            f"{key}.checkpoint_every_n_layers",
            every,
            f"no effect with {key}.enable_gradient_checkpointing=false",
            f"{key}.enable_gradient_checkpointing=true",
        )
    elif every != 1 and trained.updates.strategy == "megatron":
        yield Problem(
            f"{key}.checkpoint_every_n_layers",
            every,
            f"no effect with {trained.key}.strategy=megatron",
            f"{key}.checkpoint_every_n_layers=1, or {trained.key}.megatron.recompute=selective",
        )
    if layers != ModelConfig().activation_offload_layers and not model.enable_activation_offload:
        yield Problem(
            f"{key}.activation_offload_layers",
            layers,
            f"no effect with {key}.enable_activation_offload=false",
            f"{key}.enable_activation_offload=true",
        )
