"""Episodes on a real SGLang server: the trainer's log-probs of a whole episode against the engine's, turn by turn."""

import asyncio
from dataclasses import replace

import pytest
import torch

from rlhf_mp.config.multi_turn import MultiTurnConfig
from rlhf_mp.config.reward import EnvironmentTerm, JudgeTerm
from rlhf_mp.config.schema import ActorConfig, RolloutConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.environments.base import Turn
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm, load_tokenizer
from rlhf_mp.rewards.base import Response, Setting
from rlhf_mp.rewards.judge import JudgeReward
from rlhf_mp.rewards.rules import EnvironmentReward
from rlhf_mp.rewards.weighted import WeightedReward
from rlhf_mp.rollout.base import FixedEngines, SamplingParams
from rlhf_mp.rollout.episodes import Episodes
from rlhf_mp.rollout.sampler import Sampler
from rlhf_mp.rollout.sglang_client import EngineControl, SGLangClient
from rlhf_mp.rollout.sglang_server import ServerPlan, SGLangServer
from rlhf_mp.rollout.turns import TurnEncoder
from rlhf_mp.train.accumulate import ForwardSettings
from rlhf_mp.train.torch_engine import TorchEngine
from rlhf_mp.weights.base import WeightSync
from rlhf_mp.weights.buckets import Packer
from rlhf_mp.weights.fleet import FixedRoster
from rlhf_mp.weights.tensor import TensorTransport

pytestmark = pytest.mark.engine
CPU = torch.device("cpu")
NUM_EPISODES, NUM_TURNS, TURN_TOKENS = 8, 4, 6


class Echo:
    """Says back the end of what it heard, which the policy reads in its next turn."""

    def __init__(self, fails: bool):
        self.fails = fails

    async def reset(self, prompt):
        return "1+1="

    async def step(self, response):
        if self.fails and len(response) % 2:
            await asyncio.sleep(1000)
        return Turn(f" {response[-3:]}=", reward=0.25)


def episodes_of(server, path, *, fails=False, n=NUM_EPISODES):
    tokenizer = load_tokenizer(str(path))
    stop = tokenizer.eos_token_id
    knobs = MultiTurnConfig(
        enable=True, max_assistant_turns=NUM_TURNS, max_tokens_per_turn=TURN_TOKENS, tool_timeout_s=0.5
    )
    encoder = TurnEncoder(tokenizer, chat=False, stop_token_ids=[stop], max_tokens=5)
    episodes = Episodes(
        lambda: Echo(fails), knobs, encoder, lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    )
    term = EnvironmentTerm("environment", "environment")
    reward = WeightedReward([(term, EnvironmentReward(term, Setting()))])
    prompt = Prompt(0, tokenizer.encode("7+2="), "7+2=", "9")

    async def run():
        client = SGLangClient("engine", server.address, timeout_s=60)
        sampler = Sampler(tokenizer, reward, episodes)
        sampler.connect(FixedEngines([client]))
        try:
            return await sampler.group(prompt, SamplingParams(1.0, 1.0, -1, 60, (stop,)), list(range(n)), 0)
        finally:
            await client.close()

    return asyncio.run(run())


def swap_in(engine, server) -> None:
    transport = TensorTransport(server.workers, gather=lambda own: [own], on_cpu=True)
    control = EngineControl("engine", server.address, timeout_s=60)
    packer = Packer(1_000_000, CPU, shared=True)
    roster, workers = FixedRoster([control]), server.workers
    sync = WeightSync(transport, roster, packer, dtype=torch.float32, is_sender=True, workers_per_engine=workers)
    sync.push(engine.weights(), 1, must_differ=False)


def test_the_trainers_logprobs_of_whole_episodes_are_the_engines(sglang_server, tiny_checkpoint):
    settings = ForwardSettings(CPU, PolicyHead(1.0))
    engine = TorchEngine(load_causal_lm(str(tiny_checkpoint), torch.float32), settings, ActorConfig(), num_steps=1)
    swap_in(engine, sglang_server)  # the server is everybody's, and may hold other weights
    trajectories = episodes_of(sglang_server, tiny_checkpoint)
    batch = collate(trajectories)
    recomputed = engine.score([batch])[0]
    difference = ((recomputed - batch.rollout_logprobs) * batch.mask).abs().max().item()
    assert difference <= 1e-4
    # and the mask matters: what the environment wrote has log-probs too, only not the engine's
    everywhere = engine.score([replace(batch, mask=torch.ones_like(batch.mask))])[0]
    assert ((everywhere - batch.rollout_logprobs) * (1 - batch.mask)).abs().max().item() > 0.1
    assert {t.num_turns for t in trajectories} == {NUM_TURNS} and {t.finish_reason for t in trajectories} == {"turns"}
    assert all(t.reward == NUM_TURNS * 0.25 for t in trajectories)
    assert len({tuple(t.response_ids) for t in trajectories}) == NUM_EPISODES


def test_an_episode_is_the_same_for_its_seed_whatever_else_is_played(sglang_server, tiny_checkpoint):
    alone = episodes_of(sglang_server, tiny_checkpoint, n=1)[0]
    assert episodes_of(sglang_server, tiny_checkpoint)[0].response_ids == alone.response_ids


def test_a_tool_that_never_answers_costs_its_own_episode_alone(sglang_server, tiny_checkpoint):
    trajectories = episodes_of(sglang_server, tiny_checkpoint, fails=True)
    assert all((t.finish_reason == "time") == (t.reward == 0.0) for t in trajectories)  # a failure is worth 0
    assert any(t.finish_reason == "time" for t in trajectories)


def test_our_own_server_can_be_the_judge(tiny_checkpoint, tmp_path, monkeypatch):
    rollout = RolloutConfig(
        dtype="float32", max_model_len=1024, max_num_seqs=8, engine_args={"skip_tokenizer_init": False}
    )
    plan = ServerPlan(index=0, model_path=str(tiny_checkpoint), on_cpu=True, gpus=(), seed=1)
    server = SGLangServer(plan, rollout, context=1024, log_file=tmp_path / "judge.log")
    monkeypatch.setenv("RLHF_MP_JUDGE_KEY", server.address.key)
    term = JudgeTerm(
        "judge", base_url=f"{server.address.url}/v1", model=str(tiny_checkpoint), api_key_env="RLHF_MP_JUDGE_KEY",
        template="{response}", score_pattern=r"(\d)", max_tokens=32, votes=2, temperature=1.0,
    )  # fmt: skip
    judge = JudgeReward(term, Setting(startup_timeout_s=180))

    async def run():
        try:
            note = await judge.start()
            return note, await judge.score(Prompt(0, [1], "1+1=", "2"), [Response("1+1=2"), Response("1+1=3")])
        finally:
            await judge.close()

    try:
        server.wait_ready(180)
        note, scores = asyncio.run(run())
    finally:
        server.stop()
    assert f"at {server.address.url}/v1, 2 vote(s)" in note
    assert all(isinstance(score, float) and 0 <= score <= 0.9 for score in scores)  # the model says random digits
