"""What thousands of episodes at once cost beside the bare server.

  python -m benchmarks.episodes
  python -m benchmarks.episodes --episodes 2000 --turns 3 --json benchmarks/results/episodes.json

Starts one SGLang server with a small model on CPU. Each round plays all episodes at once through the sampler
(environment, observations, token bookkeeping, rewards), then sends the same requests straight to the same server, each
episode's turns one after the other as the episode did. Sampling is seeded and the prefix cache emptied before either
side, so both make the server do the same work. Goal: at least 0.9 of the bare server's tokens/s.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.record import add_results_option, provenance, write_results
from rlhf_mp.config.multi_turn import MultiTurnConfig
from rlhf_mp.config.reward import EnvironmentTerm
from rlhf_mp.config.schema import RolloutConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.environments.base import Turn
from rlhf_mp.models.hf import load_tokenizer
from rlhf_mp.models.tiny import character_tokenizer, make_checkpoint
from rlhf_mp.rewards.base import Setting
from rlhf_mp.rewards.rules import EnvironmentReward
from rlhf_mp.rewards.weighted import WeightedReward
from rlhf_mp.rollout.base import Completion, FixedEngines, SamplingParams
from rlhf_mp.rollout.episodes import Episodes
from rlhf_mp.rollout.sampler import Sampler
from rlhf_mp.rollout.sglang_client import EngineControl, SGLangClient
from rlhf_mp.rollout.sglang_server import Address, ServerPlan, SGLangServer
from rlhf_mp.rollout.turns import TurnEncoder

GOAL = 0.9
GROUP = 8
CONTEXT = 256
STOP = 1  # <eos>; a model with random weights says it now and then, which ends a turn early on both sides


class Answering:
    """Says the same after every turn."""

    async def reset(self, prompt: Prompt) -> str:
        return ""

    async def step(self, response: str) -> Turn:
        return Turn("=12;", reward=0.1)


@dataclass
class Recorder:
    """An engine that remembers every request of every episode, by its seed."""

    client: SGLangClient
    requests: dict[int, list[dict[str, Any]]]
    num_tokens: int = 0

    async def generate(self, ids: list[int], params: SamplingParams, seeds: Sequence[int | None]) -> list[Completion]:
        found = await self.client.generate(ids, params, seeds)
        self.num_tokens += sum(len(completion.ids) for completion in found)
        sampling = {
            "temperature": params.temperature, "top_p": params.top_p, "top_k": params.top_k,
            "max_new_tokens": params.max_new_tokens, "stop_token_ids": list(params.stop_token_ids),
            "sampling_seed": seeds[0],
        }  # fmt: skip
        body = {"input_ids": [ids], "sampling_params": [sampling], "return_logprob": True}
        self.requests.setdefault(seeds[0], []).append(body)
        return found


async def ours(address: Address, tokenizer: Any, args: argparse.Namespace) -> tuple[float, Recorder]:
    """Seconds, and what was asked of the server."""
    knobs = MultiTurnConfig(
        enable=True, max_assistant_turns=args.turns, max_tokens_per_turn=args.turn_tokens, episode_timeout_s=3600
    )
    encoder = TurnEncoder(tokenizer, chat=False, stop_token_ids=[STOP], max_tokens=8)
    episodes = Episodes(Answering, knobs, encoder, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    term = EnvironmentTerm("environment", "environment")
    sampler = Sampler(tokenizer, WeightedReward([(term, EnvironmentReward(term, Setting()))]), episodes)
    client = SGLangClient("engine", address, timeout_s=3600)
    recorder = Recorder(client, {})
    sampler.connect(FixedEngines([recorder]))
    prompts = [Prompt(i, tokenizer.encode(f"{i:04d}+1="), f"{i:04d}+1=", "") for i in range(args.episodes // GROUP)]
    seeds = [[i * GROUP + j for j in range(GROUP)] for i in range(len(prompts))]
    params = SamplingParams(1.0, 1.0, -1, args.turns * (args.turn_tokens + 8), (STOP,))
    started = time.perf_counter()
    try:
        await sampler.groups(prompts, params, seeds)
    finally:
        await client.close()
    return time.perf_counter() - started, recorder


async def bare(address: Address, requests: dict[int, list[dict[str, Any]]]) -> tuple[float, int]:
    """Seconds and tokens of the same requests without any of our code."""
    headers = {"Authorization": f"Bearer {address.key}"}
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(address.url, headers=headers, connector=connector, timeout=timeout) as session:

        async def episode(turns: list[dict[str, Any]]) -> int:
            tokens = 0
            for body in turns:
                async with session.post("/generate", json=body) as response:
                    response.raise_for_status()
                    tokens += len((await response.json())[0]["output_ids"])
            return tokens

        started = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(episode, requests.values())))
        return time.perf_counter() - started, tokens


def measured(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "model"
        make_checkpoint(model, character_tokenizer("0123456789+=; "), std=0.02)
        rollout = RolloutConfig(dtype="float32", max_model_len=CONTEXT, max_num_seqs=args.running)
        plan = ServerPlan(index=0, model_path=str(model), on_cpu=True, gpus=(), seed=1)
        server = SGLangServer(plan, rollout, CONTEXT, Path(scratch) / "engine.log")
        try:
            server.wait_ready(300)
            return alternated(server.address, load_tokenizer(str(model)), args)
        finally:
            server.stop()


def alternated(address: Address, tokenizer: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of both sides, after a small one that warms up."""
    control = EngineControl("engine", address, timeout_s=60)
    small = argparse.Namespace(**(vars(args) | {"episodes": min(args.episodes, 64)}))
    asyncio.run(ours(address, tokenizer, small))
    rounds = []
    for _ in range(args.rounds):
        control.flush()
        our_s, recorder = asyncio.run(ours(address, tokenizer, args))
        control.flush()
        bare_s, bare_tokens = asyncio.run(bare(address, recorder.requests))
        rounds.append(
            {
                "ours_tokens_per_s": recorder.num_tokens / our_s,
                "bare_tokens_per_s": bare_tokens / bare_s,
                "requests": sum(map(len, recorder.requests.values())),
                "tokens": recorder.num_tokens,
                "bare_tokens": bare_tokens,
                "ratio": (recorder.num_tokens / our_s) / (bare_tokens / bare_s),
            }
        )
        print(json.dumps(rounds[-1]), flush=True)
    return {"rounds": rounds, "ratio": median(r["ratio"] for r in rounds), "goal": GOAL}


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000, help="at once (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of the policy per episode (%(default)s)")
    parser.add_argument("--turn-tokens", type=int, default=8, help="sampled per turn (%(default)s)")
    parser.add_argument("--running", type=int, default=256, help="sequences the server runs at once (%(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="alternations (%(default)s)")
    add_results_option(parser)
    args = parser.parse_args(argv)
    measured_on = provenance()
    settings = {name: value for name, value in vars(args).items() if name != "json"}
    results = {"provenance": measured_on, "settings": settings, **measured(args)}
    print(f"{args.episodes} episodes at once: {results['ratio']:.3f} of the bare server's tokens/s (goal {GOAL})")
    write_results(args.json, results)


if __name__ == "__main__":
    main(sys.argv[1:])
