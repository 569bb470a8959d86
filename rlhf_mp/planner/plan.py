"""Bytes per GPU and host at every moment of a training step, and whether they fit."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from rlhf_mp.phase import Phase
from rlhf_mp.planner import activations, reward, states
from rlhf_mp.planner.activations import ActivationPlan
from rlhf_mp.planner.amount import GIB, Amount, amount, gib
from rlhf_mp.planner.hardware import CONTEXT, FRAGMENTATION, USABLE
from rlhf_mp.planner.inference import cache_pool, cache_tokens, engine_terms
from rlhf_mp.planner.job import Engine, Job, MegatronLayout, TorchLayout, ZeroLayout
from rlhf_mp.planner.model_shape import ModelShape
from rlhf_mp.planner.term import COPIES, SCRATCH, SENT, Component, Role, Term, total

GATHER_ELEMENTS = 50_000_000
"""Gathered at once to be sent to the engines (train/deepspeed_engine.py)."""
RANK_PROCESS, ENGINE_PROCESSES, RAY_PROCESSES = 0.9 * GIB, 2.2 * GIB, 1.5 * GIB
"""Host memory of the programs themselves, as the quickstart shows it: a rank, a server's three processes, Ray's."""
MOVING = (Component.activations, Component.logits, Component.gathered)
"""Comes and goes within a step, and so leaves holes."""


@dataclass(frozen=True)
class Moment:
    """A point in a step where a rank's memory peaks. Terms are per rank, those of an engine per GPU of it."""

    phase: Phase
    name: str
    terms: list[Term]

    @cached_property
    def gpu_bytes(self) -> float:
        return total(self.terms, on_host=False)

    @cached_property
    def host_bytes(self) -> float:
        return total(self.terms, on_host=True)


@dataclass(frozen=True)
class Plan:
    """The moments of one job's step."""

    job: Job
    moments: list[Moment]
    cache_tokens: float | None  # that fit an engine's KV cache
    problems: list[str] = field(default_factory=list)  # why it does not fit, the worst first

    @cached_property  # asked again and again while a thousand plans are compared
    def worst(self) -> Moment:
        """Where a GPU is fullest; without GPUs, where the host is."""
        return max(self.moments, key=lambda m: m.gpu_bytes if self.job.gpu else m.host_bytes)

    @property
    def peak(self) -> float:
        return self.worst.gpu_bytes if self.job.gpu else self.worst.host_bytes

    @property
    def limit(self) -> float | None:
        """Bytes of a GPU that the plan may use; None without GPUs."""
        return self.job.gpu.memory * USABLE if self.job.gpu else None

    @property
    def fits(self) -> bool:
        return not self.problems

    @property
    def host_per_node(self) -> float:
        return max(node_bytes(self.job, moment) for moment in self.moments)

    def peak_of(self, phase: Phase) -> Moment | None:
        """The fullest moment of a phase; None if the job has no such phase."""
        found = [m for m in self.moments if m.phase == phase]
        return max(found, key=lambda m: (m.gpu_bytes, m.host_bytes)) if found else None


def node_bytes(job: Job, moment: Moment) -> float:
    """Host memory of the machine that needs most at one moment: its ranks, its engines and the programs themselves."""
    ranks = min(job.layout.num_ranks, job.ranks_per_node)
    fleets = {role: fleet for role, fleet in _fleets(job).items() if fleet is not None}
    trainer = [term for term in moment.terms if term.role not in fleets]
    ray = RAY_PROCESSES * (job.engine is not None)
    with_ranks, alone = ranks * (total(trainer, on_host=True) + RANK_PROCESS) + ray, 0.0
    for role, fleet in fleets.items():
        machines = fleet.own_machines or job.layout.num_ranks / ranks
        held = fleet.tp / fleet.span * total([term for term in moment.terms if term.role is role], on_host=True)
        servers = max(1, fleet.num_engines * fleet.span / machines) * (held + ENGINE_PROCESSES)
        if fleet.own_machines:
            alone = servers + ray
        else:
            with_ranks += servers
    return max(with_ranks, alone)


def _fleets(job: Job) -> dict[Role, Engine | None]:
    return {Role.engine: job.engine, Role.reward_server: job.reward_server}


def make_plan(job: Job) -> Plan:
    """Every moment of a step of ``job``, and what does not fit."""
    moments = [_with_overheads(job, moment) for moment in _Step(job).moments()]
    if job.gpu is None:
        moments = [_on_host(moment) for moment in moments]
    tokens = None
    if job.engine:
        tokens = cache_tokens(job.model, job.engine, cache_pool(job.model, job.engine, free_at_start(job)))
    plan = Plan(job, moments, tokens)
    return Plan(job, moments, tokens, _problems(plan))


def free_at_start(job: Job) -> float:
    """Bytes an engine finds when it starts: engines and trainer start together, so an almost empty card."""
    if job.gpu is None:
        return float("inf")
    return job.gpu.memory - CONTEXT * _processes(job)


def _processes(job: Job) -> int:
    shares = job.engine is not None and not job.engine.on_own_gpus
    return 1 + shares + (shares and job.reward_server is not None)


class _Step:
    """Assembles the moments of one job."""

    def __init__(self, job: Job):
        self.job = job
        held = self._trainer_states()
        self.resident = held + (_parked(job, held) if job.parks else [])
        self.between = [t for t in self.resident if not _given_back(job, t)]  # outside of training
        self.while_sampling = [t for t in self.between if not job.parks or _stays(job, t)]
        engine = job.engine
        self.engine = engine_terms(job.model, engine, free_at_start(job)) if engine else []
        shares = engine is not None and not (engine.on_own_gpus and job.gpu)  # on CPU the memory is one
        servers = reward.server_terms(job)
        self.always = servers if shares else []  # beside the trainer, in every phase
        self.apart = [] if shares else servers
        kept = {Component.weights} if job.swaps_adapter else set()  # while it sleeps: no swap brings the base again
        idle = [t for t in self.engine if not engine.sleeps or t.component in kept] if shares else []
        self.beside = idle + self.always
        self.during_sync = [t for t in self.engine if t.component is not Component.kv_cache or not engine.sleeps]
        self.shares = shares

    def moments(self) -> list[Moment]:
        job = self.job
        found = []
        if job.engine:
            beside = self.while_sampling + self.always if self.shares else []
            found.append(Moment(Phase.rollout, "sampling", beside + self.engine))
        if self.apart:
            found.append(Moment(Phase.rollout, "a reward server scores", self.apart))
        if job.engine and not self.shares:
            arriving = Term(Role.engine, Component.sync_bucket, amount(job.bucket_bytes / 2, "bytes of a bucket"))
            found.append(Moment(Phase.rollout, "an engine takes in weights", [*self.engine, arriving]))
        if job.has_scoring:
            found += self._scoring()
        found += self._training()
        if job.engine:
            found.append(self._sync())
        return found

    def _trainer_states(self) -> list[Term]:
        job = self.job
        terms = actor_states(job)
        if job.critic:
            terms += model_states(Role.critic, job.critic, job.of_critic, job.critic.num_params_scalar_head)
        if job.saves_in_background:
            terms += checkpoint_copies(job)
        frozen = amount(job.precision.weights, "bytes")
        own_reference = job.reference and job.adapter is None  # under an adapter it is the actor's base
        if own_reference and isinstance(job.layout, MegatronLayout):
            own = states.megatron_params(job.model, job.layout)
            weights = Amount(job.precision.weights * own.value, f"{job.precision.weights:g} bytes x ({own.formula})")
            terms += states.frozen_states(Role.reference, weights, 1, job.reference_offload)
        elif own_reference:
            weights = frozen.times(job.model.num_params, "parameters")
            terms += states.frozen_states(Role.reference, weights, _shards(job), job.reference_offload)
        if job.reward_model and job.reward_server is None:
            terms += states.frozen_states(Role.reward_model, reward.rank_weights(job), _shards(job), job.reward_offload)
        return terms

    def _scoring(self) -> list[Moment]:
        job = self.job
        found = []

        def forward(name: str, role: Role, shape: ModelShape, job: Job, with_logits: bool) -> None:
            width = job.precision.activations
            plan = activations.scoring_activations(
                shape, job.layout, job.batch, job.kernels, width, with_logits=with_logits
            )
            gathered = states.gathered_weights(role, shape, job.layout, job.precision)
            found.append(
                Moment(Phase.score, name, self.between + self.beside + gathered + _activation_terms(role, plan))
            )

        if job.scores_old_policy:
            forward("old log-probs", Role.actor, job.model, job, True)
        if job.reference:
            forward("reference log-probs", Role.reference, job.model, job, True)
        if job.critic:
            forward("values", Role.critic, job.critic, job.of_critic, False)
        if job.reward_model and job.reward_server is None:
            forward("reward model", Role.reward_model, job.reward_model, job.of_reward_model, False)
            if job.reward_quantization:
                unpacked = Term(Role.reward_model, Component.gathered, states.dequantized(job.reward_model))
                found[-1].terms.append(unpacked)
        return found

    def _training(self) -> list[Moment]:
        job = self.job
        found = []

        def update(role: Role, shape: ModelShape, job: Job, num_params: float, with_logits: bool) -> None:
            base = self.resident + self.beside
            plan = _backward(job, shape, job.precision.activations, with_logits)
            moving = states.gathered_weights(role, shape, job.layout, job.precision)
            if job.adapter is None:
                moving = moving + states.whole_gradient(role, shape, job.layout, job.precision)
            elif job.adapter.quantization:
                moving = [*moving, Term(role, Component.gathered, states.dequantized(shape))]
            found.append(Moment(Phase.train, f"{role.value} backward", base + moving + _activation_terms(role, plan)))
            step = states.step_transients(role, num_params, job.layout, job.precision)
            if step:
                found.append(Moment(Phase.train, f"{role.value} step", base + step))

        trained = trained_params(job.model, job, job.num_actor_params)
        update(Role.actor, job.model, job, trained, job.algorithm != "reward_model")
        if job.critic:
            trained = trained_params(job.critic, job.of_critic, job.critic.num_params_scalar_head)
            update(Role.critic, job.critic, job.of_critic, trained, False)
        return found

    def _sync(self) -> Moment:
        job, shape = self.job, self.job.model
        half, embedding = job.bucket_bytes / 2, 0 if job.swaps_adapter else shape.vocab * shape.hidden
        largest = amount(
            half + max(half, embedding * job.engine.weight_bytes),
            "bytes of two buckets, one of them as large as the largest tensor",
        )
        elements = min(states.swapped_params(job), max(GATHER_ELEMENTS, embedding))
        gathered = amount(job.precision.weights, "bytes").times(elements, "elements gathered at once")
        moving = [Term(Role.actor, Component.sync_bucket, largest), Term(Role.actor, Component.gathered, gathered)]
        if job.adapter is not None and not job.swaps_adapter:
            moving.append(Term(Role.actor, Component.gathered, states.merged(shape)))
        return Moment(
            Phase.sync,
            "weight swap",
            self.while_sampling + (self.during_sync + self.always if self.shares else []) + moving,
        )


def checkpoint_copies(job: Job) -> list[Term]:
    """What a rank writes of every trained model, and of an adapter alone where only that is trained."""
    models = [(Role.actor, job.model, job, job.num_actor_params)]
    if job.critic:
        models.append((Role.critic, job.critic, job.of_critic, job.critic.num_params_scalar_head))
    return [
        states.checkpoint_copy(role, _trained(role, shape, own, trained_params(shape, own, size)), own.layout)
        for role, shape, own, size in models
    ]


def _stays(job: Job, term: Term) -> bool:
    """Where ranks hand the rest over (train/parking.py): what a swap sends, and with a GPU what is not there anyway."""
    elsewhere = term.on_host and (job.gpu is not None or term.component in COPIES)
    return elsewhere or (term.role is Role.actor and term.component in SENT)


def _parked(job: Job, held: list[Term]) -> list[Term]:
    """Room on the host for what goes there, kept all the time; gradients are not worth a copy."""
    moved = [term for term in held if not _stays(job, term) and term.component not in SCRATCH]
    return [Term(term.role, Component.parked, term.amount, on_host=True) for term in moved]


def _given_back(job: Job, term: Term) -> bool:
    """Plain torch's gradients end with the step (train/torch_engine.py); DeepSpeed and Megatron keep their buffers."""
    return isinstance(job.layout, TorchLayout) and term.component is Component.gradients


def actor_states(job: Job) -> list[Term]:
    """What the actor keeps between steps."""
    return model_states(Role.actor, job.model, job, job.num_actor_params)


def model_states(role: Role, shape: ModelShape, job: Job, num_params: float) -> list[Term]:
    """What a trained model keeps between steps: with an adapter, all of that for the adapter, and the frozen base."""
    trained = _trained(role, shape, job, trained_params(shape, job, num_params))
    if job.adapter is None:
        return trained
    base = states.base_weights(shape, job.adapter, job.precision.activations)
    zero = isinstance(job.layout, ZeroLayout)
    shards = 1 if zero and job.layout.stage < 3 else _shards(job)
    return states.frozen_states(role, base, shards, zero and job.layout.param_offload) + trained


def trained_params(shape: ModelShape, job: Job, num_params: float) -> float:
    """Of ``num_params`` those that an optimizer steps."""
    return num_params if job.adapter is None else states.lora_params(shape, job.adapter)


def _trained(role: Role, shape: ModelShape, job: Job, num_params: float) -> list[Term]:
    if isinstance(job.layout, MegatronLayout):
        one_table = replace(shape, tied=True) if role is Role.critic else shape  # its head is no second vocabulary
        return states.megatron_states(role, one_table, job.layout, job.precision)
    kept = states.trained_states(role, num_params, job.layout, job.precision)
    return kept + states.reduce_bucket(role, job.layout, job.precision)


def _shards(job: Job) -> int:
    """Ranks that a frozen model is spread over."""
    if isinstance(job.layout, MegatronLayout):
        return job.layout.tp * job.layout.pp
    return job.layout.num_ranks


def _backward(job: Job, shape: ModelShape, width: int, with_logits: bool) -> ActivationPlan:
    first, last = (
        activations.training_activations(
            shape, job.layout, job.batch, job.kernels, width, last_stage=is_last, with_logits=with_logits
        )
        for is_last in (False, True)
    )
    return max(first, last, key=lambda stage: stage.peak)


def _activation_terms(role: Role, plan: ActivationPlan) -> list[Term]:
    """The head's or a layer's tensors, whichever are more at their own moment."""
    terms = [Term(role, Component.activations, plan.stored)]
    if plan.logits.value >= plan.working.value:
        terms.append(Term(role, Component.logits, plan.logits))
    else:
        terms.append(Term(role, Component.activations, plan.working))
    if plan.host.value:
        terms.append(Term(role, Component.activations, plan.host, on_host=True))
    return terms


def _with_overheads(job: Job, moment: Moment) -> Moment:
    if job.gpu is None:
        return moment
    context = amount(CONTEXT, "bytes a process").times(_processes(job), "processes")
    moving = sum(term.bytes for term in moment.terms if term.component in MOVING and not term.on_host)
    lost = Amount(moving * FRAGMENTATION, f"{FRAGMENTATION:g} x {moving:,.0f} bytes that come and go")
    extra = [
        Term(Role.process, Component.context, context),
        *([Term(Role.process, Component.fragmentation, lost)] if moving else []),
    ]
    return Moment(moment.phase, moment.name, moment.terms + extra)


def _on_host(moment: Moment) -> Moment:
    return Moment(moment.phase, moment.name, [Term(t.role, t.component, t.amount, True) for t in moment.terms])


def _problems(plan: Plan) -> list[str]:
    job, found = plan.job, []
    if plan.limit is not None and plan.peak > plan.limit:
        worst = plan.worst
        biggest = max((t for t in worst.terms if not t.on_host), key=lambda t: t.bytes)
        found.append(
            f"{worst.phase.value} ({worst.name}) needs {gib(plan.peak)} of each {job.gpu.name}'s {gib(plan.limit)}: "
            f"{gib(plan.peak - plan.limit)} too much; largest: {biggest.label}, {gib(biggest.bytes)}"
        )
    if job.gpu is not None and job.rank_share is not None:
        found += _beyond_share(job, plan.moments)
    if job.engine and plan.cache_tokens < job.engine.sequence:
        found.append(
            f"an engine's KV cache has room for {plan.cache_tokens:,.0f} tokens, one response of "
            f"{job.engine.sequence:,} does not fit"
        )
    if job.host_memory is not None and plan.host_per_node > job.host_memory:
        over = plan.host_per_node - job.host_memory
        have = f"a machine with {gib(job.host_memory)}"
        found.append(f"host memory: {gib(plan.host_per_node)} needed on {have}: {gib(over)} too much")
    return found


def _beyond_share(job: Job, moments: list[Moment]) -> list[str]:
    """What a rank's own allocator would refuse, whatever is free."""

    def own(moment: Moment) -> float:
        mine = (t for t in moment.terms if t.role not in _fleets(job) and t.component is not Component.context)
        return sum(term.bytes for term in mine if not term.on_host)

    worst, allowed = max(moments, key=own), job.rank_share * job.gpu.memory
    if own(worst) <= allowed:
        return []
    return [
        f"{worst.phase.value} ({worst.name}) needs {gib(own(worst))} for a rank's tensors, and "
        f"trainer.per_process_memory_fraction={job.rank_share:g} leaves it {gib(allowed)} of each {job.gpu.name}"
    ]
