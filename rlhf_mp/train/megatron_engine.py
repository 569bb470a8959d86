"""Megatron-Core behind the engine protocols: tensor, pipeline, sequence, context and data parallelism.

On a CPU ``megatron_cpu.install()`` must run before this module is imported.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import ChainedOptimizer, MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from rlhf_mp.config.schema import MegatronConfig, ModelConfig, TrainedConfig
from rlhf_mp.data.types import LossFn, Sums, TokenBatch, Totals
from rlhf_mp.models.hf import DTYPES
from rlhf_mp.planner.term import Component
from rlhf_mp.train import megatron_checkpoint
from rlhf_mp.train.accumulate import ForwardSettings, MetricSums
from rlhf_mp.train.base import ParallelLayout, Writing, unobserved
from rlhf_mp.train.megatron_bridge import HfBridge
from rlhf_mp.train.megatron_pipeline import Pipeline
from rlhf_mp.train.megatron_tensors import megatron_tensors
from rlhf_mp.train.optimizer import learning_rate_factor


def init_distributed(device: torch.device) -> None:
    """Join the launched ranks: NCCL with GPUs, gloo on CPU."""
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")


def join_model_parallel(megatron: MegatronConfig) -> ParallelLayout:
    """Collective. Form Megatron's process groups, once; all models of a job share them."""
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            megatron.tensor_model_parallel_size,
            megatron.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=megatron.virtual_pipeline_model_parallel_size,
            context_parallel_size=megatron.context_parallel_size,
        )
        # Nothing random happens (no dropout, no initialisation), but sequence parallelism asks for the generator.
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    return ParallelLayout(
        dp_rank=parallel_state.get_data_parallel_rank(),
        dp_size=parallel_state.get_data_parallel_world_size(),
        is_output_rank=parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.get_context_parallel_rank() == 0,
    )


def transformer_settings(megatron: MegatronConfig, *, recompute: bool) -> dict[str, Any]:
    """Fields of Megatron's TransformerConfig that do not follow from the checkpoint."""
    settings = {
        "sequence_parallel": megatron.sequence_parallel,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        # Interleaved stages go on while they send: freed then, memory may be used again before it has left.
        "deallocate_pipeline_outputs": megatron.virtual_pipeline_model_parallel_size is None,
        # Losses are parts of one global sum already (R3): gradients are added over ranks, never averaged.
        "calculate_per_token_loss": True,
        # These need CUDA kernels that only Transformer Engine or apex bring.
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
    }
    if not recompute:
        return settings
    if megatron.recompute == "selective":
        return settings | {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return settings | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def make_bridge(model: ModelConfig, settings: ForwardSettings, megatron: MegatronConfig) -> HfBridge:
    dtype, trust = DTYPES[model.dtype], model.trust_remote_code
    return HfBridge(model.path, settings.head, megatron, dtype, trust_remote_code=trust)


class MegatronScorer:
    """A frozen model."""

    def __init__(self, model: ModelConfig, settings: ForwardSettings, megatron: MegatronConfig):
        self.layout = join_model_parallel(megatron)
        bridge = make_bridge(model, settings, megatron)
        self.models = bridge.build(transformer_settings(megatron, recompute=False), ddp=None)
        for part in self.models:
            part.requires_grad_(False).eval()
        self.pipeline = Pipeline(self.models, megatron, settings, bridge.vocab_size)

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        return self.pipeline.score(micro_batches)

    def tensors(self) -> Iterator[tuple[Component, Tensor]]:
        return megatron_tensors(self.models, None)


class MegatronEngine:
    """A model that is trained."""

    def __init__(self, model: ModelConfig, settings: ForwardSettings, trained: TrainedConfig, num_steps: int):
        megatron, dtype = trained.megatron, DTYPES[model.dtype]
        self.layout = join_model_parallel(megatron)
        self.bridge = make_bridge(model, settings, megatron)
        self.models = self.bridge.build(
            transformer_settings(megatron, recompute=model.enable_gradient_checkpointing),
            ddp={"use_distributed_optimizer": megatron.use_distributed_optimizer, "grad_reduce_in_fp32": True},
        )
        self.bridge.config.finalize_model_grads_func = _add_up_gradients
        self.optimizer = _make_optimizer(self.models, trained, dtype, settings.device)
        self.pipeline = Pipeline(self.models, megatron, settings, self.bridge.vocab_size)
        self.peak_lr, self.factor = trained.optim.lr, learning_rate_factor(trained.optim, num_steps)
        self.step = 0
        self.before_step = unobserved

    def score(self, micro_batches: Sequence[TokenBatch]) -> list[Tensor]:
        for part in self.models:
            part.eval()
        return self.pipeline.score(micro_batches)

    def tensors(self) -> Iterator[tuple[Component, Tensor]]:
        return megatron_tensors(self.models, self.optimizer)

    def train_step(self, micro_batches: Sequence[TokenBatch], totals: Totals, loss_fn: LossFn) -> Sums:
        for part in self.models:
            part.train()
            part.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = MetricSums()
        self.pipeline.train(micro_batches, totals, loss_fn, sums)
        self.before_step(micro_batches)
        lr = self.peak_lr * self.factor(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        stepped, norm, _ = self.optimizer.step()
        self.step += stepped
        own = sums.result() if self.layout.is_output_rank else {}
        return own | {"grad_norm": (float(norm), 1), "lr": (lr, 1)}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self.bridge.export(self.models)

    def save(self, directory: Path) -> None:
        megatron_checkpoint.save(directory, self.models, self.optimizer, self.step)

    def snapshot(self, directory: Path) -> Writing:
        return megatron_checkpoint.snapshot(directory, self.models, self.optimizer, self.step)

    def load(self, directory: Path) -> None:
        self.step = megatron_checkpoint.load(directory, self.models, self.optimizer)


def _add_up_gradients(models, num_tokens: Tensor | None = None, **groups) -> None:
    finalize_model_grads(models, None, **groups)  # with a number of tokens it would divide by it


def _move_to_host(config: OptimizerConfig, *, pinned: bool) -> None:
    """Master weights and moments in host memory, and the step there, parameter by parameter while others travel."""
    config.optimizer_cpu_offload, config.optimizer_offload_fraction = True, 1.0
    config.overlap_cpu_optimizer_d2h_h2d = True
    config.pin_cpu_grads = config.pin_cpu_params = pinned
    # Else master weights would stay on the GPU, too. Set here as Megatron would (0.16.1), whose own check asks for
    # Transformer Engine's version where it has none.
    config.use_precision_aware_optimizer = config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
    config.store_param_remainders = False


def _make_optimizer(models, trained: TrainedConfig, dtype: torch.dtype, device: torch.device) -> MegatronOptimizer:
    optim = trained.optim
    config = OptimizerConfig(
        optimizer="sgd" if optim.optimizer == "sgd" else "adam",
        lr=optim.lr,
        min_lr=0.0,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        sgd_momentum=optim.momentum,
        clip_grad=trained.grad_clip,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=trained.megatron.use_distributed_optimizer,
    )
    if trained.fsdp_config.optimizer_offload:
        _move_to_host(config, pinned=device.type == "cuda")
    with torch.no_grad():  # else shards of float32 weights are no leaves, which the offloaded optimizer refuses
        optimizer = get_megatron_optimizer(config, models, config_overrides={})  # {}: decay norms and biases too
    if optim.optimizer == "sgd":
        megatron_checkpoint.with_momentum(optimizer)
    else:
        megatron_checkpoint.with_adam(optimizer)
    optimizer.__class__ = _FiniteSteps
    return optimizer


class _FiniteSteps(ChainedOptimizer):
    """Megatron looks for gradients that are no finite numbers where it scales losses, for float16, alone."""

    def get_grad_norm(self) -> float:
        self.norm = super().get_grad_norm()
        return self.norm

    def step_with_ready_grads(self) -> bool:
        return math.isfinite(self.norm) and super().step_with_ready_grads()
