"""The whole pipeline on two CPU cores: fine-tuning, a reward model from preferences, PPO with a critic against it.

  python -m rlhf_mp.rlhf_demo [--out runs/rlhf_demo] [--strategy deepspeed|megatron]

The task is the quickstart's: two-digit additions. A model made from nothing is fine-tuned on right answers until it has
begun to understand (sft), and then further, until it has understood (rm_base). That one becomes the reward model: it
learns to prefer right answers to wrong ones, among them those that the first one gives (rm). Then the first one earns
the reward (ppo). The last stage never sees an answer: whether it gets better at additions is measured by the rule, on
held-out ones. The table at the end is read from the summary.json that every stage leaves behind.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_mp.models.hf import load_causal_lm, load_tokenizer
from rlhf_mp.models.tiny import character_tokenizer, make_checkpoint
from rlhf_mp.observe.console import duration
from rlhf_mp.quickstart import CHARACTERS, NUM_HELD_OUT, SHAPE, preferences, problems, write_rows

NUM_SAMPLES = 4  # of the fine-tuned model to each problem
ROOT = Path(__file__).parents[1]
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model.path"
MEGATRON = (  # data parallel like DeepSpeed; fine-tuning on two CPU cores takes tensor parallel ranks 1.6 times as long
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.fsdp_config.param_offload=false",
    f"{ACTOR}.fsdp_config.optimizer_offload=false",
)
MEGATRON_PPO = (
    "critic.fsdp_config.param_offload=false",
    "critic.fsdp_config.optimizer_offload=false",
    "reward_model.fsdp_config.param_offload=false",
)


@dataclass(frozen=True)
class Stage:
    """One launch, and the number of its summary that says what came of it."""

    name: str
    config: str
    measure: str
    metric: str
    overrides: tuple[str, ...]


def stages(out: Path) -> list[Stage]:
    """What is launched, one after the other."""
    return [
        # A policy whose rate has decayed is easily upset later. How many steps it takes to here differs by luck.
        fine_tuning(out, "sft", "base", 500, "constant", *until("eval/loss", "min", 0.5, every=10)),
        fine_tuning(out, "rm_base", "sft/huggingface", 300, "cosine", "trainer.test_freq=100"),
        Stage(
            "rm",
            "rm_quickstart.yaml",
            "held-out pairs told apart",
            "eval/accuracy",
            (
                f"{MODEL}={out / 'rm_base' / 'huggingface'}",
                f"data.train_files={out / 'train_pairs.jsonl'}",
                f"data.val_files={out / 'val_pairs.jsonl'}",
                f"{ACTOR}.optim.lr=1e-4",  # after 300 steps 0.94 of the pairs; at ten times as much 0.62
                f"{ACTOR}.optim.lr_scheduler_type=constant",  # when it begins to tell them apart differs by luck too
                "trainer.total_training_steps=500",
                "trainer.save_freq=50",
                *until("eval/accuracy", "max", 0.98, every=50),
            ),
        ),
        Stage(
            "ppo",
            "ppo_reward_model_quickstart.yaml",
            "right held-out answers",
            "eval/accuracy",
            (
                f"{MODEL}={out / 'sft' / 'huggingface'}",
                f"reward_model.model.path={out / 'rm' / 'huggingface'}",
                f"data.train_files={out / 'train.jsonl'}",
                f"data.val_files={out / 'val.jsonl'}",
                "trainer.total_training_steps=100",
            ),
        ),
    ]


def until(metric: str, mode: str, value: float, every: int) -> tuple[str, ...]:
    """Where a stage ends earlier than by its steps."""
    knobs = {"best_metric": metric, "best_mode": mode, "stop_at": value, "test_freq": every}
    return tuple(f"trainer.{key}={value}" for key, value in knobs.items())


def fine_tuning(out: Path, name: str, start: str, num_steps: int, schedule: str, *more: str) -> Stage:
    return Stage(
        name,
        "sft_quickstart.yaml",
        "loss of held-out answers",
        "eval/loss",
        (
            f"{MODEL}={out / start}",
            f"data.train_files={out / 'train.jsonl'}",
            f"data.val_files={out / 'val.jsonl'}",
            f"{ACTOR}.optim.lr=1e-3",
            f"{ACTOR}.optim.lr_scheduler_type={schedule}",
            "trainer.total_epochs=100",
            f"trainer.total_training_steps={num_steps}",
            "trainer.save_freq=50",
            *more,
        ),
    )


def prepare(out: Path, seed: int) -> None:
    """The model, which knows nothing yet, and the data."""
    make_checkpoint(out / "base", character_tokenizer(CHARACTERS), SHAPE, seed=seed)
    rows = problems(seed)
    for name, part in {"val": rows[:NUM_HELD_OUT], "train": rows[NUM_HELD_OUT:]}.items():
        write_rows(out / f"{name}.jsonl", part)


def write_pairs(out: Path, seed: int) -> None:
    """What the reward model learns from: wrong answers of the fine-tuned model itself, and those of the quickstart."""
    rows, policy = problems(seed), out / "sft" / "huggingface"
    for name, part in {"val": rows[:NUM_HELD_OUT], "train": rows[NUM_HELD_OUT:]}.items():
        write_rows(out / f"{name}_pairs.jsonl", own_mistakes(policy, part, seed) + preferences(part, seed))


@torch.no_grad()
def own_mistakes(policy: Path, rows: list[dict[str, str]], seed: int) -> list[dict[str, str]]:
    """Every problem with its right answer and each different wrong one among ``NUM_SAMPLES`` of the policy's.

    A reward model that has only seen mistakes of another kind does not tell the policy's own apart, and a policy that
    earns its scores finds out.
    """
    torch.manual_seed(seed)
    tokenizer, model = load_tokenizer(str(policy)), load_causal_lm(str(policy), torch.float32)
    prompts = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])  # of one length
    said = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=True, top_k=0, max_new_tokens=5,
        num_return_sequences=NUM_SAMPLES, use_cache=True, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    answers = tokenizer.batch_decode(said[:, prompts.shape[1] :], skip_special_tokens=True)
    pairs = []
    for number, row in enumerate(rows):
        own = dict.fromkeys(answers[number * NUM_SAMPLES : (number + 1) * NUM_SAMPLES])
        pairs += [
            {"prompt": row["prompt"], "chosen": row["answer"], "rejected": answer}
            for answer in own
            if answer and answer != row["answer"]
        ]
    return pairs


def words(stage: Stage, out: Path, strategy: str) -> list[str]:
    """The knobs that a stage is launched with."""
    backend: tuple[str, ...] = ()
    if strategy == "megatron":
        backend = MEGATRON + (MEGATRON_PPO if stage.name == "ppo" else ())
    return [*stage.overrides, *backend, f"trainer.default_local_dir={out / stage.name}"]


def launch(stage: Stage, out: Path, strategy: str, port: int) -> None:
    """Run a stage to its end; one that was interrupted continues.

    Raises:
        SystemExit: it failed; what failed has been printed.
    """
    launcher = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", "2", "--master_port", str(port)]
    train = [str(ROOT / "launch" / "train.py"), "--config", str(ROOT / "configs" / stage.config)]
    print(f"\n=== {stage.name}", flush=True)
    code = subprocess.run([*launcher, *train, *words(stage, out, strategy)]).returncode
    if code != 0:
        raise SystemExit(code)


def table(summaries: dict[Stage, dict[str, Any]]) -> str:
    """One line a stage."""
    lines = [f"{'stage':8}{'steps':>7}{'time':>9}  {'measure':28}{'before':>8}{'after':>8}"]
    for stage, summary in summaries.items():
        first, last = summary[f"{stage.metric}_first"], summary[f"{stage.metric}_last"]
        spent = f"{stage.name:8}{summary['num_steps']:7}{duration(summary['seconds']):>9}"
        lines.append(f"{spent}  {stage.measure:28}{first:8.3f}{last:8.3f}")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/rlhf_demo"))
    parser.add_argument("--strategy", choices=("deepspeed", "megatron"), default="deepspeed")
    parser.add_argument("--stages", default="sft,rm_base,rm,ppo", help="some of them, in this order (%(default)s)")
    parser.add_argument("--master-port", type=int, default=29500, help="where the ranks meet (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    chosen = [stage for stage in stages(args.out) if stage.name in args.stages.split(",")]
    if not (args.out / "base" / "config.json").exists():
        prepare(args.out, args.seed)
    summaries = {}
    for stage in chosen:
        if stage.name == "rm":
            write_pairs(args.out, args.seed)
        launch(stage, args.out, args.strategy, args.master_port)
        summaries[stage] = json.loads((args.out / stage.name / "summary.json").read_text())
    print(f"\n{table(summaries)}")


if __name__ == "__main__":
    main(sys.argv[1:])
