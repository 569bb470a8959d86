"""One GRPO workload in TRL's GRPOTrainer. Runs inside TRL's own environment and knows nothing of rlhf_mp.

    python -m benchmarks.trl_grpo job.json                 (torchrun --nproc-per-node 2 -m ... for two ranks)

Writes one JSON object per rollout to ``<output>/metrics.jsonl`` under the names that rlhf_mp uses. Prompts come in
file order; every other number comes from the workload. Nothing is fetched from any hub.
"""

import json
import os
import sys
import time
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from benchmarks.trl_job import TrlJob, grpo_arguments
from benchmarks.workloads import REWARDS, Workload


class TimedGRPOTrainer(GRPOTrainer):
    """Splits the wall-clock time of each step into rollout, score and train. It changes nothing else."""

    def __init__(self, *args, metrics_file: Path, **kwargs):
        super().__init__(*args, **kwargs)
        self._file = metrics_file
        self._row: dict[str, float] = {}
        self._step_started = 0.0

    def train(self, *args, **kwargs):
        result = super().train(*args, **kwargs)
        self._finish_step()
        return result

    def _finish_step(self) -> None:
        """Write the running step; what was neither rollout nor scoring was training."""
        row, total = self._row, time.perf_counter() - self._step_started
        row["time/step_s"] = total
        row["time/train_s"] = total - row["time/rollout_s"] - row["time/score_s"]
        if self.accelerator.is_main_process:
            with open(self._file, "a") as file:
                file.write(json.dumps(row) + "\n")

    def _generate_and_score_completions(self, inputs):
        if self._row:
            self._finish_step()
            self._row = {"step": self._row["step"] + 1}
        else:
            self._row = {"step": 1}
        self._row |= {"time/rollout_s": 0.0, "time/score_s": 0.0, "time/sync_s": 0.0}
        self._step_started = time.perf_counter()
        return super()._generate_and_score_completions(inputs)

    def _generate_single_turn(self, *args, **kwargs):
        start = time.perf_counter()
        completion_ids, logprobs = super()._generate_single_turn(*args, **kwargs)
        lengths = torch.tensor([len(ids) for ids in completion_ids])
        lengths = self.accelerator.gather(lengths).float()  # waits for the slowest rank, as the next line of TRL does
        self._row["time/rollout_s"] += time.perf_counter() - start
        self._row["rollout/response_tokens"] = lengths.sum().item()
        self._row["rollout/response_tokens_max"] = lengths.max().item()
        return completion_ids, logprobs

    def _calculate_rewards(self, *args, **kwargs):
        start = time.perf_counter()
        rewards = super()._calculate_rewards(*args, **kwargs)  # of all ranks
        self._row["time/rollout_s"] += time.perf_counter() - start
        self._row["rollout/reward_mean"] = rewards.mean().item()
        return rewards

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        start = time.perf_counter()
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if not torch.is_grad_enabled():  # old and reference log-probs
            self._row["time/score_s"] += time.perf_counter() - start
        return result


def reward_function(workload: Workload):
    """TRL's calling convention around the workload's reward."""

    def reward(completions: list[str], answer: list[str], **_) -> list[float]:
        return [REWARDS[workload.reward](text, reference) for text, reference in zip(completions, answer, strict=True)]

    return reward


def main(path: Path) -> None:
    job = TrlJob.load(path)
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // job.variant.processes))
    with open(job.prompts) as file:
        rows = [json.loads(line) for line in file]
    needed = job.steps * job.workload.prompts_per_step
    rows = [rows[i % len(rows)] for i in range(needed)]
    trainer = TimedGRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job.model, dtype=torch.float32),
        reward_funcs=reward_function(job.workload),
        args=GRPOConfig(**grpo_arguments(job)),
        train_dataset=Dataset.from_list([{"prompt": row["prompt"], "answer": row["answer"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(job.model, padding_side="left"),
        metrics_file=Path(job.output) / "metrics.jsonl",
    )
    trainer.train()
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        sys.stdout.flush()
        os._exit(0)  # freeing DDP's gloo groups deadlocks now and then, and everything has been written


if __name__ == "__main__":
    main(Path(sys.argv[1]))
