"""rlhf_mp as one side of a comparison: the same workload as a config, one run through the usual command."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.process import train
from benchmarks.workloads import Material, Workload

ROOT = Path(__file__).parents[1]
NUM_RANKS = 2


@dataclass(frozen=True)
class RlhfMpVariant:
    """What is left to the user; nothing here changes what is learned."""

    zero_stage: int  # of actor and reference
    micro_batch_tokens: int  # padded tokens per forward and backward
    num_engines: int
    packed: bool = False  # padding does not go through the model

    @property
    def name(self) -> str:
        packed = "-packed" if self.packed else ""
        return f"zero{self.zero_stage}-{self.micro_batch_tokens}{packed}-{self.num_engines}engines"


VARIANTS = {
    "quickstart": [RlhfMpVariant(3, 16384, 2), RlhfMpVariant(2, 16384, 2)],
    "realistic": [RlhfMpVariant(3, 8192, 2), RlhfMpVariant(3, 2048, 2), RlhfMpVariant(3, 8192, 2, packed=True)],
}


class RlhfMpSide:
    name = "rlhf_mp"

    def variants(self, workload: Workload) -> list[RlhfMpVariant]:
        return VARIANTS[workload.name]

    def settings(self, workload: Workload, variant: RlhfMpVariant, material: Material, steps: int, out: Path) -> dict:
        """What the config file says."""
        return run_config(workload, variant, material, steps, out)

    def run(self, workload: Workload, variant: RlhfMpVariant, material: Material, steps: int, out: Path) -> Path:
        """One run; return its metrics.jsonl."""
        config = OmegaConf.create(self.settings(workload, variant, material, steps, out))
        OmegaConf.save(config, out / "config_in.yaml")
        train(out / "config_in.yaml", [], NUM_RANKS, out / "log.txt")
        return out / "metrics.jsonl"


def run_config(workload: Workload, variant: RlhfMpVariant, material: Material, steps: int, out: Path) -> dict[str, Any]:
    """The workload in rlhf_mp's own keys."""
    return {
        "data": {
            "train_files": str(material.prompts),
            "apply_chat_template": False,
            "shuffle": False,
            "train_batch_size": workload.prompts_per_step,
            "max_prompt_length": workload.max_prompt_tokens,
            "filter_overlong_prompts": False,
            "max_response_length": workload.max_response_tokens,
        },
        "actor_rollout_ref": {
            "model": {
                "path": str(material.model),
                "dtype": "float32",
                "enable_gradient_checkpointing": False,
                "use_remove_padding": variant.packed,
            },
            "actor": {
                "ppo_mini_batch_size": workload.prompts_per_step // workload.minibatches,
                "ppo_max_token_len_per_gpu": variant.micro_batch_tokens,
                "clip_ratio_low": workload.clip_low,
                "clip_ratio_high": workload.clip_high,
                "grad_clip": workload.grad_clip,
                "use_kl_loss": workload.kl_coef > 0,
                "kl_loss_coef": workload.kl_coef,
                "optim": {"lr": workload.lr, "weight_decay": 0.0},
                "deepspeed": {"zero_stage": variant.zero_stage},
            },
            "rollout": {
                "n": workload.group_size,
                "temperature": workload.temperature,
                "num_engines": variant.num_engines,
            },
        },
        "reward": {"name": workload.reward},
        "trainer": {
            "default_local_dir": str(out),
            "n_gpus_per_node": NUM_RANKS,
            "device": "cpu",
            "total_epochs": 1_000_000,  # total_training_steps ends the run
            "total_training_steps": steps,
            "save_hf": "never",
            "resume_mode": "disable",
            "logger": ["console", "jsonl"],
            "log_samples": 0,
        },
    }
