"""What engines of a model with an adapter can do beside training it."""

from collections.abc import Iterator, Sequence

from torch import Tensor

from rlhf_mp.data.types import TokenBatch
from rlhf_mp.models.lora import without_adapter
from rlhf_mp.models.merge import adapter_tensors
from rlhf_mp.planner.term import Component
from rlhf_mp.train.base import ModuleEngine


class BaseScorer:
    """The frozen model under an adapter: the module that is trained, with its adapter off. There is no second copy."""

    def __init__(self, engine: ModuleEngine):
        self.engine, self.layout = engine, engine.layout

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        with without_adapter(self.engine.module):
            return self.engine.score(micro_batches)

    def tensors(self) -> Iterator[tuple[Component, Tensor]]:
        """Nothing: they are the trained model's."""
        return iter(())


def adapter_weights(engine: ModuleEngine) -> Iterator[tuple[str, Tensor]]:
    """Collective. What is trained, whole, under peft's names."""
    return engine.full(adapter_tensors(engine.module))
