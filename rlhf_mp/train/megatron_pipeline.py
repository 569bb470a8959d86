"""Micro-batches through all pipeline stages, forward or forward and backward, on Megatron's schedules."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor, nn

from rlhf_mp.config.schema import MegatronConfig
from rlhf_mp.data.types import LossFn, Output, TokenBatch, Totals
from rlhf_mp.train.accumulate import ForwardSettings, MetricSums, contagious
from rlhf_mp.train.megatron_heads import around_model, output_of
from rlhf_mp.train.megatron_inputs import ModelInput, packed, padded

Item = tuple[ModelInput, TokenBatch]


class Pipeline:
    """One model's stages on this rank. Every method is collective."""

    def __init__(self, models: list[nn.Module], megatron: MegatronConfig, settings: ForwardSettings, vocab_size: int):
        self.models, self.megatron, self.settings, self.vocab_size = models, megatron, settings, vocab_size
        self.is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)

    def train(self, micro_batches: Sequence[TokenBatch], totals: Totals, loss_fn: LossFn, sums: MetricSums) -> None:
        """Accumulate gradients of the summed losses; add the loss function's metrics to ``sums`` on the last stage."""

        def loss_of(item: Item, found: Tensor) -> tuple[Tensor, Tensor, dict]:
            loss, metrics = loss_fn(self._output(item, found), item[1], totals)
            sums.add(metrics)
            return contagious(loss), torch.ones((), dtype=torch.int, device=found.device), {}  # the 1 divides nothing

        self._run(self._full(micro_batches), loss_of, forward_only=False)

    @torch.no_grad()
    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        """What the head says of each micro-batch, on CPU, on every rank."""
        head = self.settings.head

        def score_of(item: Item, found: Tensor, non_loss_data: bool) -> Tensor:
            return head.score(self._output(item, found), item[1])

        found = self._run(self._full(micro_batches), score_of, forward_only=True, collect_non_loss_data=True)
        shapes = [head.like(batch).shape for batch in micro_batches]
        sizes = [shape.numel() for shape in shapes]
        flat = torch.empty(sum(sizes), device=self.settings.device)
        if self.is_last:
            flat = torch.cat([scores.flatten() for scores in found[: len(sizes)]])
        group = parallel_state.get_pipeline_model_parallel_group()
        dist.broadcast(flat, parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
        return [part.view(shape) for part, shape in zip(flat.cpu().split(sizes), shapes, strict=True)]

    def _full(self, micro_batches: Sequence[TokenBatch]) -> list[TokenBatch]:
        """Interleaved stages take turns in rounds of as many micro-batches as there are ranks: empty ones fill up."""
        micro_batches = list(micro_batches)
        if len(self.models) > 1:
            missing = -len(micro_batches) % self.megatron.pipeline_model_parallel_size
            micro_batches += [micro_batches[-1].silenced()] * missing
        return micro_batches

    def _run(self, micro_batches: list[TokenBatch], on_output: Callable, **how) -> list:
        """``on_output(item, model output)`` of every micro-batch, on the last stage; an empty list on the others."""
        items = [self._item(batch) for batch in micro_batches]
        iterators = [iter(items) for _ in self.models]
        single = len(self.models) == 1

        def forward(iterator, model: nn.Module) -> tuple[Tensor, Callable]:
            item = next(iterator)
            with around_model(self.settings.head, model, item[0], self.vocab_size):
                output = model(
                    input_ids=item[0].tokens,
                    position_ids=item[0].positions,
                    attention_mask=None,
                    packed_seq_params=item[0].packed,
                )
            return output, partial(on_output, item)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iterators[0] if single else iterators,
            model=self.models[0] if single else self.models,
            num_microbatches=len(items),
            seq_length=max(item[0].tokens.shape[1] for item in items),  # stages exchange real shapes anyway
            micro_batch_size=1,
            **how,
        )

    def _item(self, batch: TokenBatch) -> Item:
        batch = batch.to(self.settings.device)
        multiple = self.megatron.tensor_model_parallel_size if self.megatron.sequence_parallel else 1
        if self.settings.head.packed:
            return packed(batch, multiple), batch
        return padded(batch, parallel_state.get_context_parallel_group(), multiple), batch

    def _output(self, item: Item, found: Tensor) -> Output:
        return output_of(self.settings.head, found, item[0])
