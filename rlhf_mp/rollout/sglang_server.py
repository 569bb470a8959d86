"""One SGLang server as a child process: its command line, its environment, its life."""

import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_mp.cluster import guard
from rlhf_mp.cluster.processes import alive_in_group, is_resource_tracker
from rlhf_mp.cluster.shared_memory import remove_named, untidy_files
from rlhf_mp.config.schema import RolloutConfig
from rlhf_mp.errors import EngineError
from rlhf_mp.rollout import served_adapter
from rlhf_mp.rollout.served_adapter import AdapterPlan
from rlhf_mp.rollout.sglang_plugin import ACTIVE

PR_SET_PDEATHSIG = 1
LOG_TAIL = 30
# Variables a server may inherit. Everything else, the launcher's RANK and MASTER_* above all, stays outside.
INHERITED = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "VIRTUAL_ENV", *guard.INHERITED)
INHERITED_PREFIXES = ("LC_", "LD_", "HF_", "SGLANG_", "NCCL_", "GLOO_", "CUDA_HOME", "CUDA_PATH", "TRITON_", "TVM_")
TRACKER_S = 2.0
"""Python's resource trackers remove the semaphores of processes that were killed, and end then by themselves."""
GRPC_OFFSET = 10_000  # the server also listens at port + 10000
WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a cluster's proxy can't reach engines


Kind = Literal["engine", "reward_server"]
"""Engines sample from the policy, reward servers score with the reward model."""


@dataclass(frozen=True)
class ServerPlan:
    """Everything that decides the command line of one server, or of its part on one machine."""

    index: int
    model_path: str
    on_cpu: bool
    gpus: tuple[int | str, ...]  # ids on its node, as CUDA_VISIBLE_DEVICES has them; empty on CPU
    seed: int
    node: int = 0  # number of its machine
    cores: tuple[int, ...] = ()  # all of its processes keep to these; empty: to any
    kind: Kind = "engine"
    part: int = 0  # of a server that lies on several machines; the first one answers
    num_parts: int = 1

    @property
    def name(self) -> str:
        return server_name(self.kind, self.index)


def server_name(kind: Kind, index: int) -> str:
    """What people read of a server; it is the so-manieth of its kind."""
    return f"SGLang {kind.replace('_', ' ')} {index}"


@dataclass(frozen=True)
class Address:
    """How to reach a server."""

    url: str
    key: str  # bearer token of every request; weight updates included
    adapter: str = ""  # beside its model, for all requests

    @property
    def asked(self) -> dict[str, str]:
        """What a request says of who shall answer."""
        return {"lora_path": self.adapter} if self.adapter else {}


def server_arguments(plan: ServerPlan, rollout: RolloutConfig, context: int, meet: str = "") -> list[str]:
    """SGLang's arguments from ours; ``engine_args`` come last and win. False and null leave an option out.

    Args:
        context: tokens of the longest prompt and response together.
        meet: host and port where the parts of a server of several machines find each other.
    """
    arguments: dict[str, Any] = {
        "model-path": plan.model_path,
        "tp-size": rollout.tensor_model_parallel_size,
        "dtype": rollout.dtype,  # always given: SGLang's "auto" turns float32 checkpoints into float16
        "context-length": rollout.max_model_len,
        "max-running-requests": rollout.max_num_seqs,
        "max-prefill-tokens": rollout.max_num_batched_tokens,
        "chunked-prefill-size": rollout.max_num_batched_tokens if rollout.enable_chunked_prefill else -1,
        "random-seed": plan.seed,
        "skip-tokenizer-init": True,
        "log-level": "warning",
    }
    if plan.num_parts > 1:
        arguments |= {"nnodes": plan.num_parts, "node-rank": plan.part, "dist-init-addr": meet}
    if rollout.max_total_tokens is not None:
        arguments["max-total-tokens"] = rollout.max_total_tokens
    if plan.on_cpu:
        # The fraction only has to leave room: the number of slots below is what bounds the cache.
        arguments |= {"device": "cpu", "attention-backend": "torch_native", "mem-fraction-static": 0.9}
        arguments["sleep-on-idle"] = True  # an idle engine would otherwise spin on a core that trains meanwhile
        # Without this the KV cache takes a share of the machine's memory: enough for every slot at full length.
        arguments.setdefault("max-total-tokens", rollout.max_num_seqs * (context + 1))
    else:
        arguments["mem-fraction-static"] = rollout.gpu_memory_utilization
        arguments["disable-cuda-graph"] = rollout.enforce_eager
        arguments["enable-memory-saver"] = rollout.free_cache_engine
        if rollout.cudagraph_capture_sizes is not None:
            arguments["cuda-graph-bs"] = rollout.cudagraph_capture_sizes
        if rollout.reproducible:
            arguments["sampling-backend"] = "pytorch"  # flashinfer's sampler takes no seeds
    for name, value in rollout.engine_args.items():
        arguments[name.replace("_", "-")] = value
    return flags(arguments)


def flags(arguments: dict[str, Any]) -> list[str]:
    """A command line's. False and None leave an option out."""
    return [part for name, value in arguments.items() for part in _flag(name, value)]


def _flag(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    if value is False or value is None:
        return []
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}", json.dumps(value) if isinstance(value, dict) else str(value)]


def server_environment(plan: ServerPlan, tensor_parallel: int, inherited: dict[str, str]) -> dict[str, str]:
    """A server's whole environment, built from nothing."""
    kept = {k: v for k, v in inherited.items() if k in INHERITED or k.startswith(INHERITED_PREFIXES)}
    own = {ACTIVE: "1", "PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    if plan.kind == "reward_server":  # a whole sequence is its input, and SGLang wants context left after an input
        own["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    if not plan.on_cpu:
        return kept | own | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, plan.gpus))}
    own |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
    if tensor_parallel > 1:  # one part per worker; SGLang refuses the variable when there is one
        cores = plan.cores or sorted(os.sched_getaffinity(0))
        own["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[i % len(cores)]) for i in range(tensor_parallel))
    return kept | own


def free_port() -> int:
    """A port that is free now and whose gRPC sibling is too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("", 0))
            port = first.getsockname()[1]
            if port + GRPC_OFFSET > 65_535:
                continue
            try:
                second.bind(("", port + GRPC_OFFSET))
            except OSError:
                continue
            return port


def private_file(content: dict[str, str]) -> Path:
    """A YAML file that only this user can read: what is on a command line, everybody on the machine can."""
    handle, name = tempfile.mkstemp(suffix=".yaml")  # TMPDIR is the job's folder, which goes with the job
    with os.fdopen(handle, "w") as out:
        json.dump(content, out)
    return Path(name)


def _begin(cores: tuple[int, ...]) -> None:
    """In the child, before the server: end with the parent, keep to ``cores``."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if cores:
        os.sched_setaffinity(0, cores)


class SGLangServer:
    """Starts on construction. The process that made it must keep the thread that did: Linux ends the child with it."""

    def __init__(
        self,
        plan: ServerPlan,
        rollout: RolloutConfig,
        context: int,
        log_file: Path,
        host: str = "127.0.0.1",
        adapter: AdapterPlan | None = None,
        meet: str = "",
    ):
        """
        Args:
            meet: as ``server_arguments`` has it.
            adapter: that swaps replace, beside a base that stays; None: swaps bring whole models.
        """
        self.name = plan.name
        self.log_file = log_file
        url = f"http://{host}:{free_port()}"
        self.address = Address(url, secrets.token_hex(16), served_adapter.NAME if adapter else "")
        port = url.rsplit(":", 1)[1]
        self._keys = private_file({"api-key": self.address.key, "admin-api-key": self.address.key})
        command = [sys.executable, "-m", "sglang.launch_server", *server_arguments(plan, rollout, context, meet)]
        self._adapter = Path(tempfile.mkdtemp(prefix="adapter_")) if adapter else None
        if adapter:
            served_adapter.write_empty(adapter, self._adapter)
            command += flags(served_adapter.adapter_arguments(adapter, self._adapter, plan.on_cpu))
        command += ["--host", host, "--port", port, "--config", str(self._keys)]
        environment = server_environment(plan, rollout.tensor_model_parallel_size, dict(os.environ))
        log_file.parent.mkdir(parents=True, exist_ok=True)
        with log_file.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=lambda: _begin(plan.cores),
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Return when the server answers.

        Raises:
            EngineError: it exited, or is not up after ``timeout_s``.
        """
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            self.check_alive()
            if time.monotonic() > deadline:
                key = "actor_rollout_ref.rollout.startup_timeout_s"
                raise EngineError(self.name, f"not up after {timeout_s:g} s ({key})", self.log_tail())
            time.sleep(0.2)
        self._keys.unlink(missing_ok=True)
        if self._adapter:
            shutil.rmtree(self._adapter, ignore_errors=True)

    def _answers(self) -> bool:
        """It samples; and it knows our key, so it is not another server that has got the port meanwhile."""
        return self._asked("/health_generate") and self._asked("/server_info")

    def _asked(self, path: str) -> bool:
        request = urllib.request.Request(
            self.address.url + path, headers={"Authorization": f"Bearer {self.address.key}"}
        )
        try:
            with WITHOUT_PROXY.open(request, timeout=10) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def check_alive(self) -> None:
        if (code := self.process.poll()) is not None:
            raise EngineError(self.name, describe_exit(code), self.log_tail())

    def log_tail(self, num_lines: int = LOG_TAIL) -> str:
        lines = self.log_file.read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def stop(self, grace_s: float = 5.0) -> None:
        """Ask the server and its workers to end; what is left after ``grace_s`` is killed."""
        files = untidy_files(alive_in_group(self.process.pid))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(grace_s)
        self.kill()
        remove_named(files)

    def kill(self, patience_s: float = 10.0) -> None:
        """End the server and its workers at once, stopped or hanging ones too; a GPU's memory is free afterwards."""
        files = untidy_files(alive_in_group(self.process.pid))
        began = time.monotonic()
        while (left := alive_in_group(self.process.pid)) and (elapsed := time.monotonic() - began) < patience_s:
            trackers = set(filter(is_resource_tracker, left)) if elapsed < TRACKER_S else set()
            for pid in sorted(left, key=lambda pid: pid != self.process.pid):  # the server before it sees workers die
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT if pid in trackers else signal.SIGKILL)
            time.sleep(0.05)
        self.process.poll()
        remove_named(files)


def describe_exit(code: int) -> str:
    """A return code in words."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
