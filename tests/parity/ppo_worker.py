"""One rank of the test of PPO's whole update: the trainer's own loop on real engines, against ppo_reference.py."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # before DeepSpeed builds a model
from oracle import CPU, weight_difference
from ppo_reference import Knobs, Reference

from rlhf_mp.algorithms.base import make_algorithm
from rlhf_mp.cluster.ranks import Ranks, leave_ranks
from rlhf_mp.cluster.scheduler import shares_of
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.types import Share, Sums, Trajectory
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.observe.reduce import reduce_over_ranks
from rlhf_mp.train.build import join_ranks, make_actor, make_critic, make_reference
from rlhf_mp.trainer.loop import Schedule
from rlhf_mp.trainer.trainer import Trainer

NUM_STEPS = 4


def trajectories(step: int, vocab: int) -> list[Trajectory]:
    """Four prompts with two responses each, of all lengths; in one the policy chose every second token only."""
    generator = torch.Generator().manual_seed(100 + step)
    made = []
    for row in range(8):
        prompt, response = (int(torch.randint(1, high, (), generator=generator)) for high in (5, 9))
        ids = torch.randint(2, vocab, (prompt + response,), generator=generator).tolist()
        mask = [row != 3 or i % 2 == 0 for i in range(response)]
        reward = float(torch.randint(0, 3, (), generator=generator)) / 2
        made.append(Trajectory(ids[:prompt], ids[prompt:], [-1.0] * response, mask, reward, row // 2, step, "stop"))
    return made


def run_config(actor: str, critic: str, backends: dict[str, Any], num_ranks: int, knobs: Knobs) -> RunConfig:
    optim = knobs.optim | {"betas": list(knobs.optim["betas"])}
    trained = {"optim": optim, "grad_clip": knobs.grad_clip, "ppo_max_token_len_per_gpu": 26}
    return config_from_dict(
        {
            "data": {"train_batch_size": 4, "max_prompt_length": 4, "max_response_length": 8},
            "algorithm": {
                "adv_estimator": "gae", "gamma": knobs.gamma, "lam": knobs.lam,
                "use_kl_in_reward": True, "kl_ctrl": {"kl_coef": knobs.reward_kl},
            },
            "actor_rollout_ref": {
                "model": {"path": actor, "dtype": "float32", "enable_gradient_checkpointing": False},
                "actor": trained | backends["actor"] | {
                    "ppo_mini_batch_size": knobs.groups_per_minibatch, "ppo_epochs": knobs.actor_epochs,
                    "clip_ratio": knobs.clip, "entropy_coeff": knobs.entropy, "use_kl_loss": True,
                    "kl_loss_coef": knobs.loss_kl,
                },
                "rollout": {"temperature": knobs.temperature, "n": 2},
            },
            "critic": trained | backends["critic"] | {
                "model": {"path": critic}, "ppo_epochs": knobs.critic_epochs, "cliprange_value": knobs.value_clip,
                "forward_max_token_len_per_gpu": 40,
            },
            "trainer": {"n_gpus_per_node": num_ranks, "device": "cpu", "critic_warmup": knobs.critic_warmup},
        }
    )  # fmt: skip


class Rollouts:
    """Cuts made-up responses as the scheduler cuts real ones."""

    def __init__(self, config: RunConfig, dp_rank: int, vocab: int):
        self.config, self.dp_rank, self.vocab = config, dp_rank, vocab

    def fetch(self, step: int) -> Share:
        return shares_of(self.config, trajectories(step, self.vocab))[self.dp_rank]


class NoEngines:
    """Nobody samples here, so nobody sleeps after it, and the memory is always the trainer's."""

    def sleep(self) -> Sums:
        return {}

    def reclaim(self) -> None:
        pass


def make_trainer(config: RunConfig, vocab: int) -> Trainer:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    actor, ranks = make_actor(config, CPU, 1), Ranks(rank, num_ranks)
    return Trainer(
        schedule=Schedule(NUM_STEPS, -1, -1, False, config.trainer.critic_warmup),
        actor=actor,
        critic=make_critic(config, CPU, 1),
        reference=make_reference(config, CPU, actor),
        algorithm=make_algorithm(config),
        rollouts=Rollouts(config, actor.layout.dp_rank, vocab),
        swap=NoEngines(),
        checkpoints=None,
        log=MetricLog([], reduce_over_ranks),
        watch=lambda phase: nullcontext(),
        has_validation=False,
        sum_over_ranks=lambda x: ranks.sum(x, counts=actor.layout.is_output_rank),
        counts=actor.layout.is_output_rank,
    )


def main(folder: str, backends: str) -> None:
    """Reads ``folder/actor`` and ``folder/critic``; writes ``folder/report.json``."""
    knobs, num_ranks = Knobs(), int(os.environ["WORLD_SIZE"])
    actor, critic = f"{folder}/actor", f"{folder}/critic"
    config = run_config(actor, critic, json.loads(backends), num_ranks, knobs)
    join_ranks(config, CPU)
    reference = Reference(actor, critic, knobs)
    trainer = make_trainer(config, reference.actor.config.vocab_size)
    steps = []
    for step in range(NUM_STEPS):
        expected = reference.step(trajectories(step, reference.actor.config.vocab_size))
        trainer.train_step()
        trainer.step += 1
        steps.append({"expected": expected, "found": trainer.log.finish(step)})
    weights = {
        name: weight_difference(engine, dict(model.named_parameters()))
        for name, engine, model in (
            ("actor", trainer.actor, reference.actor),
            ("critic", trainer.critic, reference.critic),
        )
    }
    if os.environ["RANK"] == "0":
        Path(folder, "report.json").write_text(json.dumps({"steps": steps, "weights": weights}))
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
