"""What the examples of several turns start from: a small model that knows the moves, but hardly how to use them.

  python -m rlhf_mp.episode_quickstart guess        # then: deepspeed --num_gpus 2 launch/train.py --config ...
  python -m rlhf_mp.episode_quickstart calculator   # configs/guess.yaml, configs/calculator.yaml

guess        find a hidden number from 00 to 15 in four guesses, each answered "<" or ">". The model guesses at random.
calculator   "27*45=" may be answered right away or after asking a calculator, "?27*45". The model asks half of the
             time, and can't multiply.

Makes a tokenizer (one token per character), a Qwen3-shaped model and the prompts, and fine-tunes the model on episodes
that a scripted player played in the real environment, on the player's tokens alone.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from rlhf_mp.algorithms.supervised import fine_tuning_loss
from rlhf_mp.config.multi_turn import MultiTurnConfig
from rlhf_mp.config.schema import ActorConfig, OptimConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.data.types import TokenBatch, Totals, Trajectory
from rlhf_mp.environments.registered import environment_maker
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import PreTrainedTokenizerBase, load_causal_lm, load_tokenizer
from rlhf_mp.models.tiny import character_tokenizer, make_checkpoint
from rlhf_mp.rollout.base import Completion, SamplingParams
from rlhf_mp.rollout.episodes import Episode, Episodes
from rlhf_mp.rollout.turns import TurnEncoder
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine

CHARACTERS = "0123456789<>?*=;!"
NUMBERS, FACTORS = range(16), range(10, 100)
NUM_TRAIN, NUM_HELD_OUT, NUM_DEMONSTRATIONS = 512, 64, 4096
BATCH, LEARNING_RATE, MAX_TURNS, MAX_TOKENS = 64, 1e-3, 4, 32

Player = Callable[[str, random.Random], str]
"""What was written so far, ends of turns included as "|", to the next turn."""


@dataclass(frozen=True)
class Example:
    """One of the two."""

    row: Callable[[random.Random], dict[str, str]]
    player: Player
    num_steps: int  # of fine-tuning


def hidden_number(generator: random.Random) -> dict[str, str]:
    return {"prompt": "?", "answer": f"{generator.choice(NUMBERS):02d}"}


def guess_anything(so_far: str, generator: random.Random) -> str:
    return f"{generator.choice(NUMBERS):02d}"


def product(generator: random.Random) -> dict[str, str]:
    a, b = generator.choice(FACTORS), generator.choice(FACTORS)
    return {"prompt": f"{a}*{b}=", "answer": str(a * b)}


def ask_or_guess(so_far: str, generator: random.Random) -> str:
    """Asks half of the time, and then repeats what it is told; otherwise any number of the right size."""
    question, _, told = so_far.partition("|")
    if told:
        return told.strip("=;")
    return "?" + question.strip("=") if generator.random() < 0.5 else str(generator.randrange(100, 10_000))


EXAMPLES = {"guess": Example(hidden_number, guess_anything, 150), "calculator": Example(product, ask_or_guess, 900)}


def demonstrations(name: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> TokenBatch:
    """Episodes of the scripted player; the mask selects what it said."""
    example, generator = EXAMPLES[name], random.Random(f"{seed}/demonstrations")
    stop = tokenizer.eos_token_id
    encoder = TurnEncoder(tokenizer, chat=False, stop_token_ids=[stop], max_tokens=8)
    knobs = MultiTurnConfig(enable=True, environment=name, max_assistant_turns=MAX_TURNS)
    episodes = Episodes(
        environment_maker(name, {}), knobs, encoder, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    )

    async def generate(ids: list[int], params: SamplingParams, seeds: object) -> list[Completion]:
        so_far = tokenizer.decode(ids).replace(tokenizer.eos_token, "|")
        said = tokenizer.encode(example.player(so_far, generator)) + [stop]
        return [Completion(said, [0.0] * len(said), "stop", 0)]

    async def play() -> list[Trajectory]:
        params = SamplingParams(1.0, 1.0, -1, MAX_TOKENS, (stop,))
        played = []
        for _ in range(NUM_DEMONSTRATIONS):
            row = example.row(generator)
            prompt = Prompt(0, tokenizer.encode(row["prompt"]), row["prompt"], row["answer"])
            played.append(trajectory(prompt, await episodes.play(prompt, params, None, generate)))
        return played

    return collate(asyncio.run(play()))


def trajectory(prompt: Prompt, episode: Episode) -> Trajectory:
    return Trajectory(prompt.ids, episode.ids, episode.logprobs, episode.mask, episode.paid, 0, 0, "stop")


def warm_start(name: str, model: Path, seed: int) -> float:
    """Fine-tune in place. Returns the last loss, in nats per token."""
    batch = demonstrations(name, load_tokenizer(str(model)), seed)
    actor = ActorConfig(optim=OptimConfig(lr=LEARNING_RATE, weight_decay=0.0))
    settings = ForwardSettings(torch.device("cpu"), PolicyHead())
    num_steps = EXAMPLES[name].num_steps
    engine = TorchEngine(load_causal_lm(str(model), torch.float32), settings, actor, num_steps)
    generator = random.Random(seed)
    for _ in range(num_steps):
        micro_batch = batch.select(generator.sample(range(len(batch.tokens)), BATCH))
        metrics = engine.train_step(
            [micro_batch], Totals(int(micro_batch.mask.sum()), BATCH), fine_tuning_loss("token-mean")
        )
    engine.module.save_pretrained(model)
    return metrics["loss"][0]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=sorted(EXAMPLES))
    parser.add_argument("--out", type=Path, help="default: runs/<example>")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    out: Path = args.out or Path("runs") / args.example
    done, wanted = out / "prepared.json", {"example": args.example, "seed": args.seed}
    if done.exists() and json.loads(done.read_text()) == wanted:
        print(f"{out}: already prepared")
        return
    start = time.monotonic()
    torch.set_num_threads(min(2, torch.get_num_threads()))  # more only wait for each other in a model this small
    make_checkpoint(out / "model", character_tokenizer(CHARACTERS), seed=args.seed)
    for part, number in {"train": NUM_TRAIN, "val": NUM_HELD_OUT}.items():
        generator = random.Random(f"{args.seed}/{part}")
        rows = [EXAMPLES[args.example].row(generator) for _ in range(number)]
        (out / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loss = warm_start(args.example, out / "model", args.seed)
    done.write_text(json.dumps(wanted))
    print(f"{out}: imitates the player with {loss:.3f} nats per token, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
