"""The only module that imports Ray: it starts and joins the cluster, and turns plain classes into actors."""

import os
import secrets
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


def new_token() -> str:
    """For a job's Ray cluster: whoever does not have it is refused."""
    return secrets.token_hex(32)


def authenticate(token: str) -> None:
    """Every process, before it imports Ray."""
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=token, RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0")


def start_ray(tmp: Path) -> str:
    """Start a one-node cluster that ends with this process; return the address other ranks join."""
    import ray

    os.environ["RAY_worker_niceness"] = "0"  # Ray's 15 would be inherited by the engines: rollout would starve
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
        )
    finally:
        os.environ.update(saved)
    return context.address_info["gcs_address"]


def join_ray(address: str) -> None:
    """Every other rank."""
    import ray

    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR")


def create_actor(kind: type, *args: Any, name: str, max_concurrency: int) -> Any:
    """Rank 0 only. Named, not detached: actors end with rank 0's job."""
    import ray

    return ray.remote(num_cpus=0, max_concurrency=max_concurrency)(kind).options(name=name).remote(*args)


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


class ActorGone(RuntimeError):
    """A Ray actor's process ended without saying why."""


def first_end(calls: dict[str, Any], timeout_s: float) -> tuple[str, str] | None:
    """Wait until one of several never-ending calls ends, because what it watches has died.

    Returns:
        The name of what died, and how; None if nothing died in time.
    """
    import ray

    ended, _ = ray.wait(list(calls.values()), num_returns=1, timeout=timeout_s)
    if not ended:
        return None
    name = next(name for name, call in calls.items() if call == ended[0])
    try:
        return name, str(result(ended[0]))
    except ActorGone:
        return name, "its process was killed or crashed"


def stop_ray() -> None:
    """Leave the cluster; on rank 0 this ends it."""
    import ray

    ray.shutdown()
