"""TRL as one side of a comparison: its environment, its settings, one run."""

import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.process import run_logged
from benchmarks.trl_job import TrlJob, TrlVariant, grpo_arguments
from benchmarks.workloads import Material, Workload

ROOT = Path(__file__).parents[1]
ENVIRONMENT = ROOT / ".venv-trl"
REQUIREMENTS = Path(__file__).with_name("trl_requirements.txt")

# TRL's only other generators, vLLM in two modes, have no CPU build on PyPI.
VARIANTS = {
    "quickstart": [TrlVariant(1, "dynamic", 128), TrlVariant(2, "dynamic", 64), TrlVariant(2, "static", 64)],
    "realistic": [TrlVariant(1, "dynamic", 32), TrlVariant(2, "dynamic", 16), TrlVariant(2, "static", 16)],
}


class TrlSide:
    name = "TRL"

    def __init__(self) -> None:
        self.python = make_environment()

    def variants(self, workload: Workload) -> list[TrlVariant]:
        return VARIANTS[workload.name]

    def versions(self) -> dict[str, str]:
        """Of every package in TRL's environment."""
        command = [str(self.python), "-m", "pip", "list", "--format=freeze"]
        frozen = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        return dict(line.split("==") for line in frozen.split())

    def settings(self, workload: Workload, variant: TrlVariant, material: Material, steps: int, out: Path) -> dict:
        """What GRPOConfig gets."""
        return grpo_arguments(make_job(workload, variant, material, steps, out))

    def run(self, workload: Workload, variant: TrlVariant, material: Material, steps: int, out: Path) -> Path:
        """One run; return its metrics.jsonl."""
        make_job(workload, variant, material, steps, out).save(out / "job.json")
        command = [str(self.python), "-m"]
        if variant.processes > 1:
            command += ["torch.distributed.run", "--standalone", f"--nproc-per-node={variant.processes}", "-m"]
        run_logged([*command, "benchmarks.trl_grpo", str(out / "job.json")], out / "log.txt", variant.processes)
        return out / "metrics.jsonl"


def make_job(workload: Workload, variant: TrlVariant, material: Material, steps: int, out: Path) -> TrlJob:
    return TrlJob(workload, variant, steps, str(material.model), str(material.prompts), str(out))


def make_environment() -> Path:
    """The interpreter of an environment that holds exactly what the requirements file asks for; makes it if needed."""
    python, stamp = ENVIRONMENT / "bin" / "python", ENVIRONMENT / REQUIREMENTS.name
    if stamp.exists() and stamp.read_text() == REQUIREMENTS.read_text():
        return python
    print(f"making {ENVIRONMENT} from {REQUIREMENTS}")
    if ENVIRONMENT.exists():
        shutil.rmtree(ENVIRONMENT)
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", "-r", str(REQUIREMENTS)], check=True)
    shutil.copy(REQUIREMENTS, stamp)  # last: an interrupted installation is begun afresh
    return python
