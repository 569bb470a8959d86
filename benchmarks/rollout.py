"""How fast one SGLang server samples, by how many sequences run at once.

python -m benchmarks.rollout --json benchmarks/results/rollout.json
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.record import add_results_option, provenance, write_results
from benchmarks.report import Table
from rlhf_mp.config.schema import RolloutConfig
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint
from rlhf_mp.rollout.base import SamplingParams
from rlhf_mp.rollout.sglang_client import SGLangClient
from rlhf_mp.rollout.sglang_server import ServerPlan, SGLangServer

SHAPE = TinyShape(hidden=256, layers=6, heads=4, kv_heads=2, head_dim=64)
GROUP, PROMPT_TOKENS = 8, 32  # responses a prompt: they share their prefix


async def sample(server: SGLangServer, sequences: int, tokens: int, round_: int) -> float:
    """Seconds until ``sequences`` responses of exactly ``tokens`` tokens are there, prompts never seen before."""
    client = SGLangClient("engine", server.address, timeout_s=600)
    params = SamplingParams(1.0, 1.0, -1, tokens, ())
    prompts = [[2 + (round_ * 7 + i * 3 + j) % 11 for j in range(PROMPT_TOKENS)] for i in range(-(-sequences // GROUP))]
    try:
        start = time.perf_counter()
        seeds = range(min(GROUP, sequences))
        groups = await asyncio.gather(*(client.generate(ids, params, list(seeds)) for ids in prompts))
        seconds = time.perf_counter() - start
    finally:
        await client.close()
    assert all(len(completion.ids) == tokens for group in groups for completion in group)
    return seconds


def measure(at_once: list[int], tokens: int, rounds: int, tensor_parallel: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        make_checkpoint(model, character_tokenizer("0123456789+= "), SHAPE)
        never_end(model)
        context = PROMPT_TOKENS + tokens
        rollout = RolloutConfig(
            dtype="float32",
            max_model_len=context + 8,
            max_num_seqs=max(at_once),
            tensor_model_parallel_size=tensor_parallel,
        )
        plan = ServerPlan(index=0, model_path=str(model), on_cpu=True, gpus=(), seed=1)
        server = SGLangServer(plan, rollout, context=context, log_file=Path(folder) / "engine.log")
        try:
            server.wait_ready(300)
            asyncio.run(sample(server, 1, tokens, 0))  # warms up
            return [record(server, number, tokens, rounds) for number in at_once]
        finally:
            server.stop()


def never_end(model: Path) -> None:
    """Weights at random would say <eos> every dozen tokens, and every response has to have all of its own."""
    for file in (model / "config.json", model / "generation_config.json"):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": None}))


def record(server: SGLangServer, sequences: int, tokens: int, rounds: int) -> dict[str, Any]:
    seconds = median(asyncio.run(sample(server, sequences, tokens, n + 1)) for n in range(rounds))
    return {
        "sequences": sequences,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": sequences * tokens / seconds,
        "ms_per_token": 1000 * seconds / tokens,
    }


def table(records: list[dict[str, Any]]) -> Table:
    rows = [list(record.values()) for record in records]
    columns = ["sequences", "tokens each", "s", "tokens/s", "ms a token of all"]
    note = f"One SGLang server on CPU cores, float32, {SHAPE.layers} layers of width {SHAPE.hidden}; medians."
    return Table("Rollout by sequences at once", columns, rows, note, label="sequences", chart="tokens/s")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--tokens", type=int, default=64, help="a response")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    add_results_option(parser)
    args = parser.parse_args(argv)
    measured_on = provenance()
    records = measure(args.at_once, args.tokens, args.rounds, args.tensor_parallel)
    print(table(records).terminal())
    write_results(args.json, {"provenance": measured_on, "cells": records})


if __name__ == "__main__":
    main(sys.argv[1:])
