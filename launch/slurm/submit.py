"""Submit a training job to Slurm, with what it needs derived from its config and its plan.

  python launch/slurm/submit.py --config configs/grpo_qwen2.5_7b_deepspeed.yaml --nodes 2
  python launch/slurm/submit.py --config my.yaml --dry-run trainer.total_training_steps=100
  python launch/slurm/submit.py --config my.yaml --follow --sbatch=--exclusive --sbatch=--qos=long

Account and partition come from launch/slurm/env.sh. Exit code 2: the config has problems; with --follow, the job's own.
"""

import argparse
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rlhf_mp.cluster.placement import devices_per_node
from rlhf_mp.config.allocation import read_allocated
from rlhf_mp.config.files import file_problems
from rlhf_mp.config.load import read_config
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.errors import Absent, ConfigError
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.plan import Plan
from rlhf_mp.planner.preflight import Machine, plan_of, plan_problems, this_machine
from rlhf_mp.planner.throughput import step_time

ROOT = Path(__file__).parents[2]
SCRIPT, ENV = "launch/slurm/train.sbatch", "launch/slurm/env.sh"
ASSUMED_GPU = "h100"  # login nodes have none; what a node's host needs hardly depends on the card
LONGEST_S, SHORTEST_S, START_S = 24 * 3600, 1800, 900
HOST_MEMORY_MARGIN = 1.25  # over the plan's peak: page cache, and what the plan does not know
CPUS_OF_GPU_RANK, CPUS_OF_CPU_RANK = 8, 1
FOLLOW_EVERY_S = 1.0


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="as of launch/train.py")
    parser.add_argument("--nodes", type=int, help="unset: trainer.nnodes, and rollout.nnodes")
    parser.add_argument("--gpu", help=f"card of the nodes, for the plan; unset: this machine's, else {ASSUMED_GPU}")
    parser.add_argument(
        "--time", help="limit; unset: twice the plan's estimate, a day at most; near it the job requeues"
    )
    parser.add_argument(
        "--cpus-per-task", type=int, help=f"unset: {CPUS_OF_GPU_RANK} with GPUs, {CPUS_OF_CPU_RANK} on CPU"
    )
    parser.add_argument("--name", help="of the job; unset: trainer.experiment_name")
    parser.add_argument("--singleton", action="store_true", help="start after earlier jobs of this name have ended")
    parser.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="passed on; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="print the command, submit nothing")
    parser.add_argument("--follow", action="store_true", help="show the job's log until it ends")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as of launch/train.py")
    return parser.parse_intermixed_args(argv)


def checked_config(args: argparse.Namespace) -> RunConfig:
    """The config as it will run. Files may be missing here: the nodes need them, this machine doesn't.

    Raises:
        ConfigError: a problem that the nodes would have too.
    """
    if args.nodes:
        config, problems = read_allocated(args.config, args.overrides, args.nodes)
    else:
        config, problems = read_config(args.config, args.overrides)
    refused = {problem.key for problem in problems}
    files = (p for p in file_problems(config, world_size=None) if p.key not in refused and not isinstance(p, Absent))
    if problems := [*problems, *files]:
        raise ConfigError(problems)
    return config


def nodes_of(config: RunConfig, gpu: str | None) -> Machine:
    """One of the cluster's nodes, as far as it can be known here; its own check judges its memory."""
    if config.trainer.device == "cpu":
        return Machine(None, None)
    return Machine(find_gpu(gpu) if gpu else this_machine(config).gpu or find_gpu(ASSUMED_GPU), None)


def time_limit(plan: Plan, num_steps: int | None) -> str:
    """Twice what the steps are estimated to take, as Slurm writes it; a day where that isn't known."""
    seconds = LONGEST_S
    if num_steps and plan.job.gpu and plan.job.gpu.bf16_flops:
        seconds = START_S + 2 * num_steps * step_time(plan, plan.job.workload).total
    minutes = math.ceil(min(LONGEST_S, max(SHORTEST_S, seconds)) / 60)
    return f"{minutes // 60}:{minutes % 60:02}:00"


def sbatch_command(config: RunConfig, args: argparse.Namespace) -> list[str]:
    """What a person would type.

    Raises:
        ConfigError: the run does not fit.
    """
    trainer, on_cpu = config.trainer, config.trainer.device == "cpu"
    machine = nodes_of(config, args.gpu)
    if not trainer.skip_plan and (problems := list(plan_problems(config, machine))):
        raise ConfigError(problems)
    plan = plan_of(config, machine)
    memory = math.ceil(plan.host_per_node * HOST_MEMORY_MARGIN / GIB)
    devices = devices_per_node(config) if trainer.task == "rl" else trainer.n_gpus_per_node
    workers = math.ceil(devices / trainer.n_gpus_per_node)  # on CPU every server's worker has a core too
    cpus = args.cpus_per_task or (CPUS_OF_CPU_RANK * workers if on_cpu else CPUS_OF_GPU_RANK)
    return [
        "sbatch",
        "--parsable",
        f"--job-name={args.name or trainer.experiment_name}",
        f"--output={trainer.default_local_dir}/logs/%x-%j.log",
        f"--nodes={trainer.nnodes + config.engine_machines}",
        f"--ntasks-per-node={trainer.n_gpus_per_node}",
        *([] if on_cpu else [f"--gpus-per-node={devices}"]),
        f"--cpus-per-task={cpus}",
        f"--mem={memory}G",
        f"--time={args.time or time_limit(plan, trainer.total_training_steps)}",
        *(["--dependency=singleton"] if args.singleton else []),
        *args.sbatch,
        SCRIPT,
        "--config",
        str(args.config),
        *args.overrides,
    ]


def submit(command: list[str], run_dir: Path) -> str:
    """The job's number.

    Raises:
        subprocess.CalledProcessError: Slurm refused; it has said why.
    """
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)  # Slurm does not create it
    environment = os.environ.get("RLHF_MP_ENV", ENV)
    with_account = ["bash", "-c", 'source "$0" && exec "$@"', environment, *command]
    answer = subprocess.run(with_account, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return answer.stdout.strip().split(";")[0]


def follow(job: str, name: str, run_dir: Path) -> int:
    """Print the batch script's log and that of rank 0 as they grow; return the job's exit code."""
    seen: dict[Path, int] = {}
    while True:
        state = job_fields(job)
        files = [
            run_dir / "logs" / f"{name}-{job}.log",
            *sorted((run_dir / "logs" / f"slurm-{job}").glob("node-*.log")),
        ]
        for file in filter(Path.exists, files):
            text = file.read_bytes()
            sys.stdout.write(text[seen.get(file, 0) :].decode(errors="replace"))
            seen[file] = len(text)
        sys.stdout.flush()
        if state["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"):
            code, signal = map(int, state["ExitCode"].split(":"))
            print(f"job {job} {state['JobState']}, exit code {code}")
            return code or signal or int(state["JobState"] != "COMPLETED")
        time.sleep(FOLLOW_EVERY_S)


def job_fields(job: str) -> dict[str, str]:
    answer = subprocess.run(["scontrol", "-o", "show", "job", job], stdout=subprocess.PIPE, text=True, check=True)
    return dict(word.split("=", 1) for word in answer.stdout.split() if "=" in word)


def main(argv: list[str]) -> int:
    args = parse_args(argv)
    try:
        config = checked_config(args)
        command = sbatch_command(config, args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    print(shlex.join(command))
    if args.dry_run:
        return 0
    run_dir = ROOT / config.trainer.default_local_dir
    job = submit(command, run_dir)
    print(f"job {job}")
    return follow(job, args.name or config.trainer.experiment_name, run_dir) if args.follow else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
