"""The reward model behind SGLang servers of its own: how such a server is started, and asked for scores."""

from collections.abc import Sequence

from rlhf_mp.config.schema import RolloutConfig, RunConfig
from rlhf_mp.errors import EngineError
from rlhf_mp.rollout.sglang_client import SGLangClient

RESERVED = 7
"""SGLang takes no input that leaves less of its context than this: one token and 6 that it keeps for itself."""


def reward_server_knobs(config: RunConfig) -> RolloutConfig:
    """A reward server's knobs as those of any server. It holds its weights and the cache that one batch takes."""
    own, engines = config.reward_model.rollout, config.actor_rollout_ref.rollout
    context = config.data.max_length + RESERVED
    tokens = max(own.max_num_batched_tokens, context)
    return RolloutConfig(
        dtype=config.reward_model.model.dtype,
        tensor_model_parallel_size=own.tensor_model_parallel_size,
        max_model_len=context,
        max_num_batched_tokens=tokens,
        max_total_tokens=tokens,
        enable_chunked_prefill=False,  # a score is read off the whole sequence
        enforce_eager=True,
        gpu_memory_utilization=0.9,  # only has to leave room: the number of slots is what bounds the cache
        engine_args=own.engine_args,
        startup_timeout_s=engines.startup_timeout_s,
    )


class RewardClient(SGLangClient):
    """Scores from one server. Use it from one event loop."""

    timeout_key = "reward_model.rollout.request_timeout_s"

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """What the reward model says of each sequence of token ids, read off its last token.

        Raises:
            EngineLost: no answer in time, or the server failed.
            EngineError: it refused, or an answer holds no score.
        """
        ids = [list(sequence) for sequence in sequences]
        answers = await self._post("/classify", {"input_ids": ids})
        return [self._score_of(answer) for answer in answers]

    def _score_of(self, answer: dict) -> float:
        """SGLang calls the logits of all labels an embedding."""
        match answer.get("embedding"):
            case [int() | float() as score]:
                return float(score)
        raise EngineError(self.name, f"/classify answered no score: {str(answer)[:200]}")
