"""One line of a memory plan: whose, what, where, how much and why."""

from dataclasses import dataclass
from enum import Enum

from rlhf_mp.planner.amount import Amount


class Component(Enum):
    weights = "weights"
    gradients = "gradients"
    master = "master weights"  # float32
    optimizer = "optimizer moments"
    activations = "activations"
    logits = "logits"
    gathered = "gathered weights"  # whole while they are used; sharded or in host memory otherwise
    buckets = "gradients in flight"
    checkpoint = "checkpoint being written"
    parked = "parked while engines sample"
    kv_cache = "KV cache"
    sync_bucket = "sync bucket"
    cuda_graphs = "graphs and workspace"
    context = "contexts"
    fragmentation = "fragmentation"


class Role(Enum):
    actor = "actor"
    critic = "critic"
    reference = "reference"
    reward_model = "reward model"
    engine = "engine"
    reward_server = "reward server"
    process = "process"


SENT = (Component.weights, Component.gathered)
"""What a weight swap reads of the actor: it stays while engines sample."""
COPIES = (Component.checkpoint, Component.parked)
"""On the host, and of no model."""
SCRATCH = (Component.gradients, Component.buckets)
"""Written anew by each update: not worth a copy."""


@dataclass(frozen=True)
class Term:
    role: Role
    component: Component
    amount: Amount
    on_host: bool = False

    @property
    def bytes(self) -> float:
        return self.amount.value

    @property
    def label(self) -> str:
        return f"{self.role.value} {self.component.value}"


def total(terms: list[Term], *, on_host: bool) -> float:
    """Bytes in one place."""
    return sum([term.amount.value for term in terms if term.on_host == on_host])
