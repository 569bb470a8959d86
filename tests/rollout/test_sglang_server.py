"""A server's command line, environment and life. The processes here are real, but scripts instead of SGLang."""

import os
import signal
import socket
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_mp.cluster.first_failure import wait_until
from rlhf_mp.cluster.processes import stat
from rlhf_mp.config.schema import RolloutConfig
from rlhf_mp.errors import EngineError
from rlhf_mp.rollout import sglang_server
from rlhf_mp.rollout.sglang_server import (
    GRPC_OFFSET,
    ServerPlan,
    SGLangServer,
    describe_exit,
    free_port,
    server_arguments,
    server_environment,
)

CPU = ServerPlan(index=3, model_path="models/m", on_cpu=True, gpus=(), seed=17)
GPU = replace(CPU, on_cpu=False, gpus=(4, 5))
ROLLOUT = {"dtype": "bfloat16", "max_model_len": 96}  # what loading a config always fills in


def options(plan: ServerPlan, context: int = 96, **knobs) -> dict[str, list[str]]:
    """The command line as {option: values}."""
    parsed: dict[str, list[str]] = {}
    for part in server_arguments(plan, RolloutConfig(**ROLLOUT | knobs), context):
        if part.startswith("--"):
            assert part not in parsed, f"{part} is given twice"
            parsed[part] = []
        else:
            parsed[[*parsed][-1]].append(part)
    return parsed


@pytest.mark.parametrize(
    ("knobs", "option", "values"),
    [
        ({"dtype": "float32"}, "--dtype", ["float32"]),
        ({"tensor_model_parallel_size": 2}, "--tp-size", ["2"]),
        ({"max_model_len": 4096}, "--context-length", ["4096"]),
        ({"max_num_seqs": 12}, "--max-running-requests", ["12"]),
        ({"max_num_batched_tokens": 640}, "--max-prefill-tokens", ["640"]),
        ({"max_num_batched_tokens": 640}, "--chunked-prefill-size", ["640"]),
        ({"enable_chunked_prefill": False}, "--chunked-prefill-size", ["-1"]),
        ({"max_total_tokens": 5000}, "--max-total-tokens", ["5000"]),
        ({"engine_args": {"kv_cache_dtype": "fp8_e5m2"}}, "--kv-cache-dtype", ["fp8_e5m2"]),
    ],
)
@pytest.mark.parametrize("plan", [CPU, GPU], ids=["cpu", "gpu"])
def test_a_knob_becomes_its_option_on_every_device(plan, knobs, option, values):
    assert options(plan, **knobs)[option] == values


@pytest.mark.parametrize(
    ("knobs", "option", "values"),
    [
        ({"gpu_memory_utilization": 0.35}, "--mem-fraction-static", ["0.35"]),
        ({"enforce_eager": True}, "--disable-cuda-graph", []),
        ({"enforce_eager": False}, "--disable-cuda-graph", None),
        ({"cudagraph_capture_sizes": [1, 2, 8]}, "--cuda-graph-bs", ["1", "2", "8"]),
        ({"cudagraph_capture_sizes": None}, "--cuda-graph-bs", None),
        ({"reproducible": True}, "--sampling-backend", ["pytorch"]),
        ({"reproducible": False}, "--sampling-backend", None),
        ({"max_total_tokens": None}, "--max-total-tokens", None),
    ],
)
def test_a_knob_of_gpus_becomes_its_option_there(knobs, option, values):
    assert options(GPU, **knobs).get(option) == values


def test_the_plan_says_which_model_and_which_seed():
    found = options(GPU)
    assert (found["--model-path"], found["--random-seed"]) == (["models/m"], ["17"])


def test_on_cpu_the_cache_holds_every_slot_at_full_length_and_no_more():
    """Left out, SGLang would take a share of the whole machine's memory."""
    assert options(CPU, context=40, max_num_seqs=8)["--max-total-tokens"] == ["328"]  # 8 * (40 + 1)
    assert options(CPU)["--device"] == ["cpu"]
    assert "--device" not in options(GPU)


def test_engine_args_win_over_ours_in_either_spelling():
    assert options(GPU, engine_args={"mem_fraction_static": 0.8})["--mem-fraction-static"] == ["0.8"]
    assert options(GPU, engine_args={"mem-fraction-static": 0.8})["--mem-fraction-static"] == ["0.8"]


def test_engine_args_of_every_type():
    found = options(GPU, engine_args={"a": True, "log_level": "info", "c": [1, 2], "d": {"x": 1.5}, "e": 3})
    assert (found["--a"], found["--log-level"], found["--c"], found["--d"], found["--e"]) == (
        [], ["info"], ["1", "2"], ['{"x": 1.5}'], ["3"],
    )  # fmt: skip


@pytest.mark.parametrize("nothing", [False, None])
def test_engine_args_can_take_an_option_of_ours_away(nothing):
    assert "--skip-tokenizer-init" in options(GPU)
    assert "--skip-tokenizer-init" not in options(GPU, engine_args={"skip_tokenizer_init": nothing})


def test_every_knob_of_the_engine_changes_the_command_line():
    """But those that the scheduler sends with each request, or that decide about servers as such."""
    elsewhere = {
        "name", "n", "temperature", "top_p", "top_k", "num_engines", "nnodes", "allow_cross_node", "startup_timeout_s",
        "request_timeout_s", "val_kwargs", "multi_turn", "max_staleness", "over_sample_rate",
        "health_check_interval_s", "health_check_timeout_s",
    }  # fmt: skip
    changed = {
        "reproducible": False, "dtype": "float32", "tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.1,
        "max_num_seqs": 1, "max_num_batched_tokens": 1, "max_model_len": 1, "max_total_tokens": 1,
        "enable_chunked_prefill": False, "enforce_eager": True, "cudagraph_capture_sizes": [1], "engine_args": {"a": 1},
        "free_cache_engine": True,
    }  # fmt: skip
    for name in set(RolloutConfig.__dataclass_fields__) - elsewhere:
        assert options(GPU, **{name: changed[name]}) != options(GPU), name


def test_the_environment_is_built_from_nothing():
    launched = {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "0", "OMP_NUM_THREADS": "8", "HTTP_PROXY": "http://proxy", "PATH": "/bin",
        "NCCL_DEBUG": "INFO", "LD_LIBRARY_PATH": "/lib", "RLHF_MP_JOB": "j", "SECRET": "s",
    }  # fmt: skip
    found = server_environment(GPU, 2, launched)
    kept = {"PATH", "NCCL_DEBUG", "LD_LIBRARY_PATH", "RLHF_MP_JOB"}
    assert {name for name in launched if name in found} == kept | {"CUDA_VISIBLE_DEVICES"}
    assert found["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert found["RLHF_MP_ENGINE"] == "1"  # the plugin is inert without it


@pytest.mark.parametrize("workers", [1, 2, 100])
def test_on_cpu_every_worker_has_a_core_of_its_own_while_there_are_enough(workers):
    found = server_environment(CPU, workers, {})
    assert "CUDA_VISIBLE_DEVICES" not in found and found["SGLANG_USE_CPU_ENGINE"] == "1"
    if workers == 1:
        assert "SGLANG_CPU_OMP_THREADS_BIND" not in found
        return
    bound = [int(core) for core in found["SGLANG_CPU_OMP_THREADS_BIND"].split("|")]
    available = os.sched_getaffinity(0)
    assert len(bound) == workers and set(bound) <= available
    assert len(set(bound)) == min(workers, len(available))


def test_a_free_port_can_be_listened_at_and_so_can_its_sibling():
    for _ in range(20):
        port = free_port()
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + GRPC_OFFSET))


@pytest.mark.parametrize(("code", "words"), [(3, "exited with code 3"), (-9, "was killed by SIGKILL")])
def test_an_exit_code_in_words(code, words):
    assert describe_exit(code) == words


HEALTHY = f"""#!{sys.executable}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
keys, port = (sys.argv[sys.argv.index(name) + 1] for name in ("--config", "--port"))
key = json.load(open(keys))["api-key"]
class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.headers["Authorization"] == f"Bearer {{key}}" else 401)
        self.end_headers()
HTTPServer(("127.0.0.1", int(port)), Health).serve_forever()
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Starts a server whose program is a given script."""
    started = []

    def make(script: str) -> SGLangServer:
        program = tmp_path / "program"
        program.write_text(script)
        program.chmod(0o755)
        monkeypatch.setattr(sglang_server.sys, "executable", str(program))
        started.append(SGLangServer(CPU, RolloutConfig(**ROLLOUT), 96, tmp_path / "logs" / "engine_3.log"))
        return started[-1]

    yield make
    for server in started:
        server.stop()


def test_a_server_is_ready_when_it_answers_even_behind_a_proxy(start, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")  # nobody listens there
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server = start(HEALTHY)
    server.wait_ready(20)
    server.check_alive()


def test_another_server_at_its_port_is_not_taken_for_it(start):
    """SGLang answers a health check without a key."""
    stranger = HEALTHY.replace("200 if", '200 if self.path == "/health_generate" or').replace("Bearer", "Bearer other")
    with pytest.raises(EngineError, match="not up after 1.5 s"):
        start(stranger).wait_ready(1.5)


def test_the_key_lies_in_a_private_file_until_the_server_has_read_it(start, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    server = start(HEALTHY)
    assert server.address.key not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
    (file,) = tmp_path.glob("*.yaml")
    assert file.stat().st_mode & 0o077 == 0 and server.address.key in file.read_text()
    server.wait_ready(20)
    assert not file.exists()


def test_a_server_that_ends_is_reported_with_the_end_of_its_log(start):
    server = start("#!/bin/sh\nseq 100 >&2\necho no such model >&2\nexit 3\n")
    with pytest.raises(EngineError) as error:
        server.wait_ready(20)
    first, *tail = str(error.value).splitlines()
    assert first == "SGLang engine 3: exited with code 3"
    assert tail[-1] == "no such model" and "71" not in tail and "72" in tail  # 30 lines


def test_a_server_that_is_never_up_is_an_error_that_names_the_knob(start):
    with pytest.raises(EngineError, match=r"not up after 0\.5 s \(actor_rollout_ref\.rollout\.startup_timeout_s\)"):
        start("#!/bin/sh\nexec sleep 60\n").wait_ready(0.5)


def is_running(pid: int) -> bool:
    state = stat(pid)
    return bool(state) and state[0] not in "ZX"


def test_stopping_ends_the_server_and_what_it_started(start, tmp_path):
    pid_file = tmp_path / "pid"
    script = f"#!/bin/sh\ntrap '' TERM\nsleep 60 &\necho $! > {pid_file}.new; mv {pid_file}.new {pid_file}\nwait\n"
    server = start(script)
    while not pid_file.exists():
        server.check_alive()
    server.stop(grace_s=0.3)
    child = int(pid_file.read_text())
    assert wait_until(lambda: not is_running(child), 10)
    assert server.process.returncode == -signal.SIGKILL  # it did not listen to SIGTERM


def test_killing_ends_what_is_stopped_and_what_a_dead_server_left(start, tmp_path):
    pid_file = tmp_path / "pid"
    server = start(f"#!/bin/sh\nsleep 60 &\necho $! > {pid_file}.new; mv {pid_file}.new {pid_file}\nwait\n")
    while not pid_file.exists():
        server.check_alive()
    child = int(pid_file.read_text())
    os.kill(child, signal.SIGSTOP)
    server.process.kill()
    server.process.wait()
    assert is_running(child)
    server.kill()
    assert not is_running(child)
    server.kill()  # nothing is left to kill
