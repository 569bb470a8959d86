"""What a replay says: logged beside made again, and where numbers stop being numbers."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rlhf_mp.config.replay import Replay
from rlhf_mp.models.hf import load_tokenizer
from rlhf_mp.replay import Found, Outcome

MOST_TOKENS, MOST_ROWS = 8, 20


def differences(outcome: Outcome) -> dict[str, float]:
    """Of each metric that the run logged, relative to the larger of it and 1; two that are no numbers are the same."""
    found = {}
    for name, was in outcome.logged.items():
        now = outcome.metrics[name]
        same = was == now or not (math.isfinite(was) or math.isfinite(now))
        found[name] = 0.0 if same else abs(was - now) / max(1.0, abs(was))
        if math.isnan(found[name]):
            found[name] = math.inf
    return found


def as_json(outcome: Outcome) -> dict[str, Any]:
    start = outcome.start
    return {
        "start": {
            "checkpoint": str(start.folder) if start.folder else None,
            "step": start.step,
            "before": start.before,
        },
        "metrics": outcome.metrics,
        "logged": outcome.logged,
        "differences": differences(outcome),
        "found": [asdict(one) for one in outcome.found],
        "bad_weights": outcome.bad_weights,
    }


def report(run: Replay, outcome: Outcome, tolerance: float) -> str:
    actor = run.config.actor_rollout_ref.actor
    lines = [f"step {run.step} on {actor.strategy}, {run.config.trainer.num_ranks} rank(s)", _about_start(outcome)]
    found = differences(outcome)
    width = max(len(name) for name in outcome.metrics)
    lines += ["", f"{'':{width}}  {'logged':>15}  {'replayed':>15}  {'difference':>10}"]
    for name, now in outcome.metrics.items():
        if name in found:
            difference = "none" if found[name] == 0 else f"{found[name]:.1e}"
            lines.append(f"{name:{width}}  {outcome.logged[name]:15.8g}  {now:15.8g}  {difference:>10}")
        else:
            lines.append(f"{name:{width}}  {'-':>15}  {now:15.8g}  {'':>10}")
    lines += ["", _verdict(found, tolerance)]
    if outcome.one_update_only:
        lines.append("the step has several updates, and those after the first depend on the optimizer's state, which")
        lines.append("another backend cannot read: means over all of them differ more than the first one does")
    return "\n".join([*lines, *_about_weights(outcome), *_about_rows(run, outcome)])


def _about_start(outcome: Outcome) -> str:
    start = outcome.start
    where = f"checkpoint {start.folder}" if start.folder else "the model that the run began with"
    if start.before:
        where += f", and {len(start.before)} step(s) made again before it"
    if start.skipped:
        where += f", {start.skipped} step(s) older than they should be: the numbers will differ"
    return f"weights: {where}"


def _verdict(found: dict[str, float], tolerance: float) -> str:
    if not found:
        return "the run logged nothing of this step: it ended in it"
    worst = max(found, key=found.__getitem__)
    if found[worst] == 0:
        return f"all {len(found)} metrics are what was logged, to the last bit"
    within = "within" if found[worst] <= tolerance else "MORE than"
    return f"largest difference {found[worst]:.1e} ({worst}), {within} {tolerance:g}"


def _about_weights(outcome: Outcome) -> list[str]:
    if not outcome.bad_weights:
        return []
    return ["", "no finite numbers in the weights before the step: " + ", ".join(outcome.bad_weights[:MOST_ROWS])]


def _about_rows(run: Replay, outcome: Outcome) -> list[str]:
    skipped = any(not math.isfinite(value) for name, value in outcome.metrics.items() if name.endswith("grad_norm"))
    if not outcome.found and not skipped:
        return []
    if not outcome.found:
        return [
            "",
            "loss and its gradient by what the model computed are finite: the model's backward pass is where it",
        ]
    decode = _decoder(run)
    lines = ["", "no finite numbers, causes before what follows from them:"]
    lines += [_row(one, decode) for one in outcome.found[:MOST_ROWS]]
    more = len(outcome.found) - MOST_ROWS
    return lines + [f"  and {more} more"] * (more > 0)


def _row(one: Found, decode: Callable[[int], str]) -> str:
    shown = [f"{position} ({decode(token)!r}, id {token})" for position, token in one.tokens[:MOST_TOKENS]]
    where = f"token {', '.join(shown)}" if shown else "the row as a whole"
    more = len(one.tokens) - MOST_TOKENS
    where += f" and {more} more" * (more > 0)
    about = f"group {one.group}, reward {one.reward:g}"
    return f"  {one.update}: {one.finding.what}, row {one.finding.row} of rank {one.dp_rank} ({about}): {where}"


def _decoder(run: Replay) -> Callable[[int], str]:
    model = run.saved.actor_rollout_ref.model
    tokenizer = load_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
    return lambda token: tokenizer.decode([token])
