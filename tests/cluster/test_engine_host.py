"""The owner of a server, with a program in its place: restarts, their logs, and what is heard of an owner that died."""

import asyncio
import os
import signal
import sys

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
def host(tmp_path, monkeypatch):
    program = tmp_path / "program"
    program.write_text(ANSWERING)
    program.chmod(0o755)
    monkeypatch.setattr(sglang_server.sys, "executable", str(program))
    tree = {"data": {"train_files": "t"}, "actor_rollout_ref": {"model": {"path": "m", "dtype": "float32"}}}
    made = EngineHost(PLAN, config_from_dict(tree), tmp_path / "logs", "127.0.0.1")
    yield made
    made.server.kill()


@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_a_restart_ends_what_is_left_and_starts_another_server_with_a_log_of_its_own(host, tmp_path, how):
    async def run():
        first = await host.ready()
        ended = asyncio.create_task(host.ended())
        old = host.server.process
        os.kill(old.pid, getattr(signal, how))
        second = await host.restart()
        assert await ended == "was killed by SIGKILL"
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
