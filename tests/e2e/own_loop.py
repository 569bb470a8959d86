"""A training loop over the Python interface: two steps of the data, one of prompts of its own, back to a checkpoint."""

import argparse
import json
from pathlib import Path

import torch

from rlhf_mp.api import Trainer

GIVEN = [{"prompt": f"{a}+4=", "answer": str(a + 4)} for a in range(4)]


def step(trainer, prompts=None):
    """What Trainer.train does in a step, in the user's words; checks what the methods say of each other."""
    policy, critic = trainer.actor_rollout_ref, trainer.critic
    batch = policy.collect_experience(prompts)
    assert torch.equal(policy.compute_log_probs(batch), batch.tensors.old_logprobs)
    assert torch.equal(critic.compute_values(batch), batch.tensors.values)
    of_critic = critic.update(batch)
    metrics = policy.update_policy(batch)
    assert of_critic["grad_norm"] == metrics["critic/grad_norm"]
    after = critic.compute_values(batch)  # out of turn: the engines have the new weights already
    assert not torch.equal(after, batch.tensors.values) and after.shape == batch.tensors.values.shape
    return batch, metrics


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--local_rank", help="the deepspeed launcher adds it")
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    with Trainer(args.config, args.overrides) as trainer:
        for _ in range(2):
            step(trainer)
        folder = Path(trainer.config.trainer.default_local_dir) / "own"
        trainer.save_checkpoint(folder)
        batch, metrics = step(trainer, GIVEN)
        asked = sorted({tuple(t.prompt_ids) for t in batch.share.trajectories})
        assert len(asked) == len(GIVEN) and len(batch.share.trajectories) == 4 * len(GIVEN)
        trainer.load_checkpoint(folder)
        assert trainer.step == 2
        again, repeated = step(trainer, GIVEN)
        same = [metrics[name] == repeated[name] for name in ("actor/pg_loss", "actor/grad_norm", "rollout/reward_mean")]
        accuracy = trainer.evaluate()["eval/accuracy"]
    print(json.dumps({"same": same, "accuracy": accuracy}))


if __name__ == "__main__":
    main()
