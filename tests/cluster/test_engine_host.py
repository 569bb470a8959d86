"""The owner of a server, with a program in its place: restarts, their logs, and what is heard of an owner that died."""

import asyncio
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from rlhf_mp.cluster.bootstrap import ActorGone
from rlhf_mp.cluster.engine_host import EngineHost, RemoteHost, engine_log
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.errors import EngineError
from rlhf_mp.rollout import sglang_server
from rlhf_mp.rollout.sglang_server import ServerPlan

ANSWERING = f"""#!{sys.executable}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
print("I am", os.getpid(), flush=True)
marker = os.path.join(os.path.dirname(__file__), "taken")
if os.path.exists(marker):
    os.remove(marker)
    sys.exit("[Errno 98] error while attempting to bind on address: address already in use")
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Healthy).serve_forever()
"""
PLAN = ServerPlan(index=2, model_path="m", on_cpu=True, gpus=(), seed=1)


@pytest.fixture
def make(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text(ANSWERING)
    program.chmod(0o755)
    monkeypatch.setattr(sglang_server.sys, "executable", str(program))
    tree = {"data": {"train_files": "t"}, "actor_rollout_ref": {"model": {"path": "m", "dtype": "float32"}}}
    made = []

    def make(plan=PLAN, parts=()):
        made.append(EngineHost(plan, config_from_dict(tree), tmp_path / "logs", "127.0.0.1", parts))
        return made[-1]

    yield make
    for host in made:
        host.server.kill()


@pytest.fixture
def host(make):
    return make()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_restart_ends_what_is_left_and_starts_another_server_with_a_log_of_its_own(host, tmp_path, how):
    async def run():
        first = await host.ready()
        ended = asyncio.create_task(host.ended())
        old = host.server.process
        os.kill(old.pid, getattr(signal, how))
        second = await host.restart()
        assert await ended == "was killed by SIGKILL"
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}  # Python complains of one that nobody waits for
        assert second.key != first.key and host.server.process.pid != old.pid
        logs = [engine_log(tmp_path / "logs", 2, start) for start in (0, 1)]
        assert [log.name for log in logs] == ["engine_2.log", "engine_2_restart_1.log"]
        assert [log.read_text().split()[2] for log in logs] == [str(old.pid), str(host.server.process.pid)]

    asyncio.run(run())


def test_a_port_that_somebody_took_meanwhile_costs_no_restart(host, tmp_path):
    async def run():
        await host.ready()
        (tmp_path / "taken").touch()
        before = host.server.process.pid
        address = await host.restart()
        assert address == host.server.address and host.server.process.pid != before and host.num_restarts == 1
        assert engine_log(tmp_path / "logs", 2, 1).read_text().count("I am") == 2

    asyncio.run(run())


class Run:
    """As a reference of Ray's: it goes on when somebody no longer waits for it."""

    def __init__(self):
        self.end = asyncio.get_running_loop().create_future()

    def __await__(self):
        return asyncio.shield(self.end).__await__()


class Part:
    """The owner of another machine's part, as its handle shows it: every run ends when the test says so."""

    def __init__(self):
        self.runs, self.asked, self.noted = [], [], 0
        self.run = self.note_shared_memory = self

    def remote(self, *words):
        if not words:
            self.noted += 1
            return None
        self.asked.append(words)
        self.runs.append(Run())
        return self.runs[-1]


OF_TWO_MACHINES = replace(PLAN, num_parts=2)


def test_the_end_of_a_part_is_the_end_of_the_server_and_a_restart_starts_both(make):
    async def run():
        host = make(OF_TWO_MACHINES, [part := Part()])
        await host.ready()
        command = Path(f"/proc/{host.server.process.pid}/cmdline").read_text().split("\0")
        (start, meet), ended = part.asked[0], asyncio.create_task(host.ended())
        assert start == 0 and command[command.index("--dist-init-addr") + 1] == meet and part.noted == 1
        assert [command[command.index(f"--{name}") + 1] for name in ("nnodes", "node-rank")] == ["2", "0"]
        part.runs[0].end.set_result("was killed by SIGKILL")
        assert re.match(r"its part on machine 2 of 2 was killed by SIGKILL .*engine_2_machine_2\.log\)", await ended)
        old = host.server.process
        await host.restart()
        assert old.poll() is not None and host.server.process.poll() is None
        assert part.asked[1][0] == 1 and not part.runs[1].end.done()

    asyncio.run(run())


def test_a_part_that_does_not_start_ends_the_waiting_at_once(make, tmp_path):
    (tmp_path / "program").write_text(ANSWERING.replace("self.send_response(200)", "self.send_response(503)"))

    async def run():
        host = make(OF_TWO_MACHINES, [part := Part()])
        ready = asyncio.create_task(host.ready())
        await asyncio.sleep(0.5)
        part.runs[0].end.set_exception(ActorGone("actor died"))
        with pytest.raises(EngineError, match="SGLang engine 2: its part on machine 2 of 2 ended: the process that"):
            await ready
        assert host.server.process.poll() is not None

    asyncio.run(run())


@pytest.mark.parametrize("signum", [0, signal.SIGSTOP])
def test_a_server_that_is_killed_leaves_no_semaphore(make, tmp_path, signum):
    locked = "import multiprocessing\nlock = multiprocessing.get_context('spawn').Lock()\nprint(lock._semlock.name)\n"
    (tmp_path / "program").write_text(ANSWERING.replace("import os, sys\n", "import os, sys\n" + locked))

    async def run():
        host = make()
        await host.ready()
        semaphore = Path("/dev/shm") / f"sem.{host.server.log_tail().split()[0].removeprefix('/')}"
        assert semaphore.exists()
        os.killpg(host.server.process.pid, signum)
        host.server.kill()
        assert host.server.process.wait(1) == -signal.SIGKILL
        assert not semaphore.exists()

    asyncio.run(run())


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_server_that_ends_leaves_none_of_its_shared_memory(make, tmp_path, end):
    name = f"sgl_shm_mq_{uuid4().hex}"
    mapped = (
        f"import mmap\nfile = open('/dev/shm/{name}', 'wb+')\nfile.truncate(8)\nkept = mmap.mmap(file.fileno(), 8)\n"
    )
    (tmp_path / "program").write_text(ANSWERING.replace("import os, sys\n", "import os, sys\n" + mapped))

    async def run():
        host = make()
        await host.ready()
        assert (Path("/dev/shm") / name).exists()
        getattr(host.server, end)()
        assert not (Path("/dev/shm") / name).exists()

    asyncio.run(run())


def test_a_port_that_is_taken_at_the_first_start_is_not_told_as_an_end(make, tmp_path):
    (tmp_path / "taken").touch()

    async def run():
        host = make()
        ended = asyncio.create_task(host.ended())
        await host.ready()
        assert not ended.done() and engine_log(tmp_path / "logs", 2, 0).read_text().count("I am") == 2
        host.server.kill()
        assert await ended == "was killed by SIGKILL"

    asyncio.run(run())


def test_an_owner_that_died_is_an_end_of_its_engine_and_cannot_restart_it(monkeypatch):
    class Call:
        def remote(self):
            return None

    class Dead:
        ended = restart = Call()

    async def gone(reference):
        raise ActorGone("actor died")

    monkeypatch.setattr("rlhf_mp.cluster.engine_host.awaited", gone)
    host = RemoteHost(2, Dead())
    assert asyncio.run(host.ended()) == "the process that owns it was killed or crashed"
    with pytest.raises(EngineError, match="SGLang engine 2: the process that owns it was killed or crashed"):
        asyncio.run(host.restart())
