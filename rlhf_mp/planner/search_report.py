"""A search's answer, as a table and as JSON."""

from typing import Any

from rlhf_mp.phase import Phase
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.report import as_json
from rlhf_mp.planner.search import Found, Question, Refused

SHOWN = 12


def describe_search(question: Question, found: list[Found], refused: list[Refused]) -> str:
    """The best layouts first, then the reasons against the others."""
    shape, gpu = question.model, question.gpu
    load = question.workload
    lines = [
        f"{shape.name} ({shape.num_params / 1e9:.2f}e9 parameters), {question.algorithm}, "
        f"on {question.num_gpus} x {gpu.name} ({gpu.memory / GIB:.1f} GiB); "
        f"{load.num_sequences:,} sequences a step of {load.prompt_tokens} + {load.response_tokens} tokens",
        "",
    ]
    if found:
        columns = f"{'peak GiB':>10}{'host GiB':>10}{'s a step':>10}{'tok/s':>9}{'MFU':>6}"
        priced = f"{'a step':>10}{'1e9 tokens':>12}" if question.price else ""
        lines.append(f"{'layout':<46}{'batch':>16}{'engine':>14}{columns}{priced}")
        lines += [_row(candidate) + _cost_cells(candidate, question.price) for candidate in found[:SHOWN]]
        if question.price:
            lines.append(f"Costs at {question.price:g} a GPU and hour, in that currency.")
        lines.append("Peak per GPU, host memory per machine. Seconds are a roofline's, to order layouts; not measured.")
    else:
        lines.append("nothing fits")
    if refused:
        lines += ["", "does not fit, in the variant that needs least:"]
        lines += [f"  {item.layout}: {item.reason}" for item in refused]
    return "\n".join(lines)


def _row(candidate: Found) -> str:
    plan, time = candidate.plan, candidate.time
    job = plan.job
    batch = f"{job.batch.tokens // 1024}k {job.batch.recompute}"
    engine = f"tp{job.engine.tp} x{job.engine.num_engines} {job.engine.memory_fraction:g}" if job.engine else "-"
    return (
        f"{str(job.layout):<46}{batch:>16}{engine:>14}{plan.peak / GIB:>10.1f}{plan.host_per_node / GIB:>10.1f}"
        f"{time.total:>10.1f}{time.tokens_per_second:>9,.0f}{time.train_mfu:>6.0%}"
    )


def cost_of_step(candidate: Found, price: float) -> float:
    """All GPUs for the seconds of a step, at ``price`` a GPU and hour."""
    return candidate.time.total / 3600 * candidate.time.num_gpus * price


def _cost_cells(candidate: Found, price: float | None) -> str:
    if price is None:
        return ""
    step = cost_of_step(candidate, price)
    return f"{step:>10.3g}{step / candidate.time.num_tokens * 1e9:>12,.0f}"


def search_json(question: Question, found: list[Found], refused: list[Refused]) -> dict[str, Any]:
    return {
        "found": [
            as_json(candidate.plan)
            | {
                "seconds": {phase.value: candidate.time.seconds[phase] for phase in Phase},
                "tokens_per_second": candidate.time.tokens_per_second,
                "train_mfu": candidate.time.train_mfu,
                "cost_per_step": question.price and cost_of_step(candidate, question.price),
            }
            for candidate in found
        ],
        "refused": [{"layout": str(item.layout), "reason": item.reason} for item in refused],
    }
