"""DeepSpeed ZeRO 0-3 behind the engine protocols. The only module that imports deepspeed.

``torch._dynamo`` must be imported before a model is built under ZeRO-3: DeepSpeed patches tensor constructors while
building, and transformers would otherwise import dynamo right in the middle of that.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import deepspeed
import torch
import torch._dynamo
import torch.distributed as dist
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from rlhf_mp.config.schema import OffloadConfig, TrainedConfig
from rlhf_mp.data.types import LossFn, Sums, TokenBatch, Totals
from rlhf_mp.errors import CheckpointError
from rlhf_mp.planner.term import Component
from rlhf_mp.train import accumulate
from rlhf_mp.train.accumulate import ForwardSettings, MetricSums
from rlhf_mp.train.base import ParallelLayout, unobserved
from rlhf_mp.train.deepspeed_config import score_config, train_config
from rlhf_mp.train.deepspeed_tensors import deepspeed_tensors
from rlhf_mp.train.optimizer import learning_rate_factor

TAG = "engine"
GATHER_ELEMENTS = 50_000_000  # gathered at once for export: one at a time is several times slower


def init_distributed() -> None:
    """Join the launched ranks: NCCL with GPUs, gloo on CPU."""
    deepspeed_logger.setLevel("WARNING")
    deepspeed.init_distributed(verbose=False)


@contextmanager
def _partitioned(config: dict) -> Iterator[None]:
    """Models built inside are ZeRO-3-partitioned as they are read, never whole on one rank."""
    if config["zero_optimization"]["stage"] != 3:
        yield
        return
    keep_alive = HfDeepSpeedConfig(config)  # transformers holds only a weak reference to it
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del keep_alive


def data_parallel_layout() -> ParallelLayout:
    """Every rank has data of its own."""
    return ParallelLayout(dist.get_rank(), dist.get_world_size(), is_output_rank=True)


class DeepSpeedScorer:
    """A frozen model, ZeRO-3-partitioned over all ranks."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        settings: ForwardSettings,
        trained: TrainedConfig,
        fsdp: OffloadConfig,
        dtype: str,
    ):
        config = score_config(trained, fsdp, dtype=dtype)
        with _partitioned(config):
            module = build().requires_grad_(False)
        self.engine, *_ = deepspeed.initialize(model=module, config=config)
        self.engine.eval()
        self.settings = settings
        self.layout = data_parallel_layout()

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        return accumulate.score(self.engine, micro_batches, self.settings)

    def tensors(self) -> Iterator[tuple[Component, Tensor]]:
        return deepspeed_tensors(self.engine)


class DeepSpeedEngine:
    """A trained model. Every rank must call every method, in the same order, with equally many micro-batches."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        settings: ForwardSettings,
        trained: TrainedConfig,
        num_steps: int,
        dtype: str,
        layout: ParallelLayout | None = None,
    ):
        """
        Args:
            layout: which ranks get the same data; None: each has its own.
        """
        config = train_config(trained, dtype=dtype, on_cpu=settings.device.type == "cpu")
        factor = learning_rate_factor(trained.optim, num_steps)
        with _partitioned(config):
            module = build()
        self.engine, *_ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            config=config,
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, factor),
        )
        self.settings = settings
        self.stage = config["zero_optimization"]["stage"]
        self.before_step = unobserved
        self.layout = layout or data_parallel_layout()

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        self.engine.eval()
        return accumulate.score(self.engine, micro_batches, self.settings)

    def tensors(self) -> Iterator[tuple[Component, Tensor]]:
        return deepspeed_tensors(self.engine)

    def train_step(self, micro_batches: Sequence[TokenBatch], totals: Totals, loss_fn: LossFn) -> Sums:
        self.engine.train()
        sums = MetricSums()
        parts = accumulate.losses(self.engine, micro_batches, totals, loss_fn, self.settings, sums.add)
        lr = self.engine.get_lr()[0]
        for index, loss in enumerate(parts, start=1):
            self.engine.set_gradient_accumulation_boundary(index == len(micro_batches))
            # DeepSpeed averages gradients over all ranks; ours are already parts of one global sum (R3), in which
            # ranks with the same data count once.
            self.engine.backward(loss * self.layout.dp_size)
        # Stage 0 in float32 is plain data parallelism: DeepSpeed has no optimizer of its own there that knows the norm.
        plain = self.stage == 0 and not self.engine.bfloat16_enabled()
        norm = nn.utils.get_total_norm(p.grad for p in self.engine.module.parameters()) if plain else None
        self.before_step(micro_batches)
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm() if norm is None else norm)
        own = sums.result() if self.layout.is_output_rank else {}
        return own | {"grad_norm": (norm, 1), "lr": (lr, 1)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective. ZeRO-3 gathers a bucket of parameters at a time, in the same order on all ranks."""
        for bucket in self._buckets():
            params = [p for _, p in bucket]
            with deepspeed.zero.GatheredParameters(params) if self.stage == 3 else nullcontext():
                yield from bucket

    def _buckets(self) -> Iterator[list[tuple[str, nn.Parameter]]]:
        bucket: list[tuple[str, nn.Parameter]] = []
        used = 0
        for name, param in self.engine.module.named_parameters():
            size = param.ds_numel if self.stage == 3 else param.numel()
            if bucket and used + size > GATHER_ELEMENTS:
                yield bucket
                bucket, used = [], 0
            bucket.append((name, param))
            used += size
        yield bucket

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), tag=TAG)

    def load(self, directory: Path) -> None:
        path, _ = self.engine.load_checkpoint(str(directory), tag=TAG)
        if path is None:  # DeepSpeed only warns and would train from scratch
            raise CheckpointError(f"{directory}: DeepSpeed found no checkpoint there")
        _replay_cpu_adam(self.engine.basic_optimizer)


def _replay_cpu_adam(optimizer: torch.optim.Optimizer) -> None:
    """Bring DeepSpeedCPUAdam's running products beta^t to where an uninterrupted run has them.

    They live in C++, are updated by multiplication and recomputed by ``pow`` after a restart, which differs in the
    last bit: without this a resumed run is not bit-identical.
    """
    if not isinstance(optimizer, deepspeed.ops.adam.DeepSpeedCPUAdam):
        return
    steps = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    group = optimizer.param_groups[0]
    lr, (beta1, beta2), eps, decay = group["lr"], group["betas"], group["eps"], group["weight_decay"]
    native, key = optimizer.ds_opt_adam, optimizer.opt_id
    native.destroy_adam(key)
    native.create_adam(key, lr, beta1, beta2, eps, decay, optimizer.adam_w_mode, False)
    scratch = [torch.zeros(16) for _ in range(4)]
    for step in range(1, max(steps, default=0) + 1):
        native.adam_update(key, step, lr, beta1, beta2, eps, decay, group["bias_correction"], *scratch)
