"""One rank of ``benchmarks.step``: the real job, with measurements where training would be."""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.bare_train import BARE
from rlhf_mp.cluster.launcher import rank_environment
from rlhf_mp.config.load import load_config
from rlhf_mp.phase import Phase
from rlhf_mp.rollout.sampler import response_seed
from rlhf_mp.rollout.sglang_client import EngineControl
from rlhf_mp.rollout.sglang_server import Address
from rlhf_mp.run import run

STEP_PARTS = ("step", *(phase.value for phase in Phase))


def main(out: str, steps: str, rounds: str, config_file: str, *overrides: str) -> int:
    config = load_config(Path(config_file), list(overrides))
    sizes = Path(out), int(steps), int(rounds)
    return run(config, rank_environment(), lambda job, trainer: measure(job, trainer, *sizes))


def measure(job: Any, trainer: Any, out: Path, steps: int, rounds: int) -> None:
    trainer.log.sinks = []
    phases = whole_steps(trainer, steps)
    ratios = {"rollout": rollout_ratio(job, trainer, rounds), "train": train_ratio(job, trainer, rounds)}
    if job.ranks.rank == 0:
        out.write_text(json.dumps({"steps_measured": steps - 1, "phases": phases, "ratios": ratios}))


def whole_steps(trainer: Any, steps: int) -> dict[str, dict[str, float | None]]:
    """Medians over all steps but the first."""
    trainer.publish()
    records = []
    for _ in range(steps):
        trainer.log.start()
        trainer.train_step()
        trainer.step += 1
        trainer.publish()
        records.append(trainer.log.finish(trainer.step))
    measured = records[1:]

    def typical(name: str) -> float | None:
        return median(r[name] for r in measured) if all(name in r for r in measured) else None

    return {
        part: {
            "seconds": typical(f"time/{part}_s"),
            "tokens_per_s": typical(f"throughput/{'' if part == 'step' else part + '_'}tokens_per_s"),
        }
        for part in STEP_PARTS
    }


def compare(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Medians of (ours, bare) seconds without the first round, and how much of the bare speed we keep."""
    ours, bare = (median(values) for values in zip(*pairs[1:], strict=True))
    return {"ours_s": ours, "bare_s": bare, "ratio": bare / ours}


def timed(job: Any, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds until all ranks are done."""
    job.ranks.barrier()
    start = time.perf_counter()
    result = work()
    job.ranks.barrier()
    return time.perf_counter() - start, result


def rollout_ratio(job: Any, trainer: Any, rounds: int) -> dict[str, float]:
    """The same prompts, seeds and limits both ways; cached prefixes are dropped before each."""
    pairs = []
    addresses = [engine.address for engine in trainer.swap.sync.fleet.live]
    limits = request_limits(job)
    for _ in range(rounds):
        step = trainer.step
        trainer.rollouts.publish(step)
        trainer.swap.sync.fleet.each(EngineControl.flush)
        ours, share = timed(job, lambda step=step: trainer.rollouts.fetch(step))
        prompts = {t.group_id: t.prompt_ids for part in job.ranks.gather(share) for t in part.trajectories}
        trainer.swap.sync.fleet.each(EngineControl.flush)
        requests = [request(job, step, group, ids, limits) for group, ids in prompts.items()]
        bare, _ = timed(job, lambda requests=requests: send_straight(addresses, requests))
        pairs.append((ours, bare))
        trainer.step += 1
    return compare(pairs)


def request_limits(job: Any) -> dict[str, Any]:
    rollout = job.config.actor_rollout_ref.rollout
    return {
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "top_k": rollout.top_k,
        "max_new_tokens": job.config.data.max_response_length,
        "stop_token_ids": job.services.facts().stop_token_ids,
    }


def request(job: Any, step: int, group: int, ids: list[int], limits: dict[str, Any]) -> dict[str, Any]:
    """What our client sends for a group."""
    num_responses, run_seed = job.config.actor_rollout_ref.rollout.n, job.config.trainer.seed
    seeds = [response_seed(run_seed, step, group, i) for i in range(num_responses)]
    return {
        "input_ids": [ids] * num_responses,
        "sampling_params": [limits | {"sampling_seed": seed} for seed in seeds],
        "return_logprob": True,
    }


def send_straight(addresses: Sequence[Address], requests: Sequence[dict[str, Any]]) -> None:
    """Post every request to a server in turn and wait for the last byte. Ranks without addresses do nothing."""

    async def post(session: aiohttp.ClientSession, address: Address, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {address.key}"}
        async with session.post(f"{address.url}/generate", json=body, headers=headers) as response:
            response.raise_for_status()
            await response.read()

    async def post_all() -> None:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            await asyncio.gather(*(post(session, a, body) for a, body in zip(cycle(addresses), requests, strict=False)))

    if addresses:
        asyncio.run(post_all())


def train_ratio(job: Any, trainer: Any, rounds: int) -> dict[str, float]:
    """The mini-batches of one step, again and again, by our engine and by a loop as short as its framework allows."""
    from rlhf_mp.data.collate import collate

    trainer.rollouts.publish(trainer.step)
    share = trainer.rollouts.fetch(trainer.step)
    batch = collate(share.trajectories)
    trainer.score(batch, share)
    trainer.algorithm.estimate(batch, trainer.sum_over_ranks)
    work = [([batch.select(rows) for rows in m.micro_batches], m.totals) for m in share.minibatches]
    bare_step = BARE[job.config.actor_rollout_ref.actor.strategy](job)

    def ours() -> None:
        for micro_batches, totals in work:
            trainer.actor.train_step(micro_batches, totals, trainer.algorithm.policy_loss)

    def bare() -> None:
        for micro_batches, totals in work:
            bare_step(micro_batches, totals.num_tokens)

    return compare([(timed(job, ours)[0], timed(job, bare)[0]) for _ in range(rounds)])


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    sys.exit(main(*sys.argv[1:]))
