"""The four headline rows on a Slurm cluster: one job a row, all at once, and their summaries in the throughput table.

  python -m benchmarks.slurm.headline --out benchmarks/results/throughput.json
  python -m benchmarks.slurm.headline --sizes 3B 8B --steps 10 --dry-run

Models and data must be where the configs name them (README.md, "Your own run"); account and partition are those of
launch/slurm/env.sh. A row whose job failed stays "not run", and its log is named.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from benchmarks import throughput
from benchmarks.record import add_results_option
from benchmarks.throughput import ROWS, Row

ROOT = Path(__file__).parents[2]


def submit_command(row: Row, run_dir: Path, steps: int) -> list[str]:
    """Submits the row's config for some steps and waits for the job's end."""
    return [
        sys.executable,
        str(ROOT / "launch" / "slurm" / "submit.py"),
        "--config",
        str(ROOT / "configs" / f"{row.config}.yaml"),
        f"--name=headline_{row.size}",
        "--follow",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={run_dir}",
        "trainer.val_before_train=false",
        "trainer.save_hf=never",
        "trainer.resume_mode=disable",  # old steps would count as measured
    ]


def finished_runs(commands: dict[str, list[str]], folder: Path) -> list[str]:
    """Sizes whose job ended well, once all have ended."""
    jobs = {}
    for size, command in commands.items():
        with (folder / f"{size}.log").open("wb") as log:
            jobs[size] = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
    codes = {size: job.wait() for size, job in jobs.items()}
    for size, code in codes.items():
        print(f"{size}: exit code {code}, {folder / size}.log")
    return [size for size, code in codes.items() if code == 0]


def main(argv: list[str]) -> int:
    sizes = [row.size for row in ROWS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=sizes, default=sizes)
    parser.add_argument("--steps", type=int, default=6, help="the first warms up")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/headline"), help="of the runs, on a shared file system"
    )
    add_results_option(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the sbatch commands")
    args = parser.parse_args(argv)
    folder = args.folder.absolute()
    commands = {row.size: submit_command(row, folder / row.size, args.steps) for row in ROWS if row.size in args.sizes}
    if args.dry_run:
        return max(subprocess.call([*command, "--dry-run"], cwd=ROOT) for command in commands.values())
    folder.mkdir(parents=True, exist_ok=True)
    done = finished_runs(commands, folder)
    runs = [f"--run={size}={folder / size}" for size in done]
    throughput.main([*runs, *([f"--json={args.json}"] if args.json else [])])
    return 0 if len(done) == len(commands) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
