"""1 for the reference answer itself, else 0."""

from collections.abc import Sequence

from rlhf_mp.config.schema import RewardConfig
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import rewards


@rewards.register("exact")
class ExactReward:
    """Compares text, apart from white space around it."""

    num_timeouts = 0

    def __init__(self, config: RewardConfig):
        pass  # nothing to configure

    async def score(self, prompt: Prompt, responses: Sequence[str]) -> list[float]:
        return [float(response.strip() == prompt.answer.strip()) for response in responses]

    def close(self) -> None:
        pass  # nothing was started
