"""What we add inside SGLang's worker processes, through SGLang's own plugin hooks. Inert outside our servers.

1. ``Receiver`` sees every tensor that reaches the model, and refuses a version that is not whole.
2. Three load formats of ``update_weights_from_tensor``: a version begins, a flat bucket of bytes, a version ends.
3. Every request draws from its own seed, whatever else is in the batch (``seeded_draw.py``).
4. On CPU, attention of a decode step for many sequences at once (``batched_attention.py``).
5. A reward model's head has no bias but its checkpoint's.
6. Adapters on a CPU, which has no pinned memory.
7. A pause that gives up responses in flight returns as soon as they are gone; SGLang's own looks once a second.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

ACTIVE = "RLHF_MP_ENGINE"  # set in the environment of the servers we start
BUCKET_FORMAT = "rlhf_mp.bucket"
BEGIN_FORMAT = "rlhf_mp.begin"
COMMIT_FORMAT = "rlhf_mp.commit"
PAUSE_LOOK_S = 0.005


def install() -> None:
    """Entry point, called by SGLang in each of its processes."""
    if os.environ.get(ACTIVE) != "1":
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from rlhf_mp.rollout import batched_attention, seeded_draw
    from rlhf_mp.weights.receiver import Receiver

    receiver = Receiver()
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    around = HookType.AROUND
    HookRegistry.register(f"{runner}.load_model", record_loading(receiver), around)
    HookRegistry.register(f"{runner}.init_lora_manager", adapters_on_cpu, around)
    HookRegistry.register(f"{runner}.update_weights_from_tensor", own_formats(receiver), around)
    HookRegistry.register(
        "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_and_postprocess", watch(receiver), around
    )
    HookRegistry.register(
        "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        seeded_draw.seed_each_request,
        HookType.AFTER,
    )
    sampler = "sglang.srt.layers.sampler"
    HookRegistry.register(f"{sampler}.top_k_top_p_min_p_sampling_from_probs_torch", seeded_draw.draw_likeliest, around)
    HookRegistry.register(f"{sampler}.multinomial_with_seed", seeded_draw.draw_on_cpu, around)
    HookRegistry.register("sglang.srt.managers.tokenizer_manager.TokenizerManager.pause_generation", pause_soon, around)
    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}._run_sdpa_forward_decode", batched_attention.decode, around)


async def pause_soon(original: Callable, manager: Any, request: Any) -> None:
    """Around SGLang's pause, in the process that takes requests."""
    if request.mode != "abort":
        return await original(manager, request)
    async with manager.is_pause_cond:  # new requests wait behind it
        manager.is_pause = True
        while await manager.model_update_lock.is_locked():  # by the requests in flight
            manager.abort_request(abort_all=True)  # again and again: one may still be on its way to the scheduler
            await asyncio.sleep(PAUSE_LOOK_S)


def watch(receiver: Any) -> Callable:
    """Around the loader that reads checkpoints from disk: the first thing that touches a new model."""

    def load(original: Callable, model: Any, weights: Any, target_device: Any) -> None:
        if not hasattr(model, "rlhf_mp_watched"):
            clear_bias(model)
            plain = model.load_weights
            model.load_weights = lambda weights, *args, **kwargs: plain(receiver.arriving(weights), *args, **kwargs)
            model.rlhf_mp_watched = True
        original(model, weights, target_device)

    return load


def clear_bias(model: Any) -> None:
    """Of a reward model's head: SGLang gives Qwen's one that no checkpoint has, and leaves its random start in it."""
    bias = getattr(getattr(model, "score", None), "bias", None)
    if bias is not None:
        bias.data.zero_()


def adapters_on_cpu(original: Callable, runner: Any) -> None:
    """Around the start of SGLang's adapters, which ask for pinned memory: without an accelerator there is none."""
    if runner.device == "cpu":
        import torch

        def unpinned(make: Callable) -> Callable:
            return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)

        torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
        for name in ("tensor", "zeros", "empty"):
            setattr(torch, name, unpinned(getattr(torch, name)))
    original(runner)


def record_loading(receiver: Any) -> Callable:
    """Around the start-up load: what it read is the list of tensors that every later version must have."""
    from rlhf_mp.rollout.served_adapter import NAME, tensors_of

    def load_model(original: Callable, runner: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(runner, *args, **kwargs)
        receiver.adopt(bool(getattr(runner.model.config, "tie_word_embeddings", False)))
        for served in runner.server_args.lora_paths or []:
            if served.lora_name == NAME:
                receiver.own_names = tensors_of(Path(served.lora_path))
        return result

    return load_model


def own_formats(receiver: Any) -> Callable:
    def update(original: Callable, runner: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
        if load_format == BEGIN_FORMAT:
            receiver.begin()
            return True, "begun"
        if load_format == BUCKET_FORMAT:
            return load_bucket(receiver, runner.model, named_tensors)
        if load_format == COMMIT_FORMAT:
            return commit(receiver, runner, named_tensors)
        return original(runner, named_tensors, load_format)

    return update


def load_bucket(receiver: Any, model: Any, payload: dict[str, Any]) -> tuple[bool, str]:
    from rlhf_mp.weights.buckets import Slot, unpack

    if not payload["data"].is_cuda:
        receiver.mapped.append(payload["data"])
    slots = [Slot(name, dtype, tuple(shape), size) for name, dtype, shape, size in payload["slots"]]
    model.load_weights(unpack(slots, payload["data"]))
    return True, "loaded"


def commit(receiver: Any, runner: Any, payload: dict[str, Any]) -> tuple[bool, str]:
    """True when every tensor-parallel worker got the whole version; only worker 0's answer reaches the caller."""
    import torch.distributed as dist

    from rlhf_mp.weights.manifest import Manifest

    found = receiver.commit(Manifest.from_json(payload["manifest"]))
    per_worker: list[list[str]] = [[] for _ in range(runner.tp_size)]
    dist.all_gather_object(per_worker, found, group=runner.tp_group.cpu_group)
    problems = [f"worker {rank}: {p}" for rank, worker in enumerate(per_worker) for p in worker]
    if problems:
        shown = "; ".join(problems[:5])
        return False, f"{shown}; {len(problems) - 5} more" if len(problems) > 5 else shown
    if receiver.adapter:
        replace_adapter(runner, receiver.adapter)
    return True, f"verify_s={receiver.seconds:.6f}"


def replace_adapter(runner: Any, tensors: dict[str, Any]) -> None:
    """The served adapter is ``tensors`` from the next batch on.

    SGLang's own loading wants a new name for every version; requests would have to follow.
    """
    from sglang.srt.lora.mem_pool import EMPTY_SLOT

    from rlhf_mp.rollout.served_adapter import NAME

    manager = runner.lora_manager
    (adapter,) = (ref for ref in manager.lora_refs.values() if ref.lora_name == NAME)
    manager.load_lora_weights_from_tensors(adapter, tensors)
    pool = manager.memory_pool
    slot = pool.uid_to_buffer_id.pop(adapter.lora_id, None)
    if slot is not None:  # the next batch finds no copy of the old one, and makes one
        pool.eviction_policy.remove(adapter.lora_id)
        pool.buffer_id_to_uid[slot] = EMPTY_SLOT
