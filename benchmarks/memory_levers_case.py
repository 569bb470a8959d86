"""One row of ``benchmarks.memory_levers``: a config's actor takes a few steps, and what that took is written down."""

import json
import random
import sys
import time
from contextlib import contextmanager
from math import log
from pathlib import Path
from types import SimpleNamespace

import torch

from rlhf_mp.algorithms.losses import make_policy_loss
from rlhf_mp.algorithms.registered import advantage_estimators
from rlhf_mp.cluster.scheduler import cuts
from rlhf_mp.config.algorithm import AlgorithmConfig
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.partition import cut_rows
from rlhf_mp.data.types import TokenBatch, Totals, Trajectory
from rlhf_mp.observe.live_bytes import LiveBytes
from rlhf_mp.observe.memory import get_memory_usage, host_peak, reset_peak
from rlhf_mp.train.build import make_actor
from rlhf_mp.trainer.loop import padding

SEQUENCES, GROUP, PROMPT, LONGEST, VOCABULARY = 8, 4, 16, 240, 16384
FIXED = {
    "data.train_files": "none.jsonl",
    "data.max_prompt_length": PROMPT,
    "data.max_response_length": LONGEST,
    "actor_rollout_ref.actor.strategy": "torch",
    "actor_rollout_ref.actor.optim.lr": 1e-3,
    "actor_rollout_ref.model.dtype": "float32",
    "trainer.n_gpus_per_node": 1,
}


def make_batch(device: torch.device) -> TokenBatch:
    """Responses of 1 to LONGEST tokens, most of them short, rewarded at random."""
    rng, made = random.Random(0), []
    for row in range(SEQUENCES):
        length = min(LONGEST, 1 + int(rng.expovariate(1 / 80)))
        ids = [rng.randrange(2, VOCABULARY) for _ in range(PROMPT + length)]
        reward = float(rng.random() < 0.5)
        logprobs, own = [-log(VOCABULARY)] * length, [True] * length
        made.append(Trajectory(ids[:PROMPT], ids[PROMPT:], logprobs, own, reward, row // GROUP, 0, "stop"))
    batch = collate(made)
    batch.advantages = advantage_estimators["grpo"](batch, AlgorithmConfig()).advantages
    batch.old_logprobs = batch.rollout_logprobs
    return batch.to(device)


@contextmanager
def measured(engine, device: torch.device):
    """Bytes at most of what comes and goes: by the allocator on a GPU, by counting tensors on a CPU."""
    found = SimpleNamespace(peak_bytes=0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield found
        found.peak_bytes = torch.cuda.max_memory_allocated() - before
        return
    with LiveBytes([*engine.module.parameters(), *engine.module.buffers()]) as live:
        yield found
    found.peak_bytes = live.peak


def main(case_text: str, out: str) -> None:
    case = json.loads(case_text)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    words = [f"{key}={value}" for key, value in FIXED.items()]
    config: RunConfig = config_from_dict(
        {}, [*words, f"actor_rollout_ref.model.path={case['model']}", *case["overrides"]]
    )
    engine = make_actor(config, device, num_updates=100)
    batch = make_batch(device)
    rows = cut_rows([[row] for row in range(SEQUENCES)], batch.lengths.tolist(), cuts(config)[0])
    micro_batches = [batch.select(row) for row in rows]
    totals = Totals(int(batch.mask.sum()), SEQUENCES)
    loss_fn, losses, seconds = make_policy_loss(config.actor_rollout_ref.actor), [], []

    def step() -> None:
        began = time.perf_counter()
        losses.append(engine.train_step(micro_batches, totals, loss_fn)["loss"][0])
        seconds.append(time.perf_counter() - began)

    step()  # the optimizer makes its moments
    with measured(engine, device) as found:
        step()
    reset_peak()
    before, seconds[:] = get_memory_usage("cpu")["allocated"] * 2**30, []
    for _ in range(case["steps"]):
        step()
    wasted, computed = padding(micro_batches, packed=config.actor_rollout_ref.model.use_remove_padding)[
        "train/padding_fraction"
    ]
    result = {
        "peak_bytes": found.peak_bytes,
        "rss_bytes": max(0.0, host_peak() - before),
        "seconds": sorted(seconds)[len(seconds) // 2],
        "losses": losses,
        "micro_batches": len(micro_batches),
        "padding": wasted / computed,
    }
    Path(out).write_text(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
