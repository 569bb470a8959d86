"""Checkpoints and engines shared by the whole session: starting a server costs 5-20 s."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

from rlhf_mp.cluster.bootstrap import LAUNCHER_ENV
from rlhf_mp.cluster.launcher import use_own_compiler_cache

# The same examples every time, however busy the machine is.
settings.register_profile("repeatable", derandomize=True, deadline=None, database=None)
settings.load_profile("repeatable")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")
use_own_compiler_cache()

# Folders whose tests share what is started once a session: SGLang servers, and a Slurm that bears no second one.
ONE_WORKER = ("rollout", "slurm")


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """With ``--dist loadfile``, files of a folder whose tests share servers stay together, too."""

    class BySharedServers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return next((folder for folder in ONE_WORKER if file.startswith(f"tests/{folder}/")), file)

    return BySharedServers(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def no_launcher_variables_stay() -> Iterator[None]:
    """What one test leaves of a launcher's variables, every job that a later test starts would inherit."""
    names = (*LAUNCHER_ENV, "RLHF_MP_JOB", "RLHF_MP_TMP")
    before = {name: os.environ.get(name) for name in names}
    yield
    assert {name: os.environ.get(name) for name in names} == before


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """0.8 M parameters, one token per character, weights large enough that log-probs differ clearly between models."""
    from rlhf_mp.models.tiny import character_tokenizer, make_checkpoint

    path = tmp_path_factory.mktemp("tiny")
    make_checkpoint(path, character_tokenizer("0123456789+= "), std=0.08)
    return path


@pytest.fixture(scope="session")
def reward_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward model of the same body, whose scores are about as far apart as those of a trained one."""
    import torch

    from rlhf_mp.models.heads import RewardHead
    from rlhf_mp.models.hf import save_checkpoint

    head, path = RewardHead(), tmp_path_factory.mktemp("reward_model")
    model = head.load(str(tiny_checkpoint), torch.float32)
    with torch.no_grad():
        model.score.weight.normal_(std=0.5, generator=torch.Generator().manual_seed(3))
    save_checkpoint(model.named_parameters(), str(tiny_checkpoint), path, torch.float32, head.saved_config)
    return path


@pytest.fixture(scope="session", params=[1, 2], ids=["tp1", "tp2"])
def sglang_server(request, tiny_checkpoint: Path, tmp_path_factory) -> Iterator:
    """A float32 server of ``tiny_checkpoint`` at tensor-parallel size 1 and 2."""
    from rlhf_mp.config.schema import RolloutConfig
    from rlhf_mp.rollout.sglang_server import ServerPlan, SGLangServer

    rollout = RolloutConfig(
        dtype="float32", max_model_len=128, max_num_seqs=64, tensor_model_parallel_size=request.param
    )
    log = tmp_path_factory.mktemp("sglang") / "engine.log"
    plan = ServerPlan(index=0, model_path=str(tiny_checkpoint), on_cpu=True, gpus=(), seed=1)
    server = SGLangServer(plan, rollout, context=128, log_file=log)
    try:
        server.wait_ready(180)
        server.workers = request.param
        yield server
    finally:
        server.stop()
