"""Seconds per phase by a roofline: arithmetic, memory and links, whichever is slowest.

The efficiencies are priors. They order layouts; for a promise, measure.
"""

from dataclasses import dataclass

from rlhf_mp.phase import Phase
from rlhf_mp.planner import states
from rlhf_mp.planner.inference import cache_bytes_per_token, engine_weights
from rlhf_mp.planner.job import Engine, Job, MegatronLayout, Recompute, Workload, ZeroLayout
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.plan import Plan
from rlhf_mp.planner.term import Component

TRAIN_EFFICIENCY, FORWARD_EFFICIENCY, DECODE_EFFICIENCY = 0.45, 0.50, 0.65
"""Of peak arithmetic in training and scoring, of peak bandwidth in decoding, when nothing else is in the way."""
LINK_EFFICIENCY, DECODE_OVERHEAD_S = 0.7, 0.004
TENSOR_PARALLEL_LOSS = 0.04  # of arithmetic efficiency for each doubling within a machine
CPU_ADAM_RATE = 3e9  # parameters a second and machine, DeepSpeedCPUAdam on a two-socket server
FULL_MICRO_BATCH = 4096  # tokens from which matrix products run at their best


@dataclass(frozen=True)
class StepTime:
    """Of one training step."""

    seconds: dict[Phase, float]
    num_tokens: int  # sampled and prompt tokens of the step
    num_gpus: int
    model_flops: float  # that the updates need, recomputation not counted
    peak_flops: float  # of one GPU, a second

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.total

    @property
    def train_mfu(self) -> float:
        """Share of the GPUs' peak that the updates use, while they run."""
        return self.model_flops / (self.seconds[Phase.train] * self.num_gpus * self.peak_flops)


def forward_flops(shape: ModelShape, sequence: int, *, causal: bool = True) -> float:
    """Per token: 2 for each weight it meets, and attention over half the sequence (causal) or all of it."""
    return 2 * shape.matmul_params + 4 * shape.layers * shape.q_dim * sequence * (0.5 if causal else 1)


def training_flops(shape: ModelShape, sequence: int, *, recompute: Recompute = "none", causal: bool = True) -> float:
    """Per token, forward and backward; a full recomputation is one more forward pass.

    Source: Korthikanti et al., arXiv:2205.05198 appendix A.
    """
    return forward_flops(shape, sequence, causal=causal) * (4 if recompute == "full" else 3)


def step_time(plan: Plan, workload: Workload) -> StepTime:
    """One step of the planned job. Needs a GPU with known rates."""
    job = plan.job
    assert job.gpu is not None and job.gpu.bf16_flops, "the roofline needs a card with known rates"
    seconds = {phase: 0.0 for phase in Phase}
    sequence = workload.prompt_tokens + workload.response_tokens
    if job.engine:
        one_way = _parking_seconds(plan)
        seconds[Phase.rollout] = _rollout_seconds(job, job.engine, workload, plan.cache_tokens) + one_way
        seconds[Phase.sync] = _sync_seconds(job, job.engine) + one_way
    scorings = job.scores_old_policy + job.reference + (job.critic is not None) + (job.reward_model is not None)
    if job.has_scoring:
        seconds[Phase.score] = scorings * _pass_seconds(job, workload.num_tokens, forward_flops(job.model, sequence), 1)
    models = 1 + (job.critic is not None)
    hardware = training_flops(job.model, sequence, recompute=job.batch.recompute)
    passes = 3 if job.batch.recompute in ("full", "elementwise") else 2
    updates = workload.num_tokens * workload.epochs * models
    seconds[Phase.train] = _pass_seconds(job, updates, hardware, passes, TRAIN_EFFICIENCY) + _step_seconds(job) * models
    needed = training_flops(job.model, sequence) * updates
    return StepTime(seconds, workload.num_tokens, job.layout.num_ranks, needed, job.gpu.bf16_flops)


def _pass_seconds(job: Job, tokens: float, flops: float, gathers: int, efficiency: float = FORWARD_EFFICIENCY) -> float:
    """Arithmetic of ``tokens``, beside the weights that ZeRO-3 gathers ``gathers`` times per micro-batch."""
    gpu, ranks = job.gpu, job.layout.num_ranks
    layout = job.layout
    if isinstance(layout, MegatronLayout):
        efficiency *= 1 - TENSOR_PARALLEL_LOSS * (layout.tp.bit_length() - 1)
        chunks = layout.vpp or 1
        efficiency *= 1 / (1 + (layout.pp - 1) / (chunks * max(layout.num_micro_batches, layout.pp)))  # pipeline bubble
    efficiency *= min(1.0, 0.5 + 0.5 * job.batch.tokens / FULL_MICRO_BATCH)
    arithmetic = tokens * flops / (ranks * gpu.bf16_flops * efficiency)
    if not isinstance(layout, ZeroLayout) or layout.stage < 3:
        return arithmetic
    micro_batches = max(1.0, tokens / ranks / job.batch.tokens)
    moved = job.model.num_params * job.precision.weights * (ranks - 1) / ranks
    links = micro_batches * gathers * moved / (_link_rate(job) * LINK_EFFICIENCY)
    if layout.param_offload:
        own = job.model.num_params * job.precision.weights / ranks
        links += micro_batches * gathers * own / (gpu.host_rate * LINK_EFFICIENCY)
    return max(arithmetic, links)  # the next layer is fetched while this one computes


def _step_seconds(job: Job) -> float:
    """Optimizer step: gradients to the host, Adam there, weights back."""
    layout = job.layout
    offloaded = (isinstance(layout, ZeroLayout | MegatronLayout)) and layout.optimizer_offload
    own = job.model.num_params / job.layout.num_ranks
    if not offloaded:
        return own * 32 / (job.gpu.memory_rate * 0.7)  # reads and writes of an Adam update
    per_machine = own * min(job.layout.num_ranks, job.ranks_per_node)
    return 4 * own / (job.gpu.host_rate * LINK_EFFICIENCY) + per_machine / CPU_ADAM_RATE


def _link_rate(job: Job) -> float:
    """Of the slowest link between ranks."""
    in_one_machine = job.layout.num_ranks <= job.ranks_per_node
    return job.gpu.peer_rate if in_one_machine else min(job.gpu.peer_rate, job.network_rate)


def _rollout_seconds(job: Job, engine: Engine, workload: Workload, cache_tokens: float | None) -> float:
    """Prefill, then one token at a time for as many sequences as fit the cache."""
    gpu, shape = job.gpu, job.model
    sequences = workload.num_sequences / engine.num_engines
    average = workload.prompt_tokens + workload.response_tokens / 2
    at_once = max(1.0, min(sequences, engine.max_sequences, (cache_tokens or 0) / average))
    cache_read = at_once * average * cache_bytes_per_token(shape, engine.tp, engine.cache_bytes).value
    memory = (engine_weights(shape, engine).value + cache_read) / (gpu.memory_rate * DECODE_EFFICIENCY)
    arithmetic = 2 * shape.matmul_params * at_once / engine.tp / (gpu.bf16_flops * FORWARD_EFFICIENCY)
    token = max(memory, arithmetic) + _sums_seconds(job, engine, at_once) + DECODE_OVERHEAD_S
    # prompts of one group share their prefix: it is read once
    prompts = workload.prompts * workload.prompt_tokens / engine.num_engines
    prefill = prompts * forward_flops(shape, workload.prompt_tokens) / (engine.tp * gpu.bf16_flops * FORWARD_EFFICIENCY)
    prefill += _sums_seconds(job, engine, prompts)
    return prefill + sequences / at_once * workload.response_tokens * token


def _sums_seconds(job: Job, engine: Engine, tokens: float) -> float:
    """An engine on several machines adds up every layer's two outputs over the network, there and back."""
    if engine.span == 1:
        return 0.0
    moved = 2 * 2 * job.model.layers * job.model.hidden * engine.weight_bytes * tokens
    return moved / (min(job.gpu.peer_rate, job.network_rate) * LINK_EFFICIENCY)


def _parking_seconds(plan: Plan) -> float:
    """What a rank hands over, once over its link to the host."""
    (sampling,) = (moment for moment in plan.moments if moment.name == "sampling")
    parked = sum(term.bytes for term in sampling.terms if term.component is Component.parked)
    return parked / (plan.job.gpu.host_rate * LINK_EFFICIENCY)


def _sync_seconds(job: Job, engine: Engine) -> float:
    """All that a swap brings once over the slowest link, and once into the engine."""
    whole = states.swapped_params(job) * engine.weight_bytes
    return whole / (_link_rate(job) * LINK_EFFICIENCY) + whole / engine.tp / (job.gpu.memory_rate * 0.7)
