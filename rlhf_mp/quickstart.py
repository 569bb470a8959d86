"""What the quickstart starts from: a small model that adds two numbers and is right at most half of the time.

  python -m rlhf_mp.quickstart [--out runs/quickstart]

Makes a tokenizer (one token per character), a Qwen3-shaped model, the 10,000 additions of two two-digit numbers as
jsonl (500 held out), pairs of a right and a wrong answer to each, and fine-tunes the model until it has begun to
understand. Answers are written with their digits reversed ("27+45=" -> "270"), so that a model this small can carry as
it goes.
"""

import argparse
import json
import random
import sys
import time
from pathlib import Path

import torch

from rlhf_mp.algorithms.supervised import fine_tuning_loss
from rlhf_mp.config.schema import ActorConfig, OptimConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import TokenBatch, Totals, Trajectory
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import PreTrainedTokenizerBase, load_causal_lm, load_tokenizer
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine

CHARACTERS = "0123456789+="
SHAPE = TinyShape(hidden=160)  # 1.2 M parameters
NUM_HELD_OUT = 500
START, CEILING = 0.30, 0.50  # held-out accuracy to hand over to reinforcement learning with
SUMS = range(199)
NEARBY = (-20, -10, -3, -2, -1, 1, 2, 3, 10, 20)
WRONG_ANSWERS = 4  # to each problem
BATCH, MAX_STEPS, CHECK_EVERY = 256, 2000, 10
LEARNING_RATE = 1e-3
VERSION = 2  # of what is made here; another one is made again


def written(total: int) -> str:
    return f"{total:03d}"[::-1]


def problems(seed: int) -> list[dict[str, str]]:
    """All additions, shuffled."""
    rows = [{"prompt": f"{a:02d}+{b:02d}=", "answer": written(a + b)} for a in range(100) for b in range(100)]
    random.Random(seed).shuffle(rows)
    return rows


def batch_of(rows: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase) -> TokenBatch:
    """Prompts with their answers and the end token; the mask selects the latter two."""
    examples = []
    for row in rows:
        answer = tokenizer.encode(row["answer"]) + [tokenizer.eos_token_id]
        n = len(answer)
        examples.append(Trajectory(tokenizer.encode(row["prompt"]), answer, [0.0] * n, [True] * n, 0.0, 0, 0, "stop"))
    return collate(examples)


def preferences(rows: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Every problem with its right answer and wrong ones: a sum nearby, any other, a digit off, missing, extra.

    Sums nearby are what a policy gets wrong that has begun to understand, and another sum has every digit where it
    puts one: a reward model that has not seen them says anything of them, and a policy finds that out.
    """
    draw = random.Random(seed)

    def wrong(answer: str) -> str:
        place, digit, total = draw.randrange(3), draw.choice("0123456789"), int(answer[::-1])
        nearby = written(draw.choice([total + by for by in NEARBY if total + by in SUMS]))
        another = written(draw.choice([other for other in SUMS if other != total]))
        changed = answer[:place] + draw.choice([d for d in "0123456789" if d != answer[place]]) + answer[place + 1 :]
        odd = draw.choice([answer[:place] + answer[place + 1 :], answer[:place] + digit + answer[place:]])
        return draw.choice([nearby, nearby, another, changed, odd])

    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": wrong(row["answer"])}
        for row in rows
        for _ in range(WRONG_ANSWERS)
    ]


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@torch.no_grad()
def accuracy(engine: TorchEngine, held_out: TokenBatch) -> float:
    """Share of held-out problems whose whole answer is the most likely one, greedily.

    One pass suffices: a greedy answer is right exactly if every right token is the most likely after the right ones
    before it.
    """
    logits = engine.module(input_ids=held_out.tokens).logits
    right = logits[:, :-1].argmax(-1) == held_out.tokens[:, 1:]
    return (right | (held_out.mask[:, 1:] == 0)).all(1).float().mean().item()


def warm_start(out: Path, seed: int, check_every: int = CHECK_EVERY) -> float:
    """Fine-tune ``out/model`` in place. Returns its held-out accuracy.

    How fast that rises depends on the machine's rounding: where it passes by between two looks, the same steps are made
    again with a look after each.
    """
    tokenizer = load_tokenizer(str(out / "model"))
    rows = problems(seed)
    held_out, train = batch_of(rows[:NUM_HELD_OUT], tokenizer), batch_of(rows[NUM_HELD_OUT:], tokenizer)
    actor = ActorConfig(optim=OptimConfig(lr=LEARNING_RATE, weight_decay=0.0))
    settings = ForwardSettings(torch.device("cpu"), PolicyHead())
    engine = TorchEngine(load_causal_lm(str(out / "model"), torch.float32), settings, actor, MAX_STEPS)
    generator = random.Random(seed)
    for step in range(1, MAX_STEPS + 1):
        micro_batch = train.select(generator.sample(range(len(train.tokens)), BATCH))
        engine.train_step([micro_batch], Totals(int(micro_batch.mask.sum()), BATCH), fine_tuning_loss("token-mean"))
        if step % check_every == 0 and (reached := accuracy(engine, held_out)) >= START:
            if reached > CEILING and check_every > 1:
                return warm_start(out, seed, check_every=1)
            if reached > CEILING:
                raise RuntimeError(f"warm start jumped to {reached:.3f} at step {step}; choose another --seed")
            engine.module.save_pretrained(out / "model")
            return reached
    raise RuntimeError(f"warm start did not reach {START} in {MAX_STEPS} steps; choose another --seed")


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/quickstart"))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    done = args.out / "prepared.json"
    wanted = {"seed": args.seed, "version": VERSION}
    if done.exists() and json.loads(done.read_text()) == wanted:
        print(f"{args.out}: already prepared")
        return
    start = time.monotonic()
    torch.set_num_threads(min(2, torch.get_num_threads()))  # more only wait for each other in a model this small
    make_checkpoint(args.out / "model", character_tokenizer(CHARACTERS), SHAPE, seed=args.seed)
    rows = problems(args.seed)
    for name, part in {"val": rows[:NUM_HELD_OUT], "train": rows[NUM_HELD_OUT:]}.items():
        write_rows(args.out / f"{name}.jsonl", part)
        write_rows(args.out / f"{name}_pairs.jsonl", preferences(part, args.seed))
    reached = warm_start(args.out, args.seed)
    done.write_text(json.dumps(wanted))
    print(f"{args.out}: warm start right on {reached:.1%} of held-out problems, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
