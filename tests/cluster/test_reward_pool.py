"""A reward model's servers on fakes and a clock that jumps: no swap makes them live, and a lost one comes back."""

import asyncio

import pytest
from test_engine_pool import RULES, START_S, Host, now, played

from rlhf_mp.cluster.engine_pool import Rules
from rlhf_mp.cluster.reward_pool import RewardPool
from rlhf_mp.errors import EngineError
from rlhf_mp.rollout.sglang_server import Address


def pool_of(*hosts: Host, rules: Rules = RULES) -> RewardPool:
    by_name = {f"SGLang reward server {i}": host for i, host in enumerate(hosts)}
    pool = RewardPool(rules, lambda name, address: by_name[name].server, asyncio.Queue())
    pool.adopt(hosts, [Address(f"http://{i}", "key") for i in range(len(hosts))])
    return pool


async def score(pool: RewardPool, number: int = 1):
    """By a fake that answers after a second, with its own ``generate``."""
    return await pool.run(1, lambda server: server.generate([number], None, [7]))


def test_servers_are_used_from_the_start_and_the_idle_one_first():
    async def scene():
        hosts = [Host(), Host()]
        pool = pool_of(*hosts)
        await asyncio.gather(*(score(pool, number) for number in range(4)))
        assert [len(host.server.asked) for host in hosts] == [2, 2]
        assert now() == 1 and pool.news.empty()

    played(scene)


def test_what_a_lost_server_was_scoring_is_scored_when_it_is_back():
    async def scene():
        host = Host()
        pool = pool_of(host)
        scoring = asyncio.create_task(score(pool))
        await asyncio.sleep(0.5)
        host.server.die()
        assert [c.ids for c in await scoring] == [[1, 7]]
        assert host.restarts == 1 and now() == pytest.approx(0.5 + START_S + 1)
        news = [pool.news.get_nowait() for _ in range(2)]
        assert [n.name for n in news] == ["SGLang reward server 0"] * 2
        assert news[0].restarting and "was killed by SIGKILL; restart 1 of 2" in news[0].text
        assert news[1].text == "answers again after restart 1, 15 s later"
        assert pool.metrics() == {"reward_model/restarts": (1, 1), "reward_model/out_s": (START_S, 1)}
        assert pool.metrics() == {"reward_model/restarts": (0, 1), "reward_model/out_s": (0, 1)}

    played(scene)


def test_a_server_that_never_comes_back_ends_the_run_by_its_name():
    async def scene():
        pool = pool_of(Host(refuses=9), rules=Rules(1, 10, 30))
        pool.members[0].host.server.die()
        with pytest.raises(EngineError, match="SGLang reward server 0"):
            await score(pool)
        assert [pool.news.get_nowait().fatal for _ in range(pool.news.qsize())][-1]

    played(scene)
