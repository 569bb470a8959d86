"""A trainer of the tiny model beside a real SGLang server: how far apart their log-probs are."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from rlhf_mp.config.schema import ActorConfig, ModelConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Trajectory
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.models.lora import add_adapter
from rlhf_mp.rollout.base import SamplingParams
from rlhf_mp.rollout.sglang_client import EngineControl, SGLangClient
from rlhf_mp.rollout.sglang_server import SGLangServer
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.weights.base import Transport, WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.disk import DiskTransport
from rlhf_mp.weights.distributed import DistributedTransport
from rlhf_mp.weights.fleet import FixedRoster
from rlhf_mp.weights.tensor import TensorTransport

CPU = torch.device("cpu")
PROMPT = [4, 9, 12, 6, 7, 13]
STOP = 1


def trainer(
    path: Path, temperature: float = 1.0, model: ModelConfig | None = None, device: torch.device = CPU
) -> TorchEngine:
    """
    Args:
        model: with an adapter; None: the checkpoint as it is.
    """
    head = PolicyHead(temperature)
    module = load_causal_lm(str(path), torch.float32, quantization=model.quantization if model else None)
    if model is not None:
        add_adapter(module, module.model.layers, model, head, torch.float32)
    return TorchEngine(module.to(device), ForwardSettings(device, head), ActorConfig(), num_steps=1)


def move(engine: TorchEngine, seed: int, scale: float = 0.1) -> TorchEngine:
    """Change whatever it trains, clearly."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            spread = parameter.detach().abs().mean().item() or 1.0  # an adapter begins as nothing
            parameter.data.add_(scale * spread * torch.randn(parameter.shape, generator=generator).to(parameter))
    return engine


@contextmanager
def running(server: SGLangServer, workers: int = 1) -> Iterator[SGLangServer]:
    """Once it answers, until the end of the block."""
    server.workers = workers
    try:
        server.wait_ready(300)
        yield server
    finally:
        server.stop()


def sample(server, num: int, temperature: float = 1.0, seeds=None, max_new_tokens: int = 24):
    async def run():
        client = SGLangClient("engine", server.address, timeout_s=60)
        try:
            params = SamplingParams(temperature, 1.0, -1, max_new_tokens, (STOP,))
            return await client.generate(PROMPT, params, seeds or list(range(num)))
        finally:
            await client.close()

    return asyncio.run(run())


def largest_difference(server, engine: TorchEngine, temperature: float = 1.0) -> float:
    """Between the log-probs of eight sampled responses as the server reports them and as the trainer computes them."""
    responses = sample(server, 8, temperature)
    trajectories = [
        Trajectory(PROMPT, c.ids, c.logprobs, [True] * len(c.ids), 0.0, 0, c.version, c.finish_reason)
        for c in responses
    ]
    batch = collate(trajectories)
    return (engine.score([batch])[0] - batch.rollout_logprobs).abs().max().item()


def sync_by_each_transport(server, control: EngineControl, folder: Path, bucket_bytes: int) -> dict[str, WeightSync]:
    """One WeightSync per transport, all connected to the same server."""
    transports: dict[str, Transport] = {
        "tensor": TensorTransport(server.workers, gather=lambda own: [own], on_cpu=True),
        "distributed": DistributedTransport(server.workers, "127.0.0.1", on_cpu=True),
        "disk": DiskTransport(folder / "weights", is_sender=True),
    }
    return {
        name: WeightSync(
            transport,
            FixedRoster([control]),
            Packer(bucket_bytes, CPU, shared=transport.shared_buffers),
            dtype=torch.float32,
            is_sender=True,
            workers_per_engine=server.workers,
            base_stays=bool(server.address.adapter),
        )
        for name, transport in transports.items()
    }
