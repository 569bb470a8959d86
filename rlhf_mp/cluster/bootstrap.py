"""The only module that imports Ray: it starts and joins the cluster, and turns plain classes into actors."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LAUNCHER_ENV = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "CROSS_RANK", "CROSS_SIZE", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
"""Set by launchers. A raylet started by rank 0 would hand them to engines, which would try to join the trainers."""
NAMESPACE = "rlhf_mp"
SCHEDULER = "scheduler"
OBJECT_STORE_BYTES = 2**30  # one step's trajectories: ids and log-probs, about 15 bytes a token
RAYLET_ENV = {
    "RAY_worker_niceness": "0",  # Ray's 15 would be inherited by the engines: rollout would starve
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # by default a raylet takes half a minute to end
}
NODE_START_S = 120
STOP_S = 10


def new_token() -> str:
    """For a job's Ray cluster: whoever does not have it is refused."""
    return secrets.token_hex(32)


def authenticate(token: str) -> None:
    """Every process, before it imports Ray."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")


def start_ray(tmp: Path, host: str | None) -> str:
    """Start a cluster that ends with this process; return the address other ranks join.

    Args:
        host: this host's address for other hosts; None: there are no others.
    """
    import ray

    os.environ.update(RAYLET_ENV)
    saved = {name: os.environ.pop(name) for name in LAUNCHER_ENV if name in os.environ}
    try:
        context = ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=1,  # of Ray's own accounting; actors here ask for none
            num_gpus=0,  # GPUs are given out by ``placement``, never by Ray
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=str(tmp / "ray"),
            _node_ip_address=host,
        )
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Ray's own would raise wherever we are; the guard cleans up
    finally:
        os.environ.update(saved)
    return context.address_info["gcs_address"]


def start_node(address: str, tmp: Path, host: str, log: Path) -> subprocess.Popen:
    """Add this host to the cluster at ``address``: one rank of every host but rank 0's. It ends with ``stop_node``, or
    by the guard, with the job.

    Raises:
        RuntimeError: Ray did not start.
    """
    command = [
        sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", f"--node-ip-address={host}",
        "--num-cpus=1", "--num-gpus=0", f"--object-store-memory={OBJECT_STORE_BYTES}", f"--temp-dir={tmp / 'ray'}",
        "--disable-usage-stats", "--block",
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_ENV} | RAYLET_ENV
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    deadline = time.monotonic() + NODE_START_S
    while not list((tmp / "ray").glob("session_*/sockets/raylet*")):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"Ray on {host} could not join {address}; its output is in {log}")
        time.sleep(0.1)
    return process


def stop_node(process: subprocess.Popen) -> None:
    """Take this host out of the cluster."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:  # the guard ends the raylet
        process.kill()


def join_ray(address: str, host: str | None) -> None:
    """Every rank but rank 0.

    Args:
        host: as ``start_ray``.
    """
    import ray

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", _node_ip_address=host)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def node_id() -> str:
    """Ray's name of this host."""
    import ray

    return ray.get_runtime_context().get_node_id()


def node_ids(addresses: Sequence[str]) -> list[str]:
    """Ray's names of the hosts that have these addresses, once all are in the cluster.

    Raises:
        RuntimeError: one is still not, long after its own process has started.
    """
    import ray

    deadline = time.monotonic() + NODE_START_S
    while True:
        names = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
        if names.keys() >= set(addresses):
            return [names[address] for address in addresses]
        if time.monotonic() > deadline:
            raise RuntimeError(f"Ray has started on {', '.join(set(addresses) - names.keys())} and did not join")
        time.sleep(0.1)


def create_actor(kind: type, *args: Any, name: str, max_concurrency: int, node: str) -> Any:
    """Rank 0 only. Named, not detached: actors end with rank 0's job.

    Args:
        node: ``node_id`` of the host it must run on.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"name": name, "scheduling_strategy": there}
    return ray.remote(num_cpus=0, max_concurrency=max_concurrency)(kind).options(**options).remote(*args)


def find_actor(name: str) -> Any:
    import ray

    return ray.get_actor(name)


def result(reference: Any) -> Any:
    """Wait for a remote call. An error raised there is raised here as itself.

    Raises:
        ActorGone: the actor's process has ended.
    """
    import ray
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise ActorGone(str(error).splitlines()[0]) from error


async def awaited(reference: Any) -> Any:
    """``result`` for an event loop."""
    from ray.exceptions import RayActorError, RayTaskError

    try:
        return await reference
    except RayTaskError as error:
        raise error.cause from error
    except RayActorError as error:
        raise ActorGone(str(error).splitlines()[0]) from error


class ActorGone(RuntimeError):
    """A Ray actor's process ended without saying why."""


def first_end(calls: dict[str, Any], timeout_s: float) -> tuple[str, Any] | None:
    """Wait until one of several calls ends, because what it watches has died or has something to say.

    Returns:
        Its name, and what it says; None if nothing ended in time.
    """
    import ray

    ended, _ = ray.wait(list(calls.values()), num_returns=1, timeout=timeout_s)
    if not ended:
        return None
    name = next(name for name, call in calls.items() if call == ended[0])
    try:
        return name, result(ended[0])
    except ActorGone:
        return name, "its process was killed or crashed"


def stop_ray() -> None:
    """Leave the cluster; on rank 0 this ends it."""
    import ray

    ray.shutdown()
