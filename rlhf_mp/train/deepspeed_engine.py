"""DeepSpeed ZeRO 0-3 behind the engine protocols. The only module that imports deepspeed.

``torch._dynamo`` must be imported before a model is built under ZeRO-3: DeepSpeed patches tensor constructors while
building, and transformers would otherwise import dynamo right in the middle of that.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import deepspeed
import torch
import torch._dynamo
import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
from deepspeed.utils import logger as deepspeed_logger
from torch import Tensor, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from rlhf_mp.cluster.shared_memory import allreduce_buffers, remove_named
from rlhf_mp.config.schema import OffloadConfig, TrainedConfig
from rlhf_mp.data.types import LossFn, Sums, TokenBatch, Totals
from rlhf_mp.errors import CheckpointError
from rlhf_mp.models.merge import Stored, checkpoint_tensors
from rlhf_mp.planner.term import Component
from rlhf_mp.train import accumulate, deepspeed_universal
from rlhf_mp.train.accumulate import ForwardSettings, MetricSums
from rlhf_mp.train.base import ParallelLayout, Writing, unobserved
from rlhf_mp.train.deepspeed_config import score_config, train_config
from rlhf_mp.train.deepspeed_tensors import deepspeed_tensors
from rlhf_mp.train.optimizer import learning_rate_factor
from rlhf_mp.train.snapshot import Snapshot

TAG = "engine"
GATHER_ELEMENTS = 50_000_000  # gathered at once for export: one at a time is several times slower


def init_distributed() -> None:
    """Join the launched ranks: NCCL with GPUs, gloo on CPU."""
    deepspeed_logger.setLevel("WARNING")
    deepspeed.init_distributed(verbose=False)
    if dist.get_backend() == "gloo":
        dist.barrier()  # all have mapped all buffers: nameless, they end with the last rank, however it ends
        remove_named([f"{allreduce_buffers()}{dist.get_rank()}"])


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
        trained = (p for p in self.module.parameters() if p.requires_grad)
        norm = nn.utils.get_total_norm(p.grad for p in trained) if plain else None
        self.before_step(micro_batches)
        if norm is None or norm.isfinite():  # where DeepSpeed knows the norm it skips such a step by itself
            self.engine.step()
        else:
            self.engine.zero_grad()
        norm = float(self.engine.get_global_grad_norm() if norm is None else norm)
        own = sums.result() if self.layout.is_output_rank else {}
        return own | {"grad_norm": (norm, 1), "lr": (lr, 1)}

    @property
    def module(self) -> nn.Module:
        return self.engine.module

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.full(checkpoint_tensors(self.module))

    def full(self, stored: Iterable[Stored]) -> Iterator[tuple[str, Tensor]]:
        """Collective. ZeRO-3 gathers a bucket of parameters at a time, in the same order on all ranks."""
        for bucket in self._buckets(stored):
            params = [part for tensor in bucket for part in tensor.parts]
            with deepspeed.zero.GatheredParameters(params) if self.stage == 3 else nullcontext():
                yield from ((tensor.name, tensor.value()) for tensor in bucket)

    def _buckets(self, stored: Iterable[Stored]) -> Iterator[list[Stored]]:
        bucket: list[Stored] = []
        used = 0
        for tensor in stored:
            size = sum(part.ds_numel if self.stage == 3 else part.numel() for part in tensor.parts)
            if bucket and used + size > GATHER_ELEMENTS:
                yield bucket
                bucket, used = [], 0
            bucket.append(tensor)
            used += size
        yield bucket

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(directory), tag=TAG, exclude_frozen_parameters=True)

    def snapshot(self, directory: Path) -> Writing:
        writer, copies = self.engine.checkpoint_engine, _HostCopies()
        self.engine.checkpoint_engine = copies
        try:
            self.save(directory)
        finally:
            self.engine.checkpoint_engine = writer
        return copies.taken

    def load(self, directory: Path) -> None:
        with self._resharded(directory) as tag:
            path, _ = self.engine.load_checkpoint(str(directory), tag=tag)
        if path is None:  # DeepSpeed only warns and would train from scratch
            raise CheckpointError(f"{directory}: DeepSpeed found no checkpoint there")
        _replay_cpu_adam(self.engine.basic_optimizer)

    @contextmanager
    def _resharded(self, directory: Path) -> Iterator[str]:
        """The tag of what this number of ranks can load. Collective."""
        saved_by = deepspeed_universal.num_shards(directory / TAG)
        if saved_by in (0, dist.get_world_size()):
            yield TAG
            return
        if isinstance(self.engine.basic_optimizer, torch.optim.SGD):
            raise CheckpointError(
                f"{directory} was written by {saved_by} ranks, and DeepSpeed reshapes AdamW's state alone\n"
                "    fix: as many ranks"
            )
        if self.engine.zero_nvme_offload_optimizer():
            raise CheckpointError(
                f"{directory} was written by {saved_by} ranks, and an optimizer on a disk needs as many again\n"
                "    fix: deepspeed.offload_device=cpu, or as many ranks"
            )
        failed: list[Exception | None] = [None]
        if dist.get_rank() == 0:
            try:
                deepspeed_universal.convert(directory / TAG)
            except (CheckpointError, OSError) as error:
                failed = [error]
        dist.broadcast_object_list(failed, src=0)
        if failed[0] is not None:
            raise CheckpointError(str(failed[0]))
        self.engine._config.load_universal_checkpoint = True  # DeepSpeed knows no other way to say it for one load
        try:
            yield deepspeed_universal.UNIVERSAL
        finally:
            self.engine._config.load_universal_checkpoint = False


class _HostCopies(CheckpointEngine):
    """In the place of what writes DeepSpeed's files: keeps copies of what would be in them."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = Snapshot()

    def create(self, info: CheckpointCommitInfo) -> None:
        pass

    def save(self, state_dict: dict, path: str) -> None:
        self.taken.add(Path(path), state_dict)

    def load(self, path: str, map_location: object = None) -> dict:
        raise NotImplementedError("it only stands in while a snapshot is taken")

    def commit(self, info: CheckpointCommitInfo) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # then DeepSpeed need not copy first


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
