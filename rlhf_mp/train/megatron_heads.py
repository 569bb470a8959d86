"""What differs between Megatron's policies, critics and reward models: the last layer, and how its output is read."""

from collections.abc import Callable
from functools import singledispatch

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from rlhf_mp.data.types import Output, PolicyOutput, RewardOutput, ValueOutput
from rlhf_mp.models.heads import Head, PolicyHead, RewardHead, ScalarHead, ValueHead
from rlhf_mp.train.megatron_inputs import ModelInput
from rlhf_mp.train.megatron_logprobs import vocab_parallel_logprobs_and_entropy


@singledispatch
def output_of(head: Head, found: Tensor, model_input: ModelInput, vocab_size: int) -> Output:
    """What a loss sees, from what the last pipeline stage gave.

    Args:
        found: [b s V] with this rank's slice of the vocabulary, [b s 1] under a head of one output.
        vocab_size: without what pads it.
    """
    raise TypeError(head)


@output_of.register
def _(head: PolicyHead, found: Tensor, model_input: ModelInput, vocab_size: int) -> PolicyOutput:
    values = vocab_parallel_logprobs_and_entropy(
        found.flatten(0, 1),
        model_input.targets.flatten(),
        parallel_state.get_tensor_model_parallel_group(),
        vocab_size,
        temperature=head.temperature,
        entropy_grad=head.entropy_grad,
    )
    return PolicyOutput(*(model_input.restore(x.view(model_input.targets.shape)) for x in values))


@output_of.register
def _(head: ValueHead, found: Tensor, model_input: ModelInput, vocab_size: int) -> ValueOutput:
    return ValueOutput(model_input.restore(found.squeeze(-1)))


@output_of.register
def _(head: RewardHead, found: Tensor, model_input: ModelInput, vocab_size: int) -> RewardOutput:
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
