"""How old a step's samples are, token by token."""

from collections.abc import Sequence

from rlhf_mp.data.types import Sums, Trajectory


def staleness_metrics(responses: Sequence[Trajectory], step: int) -> Sums:
    """Versions between the weights that drew a token and those it is trained on; of the tokens the policy chose."""
    ages = [
        step - version
        for t in responses
        for version, chosen in zip(t.token_versions or [t.version] * len(t.loss_mask), t.loss_mask, strict=True)
        if chosen
    ]
    mixed = sum(len(set(t.token_versions)) > 1 for t in responses)
    return {
        "rollout/token_staleness_mean": (sum(ages), len(ages)),
        "rollout/token_staleness_max": (max(ages, default=0), 1),
        "rollout/mixed_versions_fraction": (mixed, len(responses)),
    }
