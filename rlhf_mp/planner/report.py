"""A plan in words: as a table, as an explanation of every number, as JSON."""

from typing import Any

from rlhf_mp.phase import Phase
from rlhf_mp.planner.amount import GB, GIB, MIB
from rlhf_mp.planner.engine_share import safe_shares
from rlhf_mp.planner.hardware import USABLE
from rlhf_mp.planner.inference import cache_bytes_per_token
from rlhf_mp.planner.job import Job
from rlhf_mp.planner.plan import Moment, Plan, node_bytes
from rlhf_mp.planner.states import lora_params
from rlhf_mp.planner.term import Term, total


def describe(plan: Plan) -> str:
    """The fullest moment of each phase, what it consists of, and the verdict."""
    job = plan.job
    unit, scale = ("GiB", GIB) if plan.peak >= 4 * GIB else ("MiB", MIB)
    lines = [headline(job), ""]
    moments = [m for m in (plan.peak_of(phase) for phase in Phase) if m is not None]
    place = "GPU" if job.gpu else "rank"
    lines.append(f"{unit + ' per ' + place:<26}" + "".join(f"{m.phase.value:>10}" for m in moments))
    rows: dict[str, list[float]] = {}
    on_host = job.gpu is None
    for column, moment in enumerate(moments):
        for term in moment.terms:
            if term.on_host == on_host:
                rows.setdefault(term.label, [0.0] * len(moments))[column] += term.bytes
    for label, sizes in rows.items():
        lines.append(f"  {label:<24}" + "".join(f"{size / scale:>10.2f}" if size else f"{'-':>10}" for size in sizes))
    totals = [m.host_bytes if on_host else m.gpu_bytes for m in moments]
    lines.append(f"  {'total':<24}" + "".join(f"{size / scale:>10.2f}" for size in totals))
    host = "".join(f"{node_bytes(job, m) / GIB:>10.2f}" for m in moments)
    lines.append(f"{'host memory, GiB/machine':<26}{host}")
    lines += ["", *verdict(plan)]
    return "\n".join(lines)


def headline(job: Job) -> str:
    place = f"{job.layout.num_ranks} rank(s) in host memory"
    if job.gpu:
        size = f"{job.gpu.memory / GIB:.1f} GiB = {job.gpu.memory / GB:.1f} GB each"
        place = f"{job.layout.num_ranks} x {job.gpu.name} ({size})"
    adapter = f", {_adapter(job)}" if job.adapter else ""
    return (
        f"{job.model.name}: {job.model.num_params:,} parameters, {job.algorithm}{adapter}, {job.precision.name}, "
        f"{job.layout}, {job.batch.tokens:,} tokens a micro-batch, recompute {job.batch.recompute}\non {place}"
    )


def _adapter(job: Job) -> str:
    trained = lora_params(job.model, job.adapter)
    share = trained / job.model.num_params
    return f"{'Q' if job.adapter.quantization else ''}LoRA rank {job.adapter.rank} ({trained:,} trained, {share:.2%})"


def verdict(plan: Plan) -> list[str]:
    """One line that it fits, or one per reason why not."""
    job = plan.job
    if plan.problems:
        return [f"does not fit: {problem}" for problem in plan.problems] + _engine_share(job)
    lines = [f"fullest: {plan.worst.phase.value} ({plan.worst.name}), {plan.peak / GIB:.2f} GiB"]
    if job.gpu:
        lines[0] += f" of {plan.limit / GIB:.2f} GiB usable ({USABLE:.0%} of the card): fits"
    if job.host_memory:
        have = f"{job.host_memory / GIB:.2f} GiB a machine"
        lines.append(f"host memory: {plan.host_per_node / GIB:.2f} GiB of {have}: fits")
    if plan.cache_tokens is not None and plan.cache_tokens != float("inf"):
        whole = plan.cache_tokens / job.engine.sequence
        lines.append(f"KV cache: {plan.cache_tokens:,.0f} tokens an engine, {whole:,.0f} sequences of full length")
        lines += _cache_wanted(job) + _engine_share(job)
    return lines


def _engine_share(job: Job) -> list[str]:
    if job.gpu is None or job.engine is None:
        return []
    shares = safe_shares(job)
    if shares is None:
        return ["gpu_memory_utilization: no value makes it fit"]
    return [
        f"gpu_memory_utilization: {shares[0]:.2f} to {shares[1]:.2f} fit, {job.engine.memory_fraction:.2f} is asked"
    ]


def _cache_wanted(job: Job) -> list[str]:
    """What a step's responses would take if all were sampled at once: it grows with the responses per prompt."""
    if job.workload is None:
        return []
    each = cache_bytes_per_token(job.model, job.engine.tp, job.engine.cache_bytes).value * job.engine.sequence
    share = job.workload.num_sequences / job.engine.num_engines
    at_once = min(share, job.engine.max_sequences)
    return [
        f"cache wanted: {each * at_once / GIB:.2f} GiB a GPU for the {at_once:,.0f} sequences an engine takes at once, "
        f"of its {share:,.0f} a step ({job.workload.prompts:,} prompts x {job.workload.responses})"
    ]


def explain(plan: Plan) -> str:
    """Every term with its formula and its numbers: what is there all along once, then what each moment adds."""
    first, *others = plan.moments
    kept = [term for term in first.terms if all(term in moment.terms for moment in others)]
    lines = [headline(plan.job), f"\nall along, {_sizes(kept)}", *map(_line, kept)]
    for moment in plan.moments:
        own = [term for term in moment.terms if term not in kept]
        lines.append(f"\n{moment.phase.value}: {moment.name}, {_sizes(moment.terms)}" + (" with:" if own else ""))
        lines += map(_line, own)
    return "\n".join([*lines, "", *verdict(plan)])


def _sizes(terms: list[Term]) -> str:
    on_gpu, on_host = total(terms, on_host=False), total(terms, on_host=True)
    gpu = f"{on_gpu / GIB:.3f} GiB a GPU, " if on_gpu else ""
    return f"{gpu}{on_host / GIB:.3f} GiB of host memory a rank"


def _line(term: Term) -> str:
    place = "host" if term.on_host else "GPU"
    return f"  {place:<4} {term.bytes / MIB:>11,.1f} MiB  {term.label} = {term.amount.formula}"


def as_json(plan: Plan) -> dict[str, Any]:
    """Numbers in bytes, so that no unit can be mistaken."""
    job = plan.job
    return {
        "model": job.model.name,
        "num_params": job.model.num_params,
        "gpu": job.gpu.name if job.gpu else None,
        "gpu_memory_bytes": job.gpu.memory if job.gpu else None,
        "usable_bytes": plan.limit,
        "num_gpus": job.layout.num_ranks,
        "layout": str(job.layout),
        "algorithm": job.algorithm,
        "fits": plan.fits,
        "problems": plan.problems,
        "peak_bytes": plan.peak,
        "peak_phase": plan.worst.phase.value,
        "host_bytes_per_machine": plan.host_per_node,
        "cache_tokens": plan.cache_tokens if plan.cache_tokens != float("inf") else None,
        "moments": [_moment_json(moment) for moment in plan.moments],
    }


def _moment_json(moment: Moment) -> dict[str, Any]:
    return {
        "phase": moment.phase.value,
        "name": moment.name,
        "gpu_bytes": moment.gpu_bytes,
        "host_bytes_per_rank": moment.host_bytes,
        "terms": [
            {
                "role": term.role.value,
                "component": term.component.value,
                "bytes": term.bytes,
                "on_host": term.on_host,
                "formula": term.amount.formula,
            }
            for term in moment.terms
        ],
    }
