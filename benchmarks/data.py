"""What it takes to start on many prompts: seconds and memory, from nothing and from the table of an earlier start.

  python -m benchmarks.data                                        # 100,000 and 1,000,000 rows
  python -m benchmarks.data --rows 20000 --json benchmarks/results/data.json

table   our loading: rows are tokenised a few thousand at a time into a memory-mapped table
again   the next start, which finds that table
list    everything in lists of Python objects, as a loader without tables does it; only up to --list-up-to rows

Each runs in a process of its own. ``batch_s`` is a step's batch of 1024 shuffled prompts, the first one of an epoch.
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import add_results_option, provenance, write_results
from rlhf_mp.config.schema import DataConfig

BATCH = 1024
NAMES = ("Ada", "Ben", "Chen", "Dina", "Eli", "Fatou", "Goran", "Hana")
THINGS = ("apples", "tickets", "marbles", "books", "stamps", "pencils")


def question(rng: random.Random) -> dict[str, str]:
    """A word problem of 20 to 50 tokens."""
    who, thing, have = rng.choice(NAMES), rng.choice(THINGS), rng.randint(10, 999)
    lines = [f"{who} has {have} {thing} in a box under the old wooden table."]
    for _ in range(rng.randint(0, 2)):
        change, other = rng.randint(1, 99), rng.choice(NAMES)
        have += change
        lines.append(f"Then {other} comes along and gives {who} {change} more {thing} to keep for the winter.")
    return {"prompt": " ".join([*lines, f"How many {thing} does {who} have now?"]), "answer": f"#### {have}"}


def write_rows(path: Path, count: int) -> None:
    rng = random.Random(1)
    with path.open("w") as out:
        out.writelines(json.dumps(question(rng)) + "\n" for _ in range(count))


def table_side(file: str, tokenizer: Any, data: DataConfig) -> Callable[[], Any]:
    from rlhf_mp.data.order import make_order
    from rlhf_mp.data.prompts import load_prompts

    prompts = load_prompts([file], tokenizer, data)
    order = make_order(prompts.facts.sizes, prompts.curriculum, data)
    return lambda: [prompts[i] for i in order.next()[1]]


def list_side(file: str, tokenizer: Any, data: DataConfig) -> Callable[[], Any]:
    from rlhf_mp.data.order import make_order
    from rlhf_mp.data.prompts import Prompt, encode, render
    from rlhf_mp.data.rows import read_rows

    rows = [row for _, row in read_rows(file)]
    texts = [render(row["prompt"], tokenizer, data) for row in rows]
    ids = encode(texts, tokenizer, data)
    prompts = [Prompt(i, ids[i], texts[i], row["answer"]) for i, row in enumerate(rows)]
    order = make_order([len(prompts)], None, data)
    return lambda: [prompts[i] for i in order.next()[1]]


SIDES = {"table": table_side, "again": table_side, "list": list_side}


def measure(side: str, file: str, model: str, cache: str) -> dict[str, float]:
    """In a process of its own, because memory never goes back."""
    from rlhf_mp.models.hf import load_tokenizer

    tokenizer = load_tokenizer(model)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    next_batch = SIDES[side](file, tokenizer, DataConfig(train_batch_size=BATCH, cache_dir=cache))
    start_s = time.perf_counter() - began
    began = time.perf_counter()
    next_batch()
    batch_s = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"start_s": start_s, "batch_s": batch_s, "rss_before_mib": before / 1024, "rss_peak_mib": peak / 1024}


def results(sizes: Sequence[int], list_up_to: int, scratch: Path) -> Iterator[dict[str, Any]]:
    from rlhf_mp.models.tiny import byte_pair_tokenizer

    rng = random.Random(0)
    model = scratch / "tokenizer"
    byte_pair_tokenizer((question(rng)["prompt"] for _ in range(2000)), 2048).save_pretrained(model)
    for size in sizes:
        file = scratch / f"{size}.jsonl"
        write_rows(file, size)
        for side in SIDES if size <= list_up_to else ("table", "again"):
            words = ["--side", side, str(file), str(model), str(scratch / f"cache_{size}")]
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.data", *words], stdout=subprocess.PIPE, text=True, check=True
            )
            found = json.loads(done.stdout.splitlines()[-1])
            yield {"side": side, "rows": size, "file_mb": file.stat().st_size / 1e6, **found}


def line(found: dict[str, Any]) -> str:
    own = found["rss_peak_mib"] - found["rss_before_mib"]
    return (
        f"{found['side']:6} {found['rows']:9,d} rows {found['file_mb']:6.0f} MB   start {found['start_s']:7.2f} s   "
        f"memory {own:6.0f} MiB   batch {found['batch_s'] * 1e3:6.0f} ms"
    )


def main(argv: Sequence[str]) -> None:
    if argv[:1] == ["--side"]:
        print(json.dumps(measure(*argv[1:])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="100000,1000000", help="sizes (%(default)s)")
    parser.add_argument("--list-up-to", type=int, default=100_000, metavar="N", help="gigabytes beyond (%(default)s)")
    add_results_option(parser)
    args = parser.parse_args(argv)
    measured_on, found = provenance(), []
    with tempfile.TemporaryDirectory() as scratch:
        for result in results([int(size) for size in args.rows.split(",")], args.list_up_to, Path(scratch)):
            found.append(result)
            print(line(result), flush=True)
    write_results(args.json, {"provenance": measured_on, "results": found})


if __name__ == "__main__":
    main(sys.argv[1:])
