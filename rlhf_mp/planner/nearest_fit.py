"""The change of a config that is the least of those with which a job fits."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlhf_mp.config.schema import ModelConfig
from rlhf_mp.planner import job as planned
from rlhf_mp.planner.amount import gib
from rlhf_mp.planner.plan import make_plan

CHUNK_KEY = "actor_rollout_ref.model.logits_chunk_mb"
LOGIT_BYTES = 4  # of a chunk's float32 logits


def chunk_tokens(chunk_mb: int, slices: int, vocab: int) -> int:
    """Positions whose float32 logits are one chunk, where ``slices`` ranks share the vocabulary."""
    return max(1, chunk_mb * 10**6 * slices // (LOGIT_BYTES * vocab))


def nearest_fit(job: planned.Job) -> str | None:
    """The first set of overrides, from the cheapest in speed to the dearest, with which the job fits."""
    overrides: list[str] = []
    for words, changed in _cheaper(job):
        overrides = [word for word in overrides if word.split("=")[0] != words.split("=")[0]] + [words]
        plan = make_plan(changed)
        if plan.fits:
            place = "GPU" if changed.gpu else "rank"
            return f"{' '.join(overrides)} (then {gib(plan.peak)} a {place} and {gib(plan.host_per_node)} a machine)"
    return None


def _cheaper(job: planned.Job) -> Iterator[tuple[str, planned.Job]]:
    """Changes that save memory, one after the other, each on top of those before."""
    if job.batch.logit_tokens is None:
        chunk_mb = ModelConfig().logits_chunk_mb
        slices = job.layout.tp if isinstance(job.layout, planned.MegatronLayout) else 1
        job = replace(job, batch=replace(job.batch, logit_tokens=chunk_tokens(chunk_mb, slices, job.model.vocab)))
        yield f"{CHUNK_KEY}={chunk_mb}", job
    models = (Section("actor_rollout_ref.actor", "actor_rollout_ref.model", "batch", "layout"),)
    if job.critic:
        models += (Section("critic", "critic.model", "critic_batch", "critic_layout"),)
    for own in models:
        batch = getattr(job, own.batch)
        if batch.recompute == "none":
            job = replace(job, **{own.batch: replace(batch, recompute="full", recompute_every=1)})
            yield f"{own.model_key}.enable_gradient_checkpointing=true", job
        elif batch.recompute == "elementwise":
            job = replace(job, **{own.batch: replace(batch, recompute="full")})
            yield f"{own.model_key}.recompute=full", job
    for own in models:
        batch = getattr(job, own.batch)
        while batch.tokens // 2 >= batch.sequence:
            batch = replace(batch, tokens=batch.tokens // 2)
            job = replace(job, **{own.batch: batch})
            yield f"{own.key}.ppo_max_token_len_per_gpu={batch.tokens}", job
    if job.engine and job.engine.sleeps and job.gpu and not job.parks:
        job = replace(job, parks=True)
        yield "trainer.offload_during_rollout=true", job
    if job.engine and job.gpu:
        for fraction in (0.4, 0.3, 0.25):
            if fraction < job.engine.memory_fraction:
                job = replace(job, engine=replace(job.engine, memory_fraction=fraction))
                yield f"actor_rollout_ref.rollout.gpu_memory_utilization={fraction}", job
    yield from _offloaded(job, models)


@dataclass(frozen=True)
class Section:
    """Where one trained model stands in a config, and in a job."""

    key: str
    model_key: str
    batch: str
    layout: str


def _could_step_on_host(layout: planned.Layout) -> bool:
    """Whether its optimizer can, and does not yet."""
    match layout:
        case planned.ZeroLayout():
            return not layout.optimizer_offload
        case planned.MegatronLayout():
            return layout.distributed_optimizer and not layout.optimizer_offload
    return False


def _offloaded(job: planned.Job, models: Sequence[Section]) -> Iterator[tuple[str, planned.Job]]:
    zero = [own for own in models if isinstance(getattr(job, own.layout), planned.ZeroLayout) and job.gpu]

    def changed(own: Section, **layout: object) -> planned.Job:
        return replace(job, **{own.layout: replace(getattr(job, own.layout), **layout)})

    for own in zero:
        if getattr(job, own.layout).stage < 3:
            job = changed(own, stage=3)
            yield f"{own.key}.deepspeed.zero_stage=3", job
    for own in models:
        if job.gpu and _could_step_on_host(getattr(job, own.layout)):
            job = changed(own, optimizer_offload=True)
            yield f"{own.key}.fsdp_config.optimizer_offload=true", job
    if zero and job.reference and job.adapter is None and not job.reference_offload:
        job = replace(job, reference_offload=True)
        yield "actor_rollout_ref.ref.fsdp_config.param_offload=true", job
    for own in zero:
        if not getattr(job, own.layout).param_offload:
            job = changed(own, param_offload=True)
            yield f"{own.key}.fsdp_config.param_offload=true", job
