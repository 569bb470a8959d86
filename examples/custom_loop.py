"""A training loop with an algorithm of one's own, on the quickstart's task:

python -m rlhf_mp.quickstart
deepspeed --num_gpus 2 examples/custom_loop.py [trainer.total_training_steps=5 ...]
"""

import argparse

import torch

from rlhf_mp.api import Trainer

OWN = ["trainer.experiment_name=custom_loop", "trainer.total_training_steps=150"]
OWN += ["actor_rollout_ref.actor.use_kl_loss=false"]  # or the reference would be scored for nothing


def leave_one_out(batch):
    """A response's reward less the mean of the other responses to its prompt."""
    advantages = torch.zeros_like(batch.rewards)
    for group in batch.group_ids.unique():
        rows = batch.group_ids == group
        rewards = batch.rewards[rows]
        advantages[rows] = rewards - (rewards.sum() - rewards) / (len(rewards) - 1)
    return advantages[:, None] * batch.mask


def weighted_policy_gradient(policy, batch, totals):
    """Policy gradient with truncated importance weights: what the engine sampled with is all it needs to know."""
    weights = (policy.logprobs - batch.rollout_logprobs).exp().clamp(max=2.0).detach()
    gains = weights * batch.advantages * policy.logprobs * batch.mask
    return -gains.sum() / totals.num_tokens, {"weight_mean": ((weights * batch.mask).sum(), batch.mask.sum())}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/quickstart.yaml")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher adds it
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    args = parser.parse_args()
    with Trainer(args.config, OWN + args.overrides) as trainer:
        policy = trainer.actor_rollout_ref
        before = trainer.evaluate()["eval/accuracy"]
        while not trainer.finished:
            batch = policy.collect_experience()
            batch.tensors.advantages = leave_one_out(batch.tensors)
            policy.update_policy(batch, weighted_policy_gradient)
        print(f"right held-out answers: {before:.3f} before, {trainer.evaluate()['eval/accuracy']:.3f} after")


if __name__ == "__main__":
    main()
