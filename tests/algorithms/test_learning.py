"""Every algorithm, from rewards to updated weights, on the smallest policy there is: it learns."""

import pytest
import torch

from rlhf_mp.algorithms.base import make_algorithm
from rlhf_mp.algorithms.registered import advantage_estimators, policy_losses
from rlhf_mp.config.algorithm import SEQUENCE_LEVEL
from rlhf_mp.config.derive import derive
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.types import PolicyOutput, Totals

VOCAB, RIGHT, PROMPTS, RESPONSES = 5, 3, 8, 8
PAIRS = [(name, "ppo_clip") for name in advantage_estimators] + [("grpo", name) for name in policy_losses]


class Bandit:
    """Draws two tokens, whatever the prompt; a response earns 1 if both are right, 1/2 for one."""

    def __init__(self):
        self.logits = torch.zeros(VOCAB, requires_grad=True)
        self.generator = torch.Generator().manual_seed(0)

    def logprobs(self, batch):
        return self.logits.log_softmax(-1)[batch.tokens] * batch.mask

    def sample(self, batch_of):
        shape = (PROMPTS * RESPONSES, 2)
        drawn = torch.multinomial(self.logits.detach().softmax(-1), shape[0] * 2, True, generator=self.generator)
        tokens = torch.cat([torch.zeros(shape[0], 1, dtype=torch.int64), drawn.view(shape)], 1)
        rewards = (tokens == RIGHT).float().sum(1) / 2
        groups = torch.arange(PROMPTS).repeat_interleave(RESPONSES)
        batch = batch_of(rewards, groups, [[0, 1, 1]] * len(tokens), tokens=tokens)
        batch.rollout_logprobs = batch.old_logprobs = self.logprobs(batch).detach()
        batch.ref_logprobs = -torch.log(torch.tensor(float(VOCAB))) * batch.mask
        batch.values, batch.baselines = 0.2 * batch.mask, torch.full_like(rewards, 0.2)
        return batch

    def right(self) -> float:
        return self.logits.softmax(-1)[RIGHT].item()


@pytest.mark.parametrize(
    ("estimator", "loss", "with_parts"),
    [(*pair, False) for pair in dict.fromkeys(PAIRS)] + [("gae", "ppo_clip", True), ("rloo", "gspo", True)],
)
def test_it_learns(batch_of, estimator, loss, with_parts):
    config = RunConfig()
    actor, settings = config.actor_rollout_ref.actor, config.algorithm
    settings.adv_estimator, actor.policy_loss = estimator, loss
    actor.loss_agg_mode = "seq-mean-token-mean" if loss in SEQUENCE_LEVEL else "token-mean"
    actor.kl_cov_ratio = actor.clip_cov_ratio = 0.02
    actor.clip_cov_lb = 0.0
    if with_parts:
        settings.use_kl_in_reward = actor.use_kl_loss = True
        settings.kl_ctrl.type, settings.rollout_correction.method = "adaptive", "icepop"
        actor.entropy_coeff = 0.001
    derive(config)
    algorithm, policy = make_algorithm(config), Bandit()
    optimizer = torch.optim.Adam([policy.logits], lr=0.1)
    for _ in range(12):
        batch = policy.sample(batch_of)
        algorithm.estimate(batch)
        for _ in range(3):  # the second and third are off-policy
            output = PolicyOutput(policy.logprobs(batch), torch.zeros_like(batch.mask))
            part, _ = algorithm.policy_loss(output, batch, Totals(int(batch.mask.sum()), len(batch.mask)))
            optimizer.zero_grad()
            part.backward()
            optimizer.step()
    assert policy.right() > 0.5  # it began with 0.2
