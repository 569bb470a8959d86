"""What the driver hands to the script in TRL's environment. Standard library only, imported on both sides."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.workloads import Workload


@dataclass(frozen=True)
class TrlVariant:
    """What TRL leaves to the user on a CPU; nothing here changes what is learned."""

    processes: int  # torchrun ranks; the cores are shared out evenly as threads
    generation: str  # "dynamic": model.generate; "static": with a preallocated KV cache; "paged": continuous batching
    micro_batch: int  # sequences per forward and backward

    @property
    def name(self) -> str:
        return f"{self.processes}x-{self.generation}-{self.micro_batch}"


@dataclass(frozen=True)
class TrlJob:
    workload: Workload
    variant: TrlVariant
    steps: int
    model: str  # Hugging Face checkpoint folder with its tokenizer
    prompts: str  # jsonl with prompt and answer, taken in order
    output: str  # folder that gets metrics.jsonl

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1))

    @staticmethod
    def load(path: Path) -> "TrlJob":
        raw = json.loads(path.read_text())
        parts = {"workload": Workload(**raw["workload"]), "variant": TrlVariant(**raw["variant"])}
        return TrlJob(**(raw | parts))


def grpo_arguments(job: TrlJob) -> dict[str, Any]:
    """Keyword arguments of TRL's GRPOConfig."""
    workload, variant = job.workload, job.variant
    accumulation = workload.responses_per_minibatch // (variant.micro_batch * variant.processes)
    return {
        "output_dir": job.output,
        "max_steps": job.steps * workload.minibatches,
        "per_device_train_batch_size": variant.micro_batch,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * workload.minibatches,
        "num_generations": workload.group_size,
        "num_iterations": 1,
        "max_completion_length": workload.max_response_tokens,
        "temperature": workload.temperature,
        "beta": workload.kl_coef,
        "epsilon": workload.clip_low,
        "epsilon_high": workload.clip_high,
        "loss_type": "dapo",  # token mean
        "scale_rewards": "group",
        "learning_rate": workload.lr,
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "weight_decay": 0.0,
        "max_grad_norm": workload.grad_clip,
        "shuffle_dataset": False,
        "use_cpu": True,
        "ddp_backend": "gloo" if variant.processes > 1 else None,
        "bf16": False,
        "gradient_checkpointing": False,
        "cache_implementation": "static" if variant.generation == "static" else None,
        "use_transformers_continuous_batching": variant.generation == "paged",
        "dataloader_pin_memory": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": workload.minibatches,
        "disable_tqdm": True,
        "seed": 1,
    }
