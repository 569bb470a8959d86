"""What a model ends in. The head says how a checkpoint is read, what a forward pass gives, what scoring keeps of it.

Engines run any of them by the same code. ``train/megatron_heads.py`` has what is different in Megatron's models.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Unpack, runtime_checkable

import torch
from torch import Tensor, nn

from rlhf_mp.data.types import Output, PolicyOutput, RewardOutput, TokenBatch, ValueOutput
from rlhf_mp.models.hf import Loading, load_causal_lm
from rlhf_mp.models.logprobs import policy_output
from rlhf_mp.models.packing import packed_row
from rlhf_mp.models.scalar import classifier_config, load_scalar_model


@runtime_checkable
class Head(Protocol):
    """Implemented for a policy, a critic and a reward model."""

    packed: bool  # micro-batches are rows of sequences without padding, see packing.py
    task: ClassVar[str]  # what transformers calls such models: <Architecture>For<task>
    new_modules: ClassVar[tuple[str, ...]]  # what the model does not have before it gets this head

    def load(self, path: str, dtype: torch.dtype, **how: Unpack[Loading]) -> nn.Module:
        """A checkpoint's model with this head; one that the checkpoint lacks is new, and 0."""
        ...

    def forward(self, model: nn.Module, batch: TokenBatch) -> Output:
        """One pass of a module made by ``load``, possibly wrapped by an engine."""
        ...

    def score(self, output: Output, batch: TokenBatch) -> Tensor:
        """What a caller without gradient wants of ``output``, shaped like ``like(batch)``."""
        ...

    def like(self, batch: TokenBatch) -> Tensor:
        """A tensor of the shape that ``score`` gives."""
        ...

    def saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json of a checkpoint of such models, from that of the checkpoint the model was made from."""
        ...


@dataclass(frozen=True)
class PolicyHead:
    """Log-probs of the tokens that were sampled."""

    temperature: float = 1.0  # log-probs are of the distribution that is sampled from
    entropy_grad: bool = False  # False saves the backward pass through the entropy when no loss uses it
    logits_chunk_bytes: int = 0  # float32 logits that exist at once; 0: those of a whole micro-batch
    packed: bool = False
    task: ClassVar[str] = "CausalLM"
    new_modules: ClassVar[tuple[str, ...]] = ()

    def load(self, path: str, dtype: torch.dtype, **how: Unpack[Loading]) -> nn.Module:
        return load_causal_lm(path, dtype, packed=self.packed, **how)

    def forward(self, model: nn.Module, batch: TokenBatch) -> PolicyOutput:
        return policy_output(
            model,
            batch,
            temperature=self.temperature,
            entropy_grad=self.entropy_grad,
            logits_chunk_bytes=self.logits_chunk_bytes,
            packed=self.packed,
        )

    def score(self, output: PolicyOutput, batch: TokenBatch) -> Tensor:
        return output.logprobs * batch.mask

    def like(self, batch: TokenBatch) -> Tensor:
        return batch.mask

    def saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return config


@dataclass(frozen=True)
class ScalarHead:
    """One number per position, from a linear layer on the last hidden state."""

    packed: bool = False
    bias: ClassVar[bool]
    task: ClassVar[str]
    new_modules: ClassVar[tuple[str, ...]] = ("score",)

    def load(self, path: str, dtype: torch.dtype, **how: Unpack[Loading]) -> nn.Module:
        return load_scalar_model(path, dtype, bias=self.bias, packed=self.packed, **how)

    def saved_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return classifier_config(config, self.task)


@dataclass(frozen=True)
class ValueHead(ScalarHead):
    """A critic: the value of the state that each token is drawn from."""

    bias = True
    task = "TokenClassification"

    def forward(self, model: nn.Module, batch: TokenBatch) -> ValueOutput:
        if self.packed:
            row = packed_row(batch)
            of_positions = model(input_ids=row.tokens, **row.attention_inputs()).squeeze(-1).float()  # [1 P]
            return ValueOutput(row.home(of_positions[0, row.source]))
        of_positions = model(input_ids=batch.tokens).squeeze(-1).float()  # [B T]
        return ValueOutput(nn.functional.pad(of_positions[:, :-1], (1, 0)))

    def score(self, output: ValueOutput, batch: TokenBatch) -> Tensor:
        return output.values * batch.mask

    def like(self, batch: TokenBatch) -> Tensor:
        return batch.mask


@dataclass(frozen=True)
class RewardHead(ScalarHead):
    """A reward model: what the sequence is worth, read off its last token."""

    bias = False
    task = "SequenceClassification"

    def forward(self, model: nn.Module, batch: TokenBatch) -> RewardOutput:
        if self.packed:
            row = packed_row(batch)
            of_positions = model(input_ids=row.tokens, **row.attention_inputs()).squeeze(-1).float()  # [1 P]
            return RewardOutput(of_positions[0, row.last])
        of_positions = model(input_ids=batch.tokens).squeeze(-1).float()  # [B T]
        last = batch.lengths.clamp(max=batch.tokens.shape[1]) - 1  # of an empty micro-batch's stub, lengths are longer
        return RewardOutput(of_positions.gather(1, last[:, None])[:, 0])

    def score(self, output: RewardOutput, batch: TokenBatch) -> Tensor:
        return output.rewards

    def like(self, batch: TokenBatch) -> Tensor:
        return batch.rewards
