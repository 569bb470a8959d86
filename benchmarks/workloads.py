"""GRPO jobs that several trainers can do: sizes, hyper-parameters and rewards, and nothing of any trainer.

Standard library only: this module is also imported inside a peer's own environment.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True)
class Workload:
    """One GRPO job. Every trainer gets the same model folder, the same prompts in the same order, and these numbers."""

    name: str
    reward: str  # a key of REWARDS
    max_prompt_tokens: int
    max_response_tokens: int
    lr: float  # AdamW, constant, no weight decay
    kl_coef: float  # of the k3 estimate in the loss; 0: no reference model
    minibatches: int  # optimizer steps per rollout
    probe_prompts: int  # per step, while settings that only concern speed are tried
    prompts_per_step: int = 64
    group_size: int = 8  # responses per prompt
    clip_low: float = 0.2
    clip_high: float = 0.28
    grad_clip: float = 1.0
    temperature: float = 1.0

    def probe(self) -> "Workload":
        """The same job with smaller steps."""
        return replace(self, prompts_per_step=self.probe_prompts)

    @property
    def responses_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def responses_per_minibatch(self) -> int:
        return self.responses_per_step // self.minibatches


@dataclass(frozen=True)
class Material:
    """The files that every trainer starts from."""

    model: Path  # Hugging Face checkpoint folder with its tokenizer
    prompts: Path  # jsonl with prompt and answer, taken in order


def exact(response: str, answer: str) -> float:
    """1 for the reference answer, else 0."""
    return float(response.strip() == answer.strip())


def last_number(response: str, answer: str) -> float:
    """1 if the last number in the response is the answer, else 0: what math-verify decides about such plain texts."""
    numbers = re.findall(r"\d+", response)
    return float(bool(numbers) and numbers[-1] == answer)


REWARDS = {"exact": exact, "math": last_number}
"""By the name that the same reward has in rlhf_mp."""

WORKLOADS = {
    workload.name: workload
    for workload in (
        # two-digit additions, a 0.8 M-parameter model, four tokens per response: fixed costs per step
        Workload(
            "quickstart",
            reward="exact",
            max_prompt_tokens=8,
            max_response_tokens=8,
            lr=1e-4,
            kl_coef=1e-3,
            minibatches=4,
            probe_prompts=64,
        ),
        # a 20 M-parameter model, responses of 1 to 256 tokens: stragglers and padding
        Workload(
            "realistic",
            reward="math",
            max_prompt_tokens=64,
            max_response_tokens=256,
            lr=1e-4,
            kl_coef=0.0,
            minibatches=2,
            probe_prompts=16,
        ),
    )
}
