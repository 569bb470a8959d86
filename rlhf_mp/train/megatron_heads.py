"""What differs between Megatron's policies, critics and reward models: the last layer, and how its output is read."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import singledispatch

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from rlhf_mp.data.types import Output, PolicyOutput, RewardOutput, ValueOutput
from rlhf_mp.models.chunked_head import Scoring, VocabularySlices, head_outputs, standing_in
from rlhf_mp.models.heads import Head, PolicyHead, RewardHead, ScalarHead, ValueHead
from rlhf_mp.train.megatron_inputs import ModelInput


@singledispatch
def around_model(head: Head, model: nn.Module, model_input: ModelInput, vocab_size: int) -> AbstractContextManager:
    """Entered while ``model``, one part of a pipeline, runs forward.

    Args:
        vocab_size: without what pads it.
    """
    return nullcontext()


@around_model.register
def _(head: PolicyHead, model: nn.Module, model_input: ModelInput, vocab_size: int) -> AbstractContextManager:
    """The last layer gives log-probs and entropies in place of logits: [s b 2]."""
    (part,) = (module for module in model.modules() if isinstance(module, GPTModel))
    if not part.post_process:
        return nullcontext()
    layer = part.output_layer
    slices = VocabularySlices(parallel_state.get_tensor_model_parallel_group(), vocab_size)
    scoring = Scoring(head.temperature, head.entropy_grad, head.logits_chunk_bytes)

    def score(
        hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        if layer.sequence_parallel:  # backward, both add up the parts of the hidden states' gradient
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        else:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        targets = model_input.targets.T
        own = layer.weight if weight is None else weight
        pair = head_outputs(hidden.flatten(0, 1), own, layer.bias, targets.flatten(), scoring, slices)
        return torch.stack(pair, dim=-1).view(*targets.shape, 2), None

    return standing_in(layer, score)


@singledispatch
def output_of(head: Head, found: Tensor, model_input: ModelInput) -> Output:
    """What a loss sees, from what the last pipeline stage gave.

    Args:
        found: [b s 2], log-probs and entropies, or [b s 1] under a head of one output.
    """
    raise TypeError(head)


@output_of.register
def _(head: PolicyHead, found: Tensor, model_input: ModelInput) -> PolicyOutput:
    return PolicyOutput(*(model_input.restore(values) for values in found.unbind(-1)))


@output_of.register
def _(head: ValueHead, found: Tensor, model_input: ModelInput) -> ValueOutput:
    return ValueOutput(model_input.restore(found.squeeze(-1)))


@output_of.register
def _(head: RewardHead, found: Tensor, model_input: ModelInput) -> RewardOutput:
    return RewardOutput(model_input.at_last(found.squeeze(-1)))


@singledispatch
def last_layers(head: Head) -> list[Callable[..., None]]:
    """What mbridge is to call on each part of a model it has made, so that it ends in ``head``."""
    raise TypeError(head)


@last_layers.register
def _(head: PolicyHead) -> list[Callable[..., None]]:
    return []


@last_layers.register
def _(head: ScalarHead) -> list[Callable[..., None]]:
    def replace_vocabulary(model: GPTModel, post_process: bool, config: TransformerConfig, **_: object) -> None:
        if post_process:
            model.output_layer = ScalarLayer(config, bias=head.bias)

    return [replace_vocabulary]


class ScalarLayer(torch.nn.Linear):
    """Hidden state to one number, whole on every tensor-parallel rank; under sequence parallelism each has its part."""

    def __init__(self, config: TransformerConfig, *, bias: bool):
        super().__init__(config.hidden_size, 1, bias=bias, dtype=config.params_dtype)
        self.is_sequence_parallel = config.sequence_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # its gradient is added up over the parts

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """From [s b H] to [S b 1]. The other arguments are a vocabulary's."""
        values = super().forward(hidden).float()
        if self.is_sequence_parallel:
            # Every rank computes the whole loss, so backward each takes its own part of the gradient.
            values = tensor_parallel.gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None
