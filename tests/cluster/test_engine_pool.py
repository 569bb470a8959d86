"""Engines that die, hang, are slow and come back, on fakes and a clock that jumps: no server, no waiting."""

import asyncio

import pytest

from rlhf_mp.cluster.engine_pool import EnginePool, Rules
from rlhf_mp.errors import EngineError, EngineLost, SyncError
from rlhf_mp.rollout.base import Completion, SamplingParams
from rlhf_mp.rollout.sglang_server import Address

PARAMS = SamplingParams(1.0, 1.0, -1, 8, (1,))
RULES = Rules(max_restarts=2, check_interval_s=10, check_timeout_s=30)
START_S = 15


class JumpingLoop(asyncio.SelectorEventLoop):
    """Time passes only when nobody has anything to do."""

    now = 0.0

    def time(self) -> float:
        return self.now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now = max(self.now, self._scheduled[0]._when)
        super()._run_once()


def played(scene) -> None:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        runner.run(scene())


def now() -> float:
    return asyncio.get_running_loop().time()


class Server:
    """A server and the client's end of it."""

    def __init__(self, version: int = -1, seconds: float = 1.0):
        self.version, self.seconds, self.hangs = version, seconds, False
        self.end = asyncio.get_running_loop().create_future()
        self.asked, self.cancelled, self.closed, self.checks = [], 0, False, 0

    def die(self, how: str = "was killed by SIGKILL") -> None:
        if not self.end.done():
            self.end.set_result(how)

    async def generate(self, prompt_ids, params, seeds):
        self.asked.append((prompt_ids, list(seeds)))
        try:
            await asyncio.wait({self.end}, timeout=self.seconds)
            while self.hangs:
                await asyncio.sleep(1)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.end.done():
            raise EngineLost("engine", "/generate failed: ServerDisconnectedError")
        return [Completion([*prompt_ids, seed], [-0.5] * (len(prompt_ids) + 1), "stop", self.version) for seed in seeds]

    async def check(self, timeout_s):
        self.checks += 1
        if self.hangs:
            await asyncio.sleep(timeout_s)
            raise EngineLost("engine", f"/server_info gave no answer in {timeout_s} s")

    async def close(self):
        self.closed = True


class Host:
    """Starts servers, one after the other; ``refuses`` of them do not come up."""

    def __init__(self, refuses: int = 0):
        self.servers, self.refuses, self.restarts = [Server()], refuses, 0

    @property
    def server(self) -> Server:
        return self.servers[-1]

    async def ended(self) -> str:
        return await asyncio.shield(self.server.end)

    async def restart(self) -> Address:
        self.restarts += 1
        self.server.die("was killed by SIGKILL")  # what is left of it
        await asyncio.sleep(START_S)
        if self.refuses:
            self.refuses -= 1
            raise EngineError("engine", "exited with code 1", "CUDA out of memory")
        self.servers.append(Server())
        return Address("http://again", "key")


def pool_of(*hosts: Host, rules: Rules = RULES, version: int | None = 0) -> EnginePool:
    """All engines live at ``version``; None: no swap yet."""
    indices = {f"SGLang engine {i}": host for i, host in enumerate(hosts)}
    pool = EnginePool(rules, lambda name, address: indices[name].server)
    pool.adopt(hosts, [Address(f"http://{i}", "key") for i in range(len(hosts))])
    if version is not None:
        swap(pool, hosts, version)
    return pool


def swap(pool: EnginePool, hosts, version: int) -> list[int]:
    """To all engines that answer; their numbers."""
    targets = pool.targets()
    for target in targets:
        hosts[target.index].server.version = version
    pool.settle(version, targets)
    return [target.index for target in targets]


async def group(pool: EnginePool, number: int, n: int = 2):
    found = await pool.run(n, lambda engine: engine.generate([number], PARAMS, list(range(n))))
    return [completion.ids for completion in found]


def news(pool: EnginePool) -> list[str]:
    return [pool.news.get_nowait().text for _ in range(pool.news.qsize())]


def test_nothing_is_sampled_before_a_swap_has_proved_the_weights():
    async def scene():
        host = Host()
        pool = pool_of(host, version=None)
        waiting = asyncio.create_task(group(pool, 7))
        await asyncio.sleep(5)
        assert not waiting.done() and host.server.asked == []
        swap(pool, [host], 0)
        assert await waiting == [[7, 0], [7, 1]]

    played(scene)


def test_each_group_goes_to_the_engine_with_the_fewest_responses_in_flight():
    async def scene():
        hosts = [Host(), Host(), Host()]
        pool = pool_of(*hosts)
        sizes = [5, 1, 2, 1, 1, 1]  # 5 | 1 | 2, then to the second (1), the second or third (2), the other
        await asyncio.gather(*(group(pool, i, n) for i, n in enumerate(sizes)))
        assert [sum(len(seeds) for _, seeds in host.server.asked) for host in hosts] == [5, 3, 3]

    played(scene)


def test_groups_of_an_engine_that_dies_are_done_again_elsewhere_with_the_same_seeds():
    async def scene():
        hosts = [Host(), Host()]
        pool = pool_of(*hosts)
        asyncio.get_running_loop().call_later(0.5, hosts[0].server.die)
        found = await asyncio.gather(*(group(pool, i) for i in range(6)))
        assert found == [[[i, 0], [i, 1]] for i in range(6)]  # none lost, none twice, all in their places
        first, second = (host.servers[0].asked for host in hosts)
        assert sorted(prompt for (prompt,), _ in first) == [0, 2, 4]
        assert sorted(prompt for (prompt,), _ in second) == [0, 1, 2, 3, 4, 5]
        assert {tuple(seeds) for _, seeds in first + second} == {(0, 1)}
        assert pool.metrics()["rollout/resampled_groups"] == (3.0, 1)
        assert pool.metrics()["rollout/resampled_groups"] == (0.0, 1)  # since it was asked last

    played(scene)


def test_the_reason_is_the_death_and_not_the_request_that_failed_of_it():
    async def scene():
        hosts = [Host(), Host()]
        pool = pool_of(*hosts)
        server = hosts[0].server
        server.generate = lambda *_: failing()
        asyncio.get_running_loop().call_later(1.0, lambda: server.die("exited with code 3"))

        async def failing():
            raise EngineLost("engine", "/generate failed: ClientOSError")

        await group(pool, 0)
        await asyncio.sleep(2)
        assert news(pool) == ["exited with code 3; restart 1 of 2 (trainer.max_engine_restarts)"]
        assert server.closed

    played(scene)


def test_an_engine_that_comes_back_serves_from_the_next_swap_on_and_not_before():
    async def scene():
        hosts = [Host(), Host()]
        pool = pool_of(*hosts)
        hosts[0].server.die()
        await asyncio.sleep(60)
        await asyncio.gather(*(group(pool, i) for i in range(4)))
        assert hosts[0].server.asked == [] and hosts[0].restarts == 1
        assert swap(pool, hosts, 1) == [0, 1]
        await asyncio.gather(*(group(pool, i) for i in range(4)))
        assert len(hosts[0].server.asked) == 2
        counts = pool.metrics()
        assert counts["rollout/engine_restarts"] == (1.0, 1)
        assert counts["rollout/engine_out_s"][0] == pytest.approx(61)  # until the swap; the groups took one
        assert news(pool)[1].startswith("answers again after restart 1, 15 s later")

    played(scene)


def test_sampling_without_any_engine_waits_and_asks_for_a_swap_once_one_is_back():
    async def scene():
        host = Host()
        pool = pool_of(host)
        asyncio.get_running_loop().call_later(0.5, host.server.die)
        sampling, asked = asyncio.create_task(group(pool, 3)), asyncio.create_task(pool.swap_needed())
        await asyncio.sleep(10)
        assert not asked.done()  # it is starting
        await asyncio.sleep(10)
        assert asked.done() and not sampling.done()
        swap(pool, [host], 0)
        assert await sampling == [[3, 0], [3, 1]]
        assert host.server.asked == [([3], [0, 1])]

    played(scene)


def test_no_swap_is_asked_for_while_another_engine_serves_or_nobody_samples():
    async def scene():
        hosts = [Host(), Host()]
        pool = pool_of(*hosts)
        asked = asyncio.create_task(pool.swap_needed())
        hosts[0].server.die()
        await asyncio.gather(*(group(pool, i) for i in range(50)))
        hosts[1].server.die()
        await asyncio.sleep(100)
        assert not asked.done()
        waiting = asyncio.create_task(group(pool, 0))
        await asyncio.sleep(1)
        assert asked.done()
        waiting.cancel()

    played(scene)


def test_an_engine_that_hangs_is_found_by_its_checks_killed_and_replaced():
    async def scene():
        hosts = [Host(), Host()]
        pool = pool_of(*hosts)
        stuck = hosts[0].server
        stuck.hangs = True
        began = now()
        assert await asyncio.gather(*(group(pool, i) for i in range(4))) == [[[i, 0], [i, 1]] for i in range(4)]
        assert now() - began <= 10 + 30 + 2  # interval, time-out, a second of work on the other engine
        assert stuck.cancelled == 2
        await asyncio.sleep(30)
        assert news(pool)[0].startswith("/server_info gave no answer in 30 s; restart 1 of 2")
        assert hosts[0].restarts == 1 and hosts[1].server.checks > 0 and hosts[1].restarts == 0

    played(scene)


def test_what_an_engine_does_during_a_swap_is_not_for_the_checks_to_judge():
    async def scene():
        host = Host()
        pool = pool_of(host)
        await asyncio.sleep(9)
        targets = pool.targets()
        host.server.hangs = True  # loading weights, say
        await asyncio.sleep(500)
        host.server.hangs = False
        pool.settle(1, targets)
        await asyncio.sleep(100)
        assert host.restarts == 0
        host.server.hangs = True  # asked before the swap, the time-out is after it
        await asyncio.sleep(15)
        pool.settle(2, pool.targets())
        host.server.hangs = False
        await asyncio.sleep(100)
        assert host.restarts == 0

    played(scene)


def test_an_engine_lost_in_a_swap_is_left_out_of_it():
    async def scene():
        hosts = [Host(), Host()]
        pool = pool_of(*hosts)
        first, second = pool.targets()
        pool.lost(0, 0, "/update_weights_from_tensor gave no answer")
        pool.lost(0, 0, "/continue_generation gave no answer")  # the same loss
        hosts[1].server.version = 1
        pool.settle(1, [first, second])  # whatever the sender believes
        await asyncio.gather(*(group(pool, i) for i in range(4)))
        await asyncio.sleep(5)
        assert len(hosts[0].servers[0].asked) == 0 and hosts[0].restarts == 1

    played(scene)


def test_a_loss_of_an_earlier_server_does_not_touch_the_one_that_runs_now():
    async def scene():
        host = Host()
        pool = pool_of(host)
        host.server.die()
        await asyncio.sleep(20)
        pool.lost(0, 0, "too late")
        assert [target.start for target in pool.targets()] == [1]

    played(scene)


def test_a_start_that_fails_counts_and_is_tried_again():
    async def scene():
        host = Host(refuses=1)
        pool = pool_of(host)
        host.server.die()
        await asyncio.sleep(60)
        assert [text.split(";")[0] for text in news(pool)[:2]] == ["was killed by SIGKILL", "exited with code 1"]
        assert [target.start for target in pool.targets()] == [2]

    played(scene)


@pytest.mark.parametrize(
    ("allowed", "text"),
    [
        (0, "was killed by SIGKILL"),
        (2, "was killed by SIGKILL, after 2 restart(s) (trainer.max_engine_restarts)"),
    ],
)
def test_once_its_restarts_are_used_up_an_engines_end_is_the_runs(allowed, text):
    async def scene():
        hosts = [Host(), Host()]
        pool = pool_of(*hosts, rules=Rules(allowed, 10, 30))
        for _ in range(allowed):
            hosts[0].server.die()
            await asyncio.sleep(20)
            swap(pool, hosts, 0)
        news(pool)
        began = now()
        hosts[0].server.die()
        last = await pool.news.get()
        assert (last.index, last.text, last.fatal, last.start) == (0, text, True, allowed)
        assert now() - began < 2
        with pytest.raises(EngineError, match=r"SGLang engine 0: was killed by SIGKILL"):
            await group(pool, 1)
        assert hosts[0].restarts == allowed

    played(scene)


def test_groups_that_wait_hear_of_the_end_too():
    async def scene():
        host = Host(refuses=2)
        pool = pool_of(host)
        host.server.die()
        with pytest.raises(EngineError, match="exited with code 1, after 2 restart"):
            await group(pool, 1)

    played(scene)


def test_a_refusal_is_no_loss_and_is_raised_as_itself():
    async def scene():
        host = Host()
        pool = pool_of(host)

        async def refused(engine):
            raise EngineError("engine", "/generate answered 400: too long")

        with pytest.raises(EngineError, match="answered 400"):
            await pool.run(1, refused)
        await asyncio.sleep(60)
        assert host.restarts == 0

    played(scene)


def test_an_answer_from_older_weights_than_were_proved_is_an_error():
    async def scene():
        host = Host()
        pool = pool_of(host, version=4)
        host.server.version = 3
        with pytest.raises(SyncError, match="SGLang engine 0 answered from weight version 3, not 4"):
            await group(pool, 1)

    played(scene)


def test_who_stops_waiting_for_a_group_stops_its_work():
    async def scene():
        host = Host()
        pool = pool_of(host)
        work = asyncio.create_task(group(pool, 1))
        await asyncio.sleep(0.5)
        work.cancel()
        await asyncio.sleep(0.1)
        assert host.server.cancelled == 1 and pool.members[0].in_flight == 0

    played(scene)
