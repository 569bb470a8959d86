"""A real SGLang server of a reward model: its scores against those of the training ranks, and what it refuses."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
import torch

from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.schema import ActorConfig, ModelConfig, OffloadConfig, RunConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Trajectory
from rlhf_mp.errors import EngineError, EngineLost
from rlhf_mp.models.heads import RewardHead
from rlhf_mp.rollout.reward_server import RewardClient, reward_server_knobs
from rlhf_mp.rollout.sglang_server import ServerPlan, SGLangServer
from rlhf_mp.train.build import make_scorer

LONGEST = 96


def run_config(path: Path, **own) -> RunConfig:
    tree = {
        "data": {"train_files": "t", "max_prompt_length": 32, "max_response_length": LONGEST - 32},
        "actor_rollout_ref": {"model": {"path": "m", "dtype": "float32"}},
        "reward_model": {
            "enable": True,
            "strategy": "sglang",
            "model": {"path": str(path), "dtype": "float32"},
            "rollout": {"max_num_batched_tokens": 512, **own},
        },
    }
    return config_from_dict(tree)


@pytest.fixture(scope="module")
def server(reward_checkpoint, tmp_path_factory):
    config = run_config(reward_checkpoint)
    plan = ServerPlan(0, str(reward_checkpoint), on_cpu=True, gpus=(), seed=1, kind="reward_server")
    log = tmp_path_factory.mktemp("logs") / "reward_server.log"
    started = SGLangServer(plan, reward_server_knobs(config), config.data.max_length, log)
    try:
        started.wait_ready(180)
        yield started
    finally:
        started.stop()


def asked(server, groups, timeout_s: float = 60.0) -> list[list[float]]:
    """Scores of all groups, asked for at the same time."""

    async def scores():
        client = RewardClient(server.name, server.address, timeout_s)
        try:
            return await asyncio.gather(*(client.score(group) for group in groups))
        finally:
            await client.close()

    return asyncio.run(scores())


def sequences(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(2, 14, (length,), generator=generator).tolist() for length in lengths]


def of_the_ranks(path: Path, rows: list[list[int]]) -> list[float]:
    """As the training ranks score them, in one padded micro-batch."""
    scorer = make_scorer(
        ModelConfig(str(path), "float32"),
        ActorConfig(strategy="torch"),
        OffloadConfig(),
        RewardHead(),
        torch.device("cpu"),
    )
    made = [Trajectory(row[:1], row[1:], [0.0] * len(row[1:]), [True] * len(row[1:]), 0, 0, 0, "stop") for row in rows]
    return scorer.score([collate(made)])[0].tolist()


@pytest.mark.engine
def test_a_served_reward_model_gives_the_scores_of_the_training_ranks(server, reward_checkpoint):
    groups = [sequences(3, 40, 17, 8), sequences(LONGEST, 2), sequences(21), sequences(*range(20, 50))]
    expected = [of_the_ranks(reward_checkpoint, group) for group in groups]
    assert max(map(max, expected)) - min(map(min, expected)) > 1  # as large as that, they can differ
    for scores, ranks in zip(asked(server, groups), expected, strict=True):
        assert scores == pytest.approx(ranks, abs=1e-4)
    again = asked(server, groups[::-1])[::-1]  # beside other sequences, and with prefixes that are cached
    assert [x for group in again for x in group] == pytest.approx([x for group in expected for x in group], abs=1e-4)


@pytest.mark.engine
def test_what_the_server_refuses_or_cannot_do_in_time_names_it(server):
    with pytest.raises(EngineError, match="SGLang reward server 0: /classify answered 400.*context length"):
        asked(server, [sequences(LONGEST + 10)])
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(EngineLost, match=r"reward server 0: .*in 1 s \(reward_model.rollout.request_timeout"):
            asked(server, [sequences(5)], timeout_s=1.0)
    finally:
        os.kill(server.process.pid, signal.SIGCONT)
    assert len(asked(server, [sequences(5)])[0]) == 1
    server.kill()
    with pytest.raises(EngineLost, match="SGLang reward server 0: /classify failed"):
        asked(server, [sequences(5)])


@pytest.mark.parametrize("answer", [{"embedding": [None]}, {"embedding": [1.0, 2.0]}, {"error": "x"}])
def test_an_answer_without_one_score_is_an_error(answer, monkeypatch):
    async def posted(self, path, body):
        return [answer]

    monkeypatch.setattr(RewardClient, "_post", posted)
    with pytest.raises(EngineError, match="reward 3: /classify answered no score"):
        asyncio.run(RewardClient("reward 3", None, 1.0).score([[1, 2]]))
