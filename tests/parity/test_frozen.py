"""A reward model in 4 or 8 bits on two DeepSpeed ranks gives the scores of one process, from a part of the bytes."""

import json
from pathlib import Path

import pytest
from torchrun import on_ranks

from rlhf_mp.planner.job import Adapter
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.states import base_weights

pytest.importorskip("bitsandbytes")
WORKER = Path(__file__).with_name("frozen_worker.py")


@pytest.mark.engine
def test_a_reward_model_in_fewer_bits_scores_alike_wherever_it_is(reward_checkpoint, tmp_path):
    on_ranks(WORKER, 2, tmp_path, str(tmp_path / "out.json"), str(reward_checkpoint))
    shape = find_model(str(reward_checkpoint))
    head = 4 * (shape.num_params - shape.num_params_scalar_head)
    for of_rank in json.loads((tmp_path / "out.json").read_text()):
        for kind, measured in of_rank.items():
            planned = base_weights(shape, Adapter(quantization=kind), 4).value - head
            assert 1e-4 < measured["moved"] < measured["spread"]  # another model, yet much like the whole one
            assert max(measured["offload False"], measured["offload True"]) < 1e-5
            assert measured["bytes"] < 0.6 * planned  # half of it; scales are no weights of the module
        assert of_rank["int8"]["moved"] < of_rank["nf4"]["moved"] / 4
