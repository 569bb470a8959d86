"""PPO written out: one process, transformers' own models, one unpadded response after the other, loops over tokens.

Imports nothing of the project's but the shape of its data, so that it can be wrong only in its own ways.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from rlhf_mp.data.types import Trajectory


@dataclass
class Knobs:
    """Of the test's one setting."""

    gamma: float = 0.97
    lam: float = 0.9
    temperature: float = 0.8
    reward_kl: float = 0.05
    loss_kl: float = 0.02
    entropy: float = 0.01
    clip: float = 0.1
    value_clip: float = 0.05
    groups_per_minibatch: int = 2
    actor_epochs: int = 2
    critic_epochs: int = 3
    critic_warmup: int = 1
    grad_clip: float = 0.5
    optim: dict = field(default_factory=lambda: {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01})


class Reference:
    """All three models and both optimizers."""

    def __init__(self, actor: str, critic: str, knobs: Knobs):
        self.knobs = knobs
        self.actor = AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float32)
        self.frozen = AutoModelForCausalLM.from_pretrained(actor, dtype=torch.float32)
        self.critic = AutoModelForTokenClassification.from_pretrained(critic, dtype=torch.float32).eval()
        self.optimizers = [torch.optim.AdamW(m.parameters(), **knobs.optim) for m in (self.actor, self.critic)]
        self.steps_done = 0

    def logprobs(self, model, t: Trajectory) -> tuple[Tensor, Tensor]:
        """Of the response's tokens, and the entropies of their distributions."""
        logits = model(input_ids=torch.tensor([t.prompt_ids + t.response_ids])).logits[0] / self.knobs.temperature
        log_p = torch.log_softmax(logits, -1)[len(t.prompt_ids) - 1 : -1]
        return log_p[torch.arange(len(log_p)), torch.tensor(t.response_ids)], -(log_p.exp() * log_p).sum(-1)

    def values(self, t: Trajectory) -> Tensor:
        logits = self.critic(input_ids=torch.tensor([t.prompt_ids + t.response_ids])).logits[0, :, 0]
        return logits[len(t.prompt_ids) - 1 : -1]

    def step(self, trajectories: list[Trajectory]) -> dict[str, float]:
        with torch.no_grad():
            old = [self.logprobs(self.actor, t)[0] for t in trajectories]
            ref = [self.logprobs(self.frozen, t)[0] for t in trajectories]
            values = [self.values(t) for t in trajectories]
        estimates = [self.gae(*each) for each in zip(trajectories, old, ref, values, strict=True)]
        chosen = [a for t, (advantages, _) in zip(trajectories, estimates, strict=True) for a in pick(advantages, t)]
        mean = math.fsum(chosen) / len(chosen)
        variance = math.fsum((a - mean) ** 2 for a in chosen) / (len(chosen) - 1)
        whitened = [[(a - mean) / math.sqrt(variance + 1e-8) for a in advantages] for advantages, _ in estimates]
        returns = [found for _, found in estimates]

        metrics = {f"{model}/{what}": [] for model in ("actor", "critic") for what in ("loss", "grad_norm")}
        everything = list(zip(trajectories, old, ref, values, whitened, returns, strict=True))
        chunks = minibatches(everything, self.knobs.groups_per_minibatch)
        for chunk in chunks * self.knobs.critic_epochs:
            loss = sum(self.value_loss(*each) for each in chunk) / num_tokens(chunk)
            self.update(self.critic, self.optimizers[1], loss, metrics, "critic")
        if self.steps_done >= self.knobs.critic_warmup:
            for chunk in chunks * self.knobs.actor_epochs:
                loss = sum(self.policy_loss(*each) for each in chunk) / num_tokens(chunk)
                self.update(self.actor, self.optimizers[0], loss, metrics, "actor")
        self.steps_done += 1
        errors = [r - v for t, v, ret in zip(trajectories, values, returns, strict=True)
                  for r, v in zip(pick(ret, t), pick(v.tolist(), t), strict=True)]  # fmt: skip
        flat = [r for t, ret in zip(trajectories, returns, strict=True) for r in pick(ret, t)]
        found = {name: math.fsum(values) / len(values) for name, values in metrics.items() if values}
        return found | {
            "critic/explained_variance": 1 - spread(errors) / spread(flat),
            "critic/return_mean": math.fsum(flat) / len(flat),
        }

    def gae(self, t: Trajectory, old: Tensor, ref: Tensor, values: Tensor) -> tuple[list[float], list[float]]:
        """Advantages before whitening, and returns; 0 where another than the policy chose the token."""
        own = [i for i, chosen in enumerate(t.loss_mask) if chosen]
        advantages, returns = ([0.0] * len(t.response_ids) for _ in range(2))
        for n, i in enumerate(own):
            total, weight = 0.0, 1.0
            for k, j in enumerate(own[n:], start=n):  # straight from the definition, not by recursion
                reward = -self.knobs.reward_kl * (old[j] - ref[j]).item() + (t.reward if j == own[-1] else 0.0)
                following = values[own[k + 1]].item() if k + 1 < len(own) else 0.0
                total += weight * (reward + self.knobs.gamma * following - values[j].item())
                weight *= self.knobs.gamma * self.knobs.lam
            advantages[i], returns[i] = total, total + values[i].item()
        return advantages, returns

    def value_loss(self, t, old, ref, values, advantages, returns) -> Tensor:
        """Summed over the response's tokens."""
        total = torch.zeros(())
        for now, before, target, chosen in zip(self.values(t), values, returns, t.loss_mask, strict=True):
            if chosen:
                near = torch.clamp(now, before - self.knobs.value_clip, before + self.knobs.value_clip)
                total = total + 0.5 * torch.maximum((now - target) ** 2, (near - target) ** 2)
        return total

    def policy_loss(self, t, old, ref, values, advantages, returns) -> Tensor:
        """Summed over the response's tokens."""
        total, knobs = torch.zeros(()), self.knobs
        for now, entropy, before, frozen, advantage, chosen in zip(
            *self.logprobs(self.actor, t), old, ref, advantages, t.loss_mask, strict=True
        ):
            if chosen:
                ratio = torch.exp(now - before)
                clipped = torch.clamp(ratio, 1 - knobs.clip, 1 + knobs.clip)
                surrogate = torch.minimum(ratio * advantage, clipped * advantage)
                kl = torch.exp(frozen - now) - (frozen - now) - 1
                total = total - surrogate - knobs.entropy * entropy + knobs.loss_kl * kl
        return total

    def update(self, model, optimizer, loss: Tensor, metrics: dict[str, list[float]], name: str) -> None:
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), self.knobs.grad_clip)
        optimizer.step()
        metrics[f"{name}/loss"].append(loss.item())
        metrics[f"{name}/grad_norm"].append(norm.item())


def pick(values: list[float], t: Trajectory) -> list[float]:
    return [value for value, chosen in zip(values, t.loss_mask, strict=True) if chosen]


def num_tokens(chunk: list) -> int:
    return sum(sum(t.loss_mask) for t, *_ in chunk)


def minibatches(everything: list, groups: int) -> list[list]:
    order = list(dict.fromkeys(t.group_id for t, *_ in everything))
    cut = [set(order[i : i + groups]) for i in range(0, len(order), groups)]
    return [[each for each in everything if each[0].group_id in ids] for ids in cut]


def spread(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / len(values)
