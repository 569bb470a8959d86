"""Memory that leaves a device and returns: what stays, what is copied, what is not, and that views notice nothing."""

import pytest
import torch
from torch import Tensor

from rlhf_mp.errors import OutOfMemory
from rlhf_mp.planner.term import Component
from rlhf_mp.train.parking import HostArena, Parking

CPU = torch.device("cpu")


class Model:
    def __init__(self, **tensors: Tensor):
        self.held = {Component[name]: tensor for name, tensor in tensors.items()}

    def tensors(self):
        return iter(self.held.items())


def bytes_in(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


@pytest.fixture
def actor() -> Model:
    flat = torch.arange(6.0)
    return Model(weights=torch.ones(4), gradients=torch.full((4,), 2.0), master=flat[:3], optimizer=flat[3:])


def test_all_but_the_weights_of_the_actor_leaves_and_is_the_same_afterwards(actor):
    reference = Model(weights=torch.full((5,), 3.0, dtype=torch.bfloat16))
    parking = Parking([actor, reference], CPU)
    held = actor.held | {"reference": reference.held[Component.weights]}
    before = {name: tensor.clone() for name, tensor in held.items()}
    parking.out()
    assert parking.is_out
    assert {name: bytes_in(tensor) for name, tensor in held.items()} == {
        Component.weights: 16, Component.gradients: 0, Component.master: 0, Component.optimizer: 0, "reference": 0,
    }  # fmt: skip
    parking.back()
    assert not parking.is_out
    before[Component.gradients].zero_()  # written anew by the next update
    assert all(torch.equal(tensor, before[name]) for name, tensor in held.items())
    actor.held[Component.master][0] = 9.0  # still a view of the one buffer
    assert (
        actor.held[Component.optimizer].untyped_storage()._cdata
        == actor.held[Component.master].untyped_storage()._cdata
    )


def test_a_storage_is_moved_once_and_gradients_are_not_copied(actor):
    metrics = Parking([actor], CPU).out()
    assert metrics["park/copied_bytes"] == (24, 1)  # six floats, seen by two views
    assert metrics["park/freed_bytes"] == (40, 1)
    assert metrics["park/out_s"][0] > 0 and metrics["park/out_gb_per_s"][0] > 0


def test_what_shares_memory_with_the_weights_stays():
    weights = torch.ones(4)
    actor = Model(weights=weights, master=weights, optimizer=torch.ones(2))
    adapter_off = Model(weights=weights)  # the reference of a run with LoRA
    assert Parking([actor, adapter_off], CPU).out()["park/freed_bytes"] == (8, 1)
    assert weights.sum() == 4


def test_gradients_that_share_memory_with_something_else_are_copied():
    flat = torch.arange(4.0)
    actor = Model(weights=torch.ones(1), gradients=flat[:2], optimizer=flat[2:])
    parking = Parking([actor], CPU)
    parking.out()
    parking.back()
    assert torch.equal(flat, torch.arange(4.0))


def test_what_is_elsewhere_is_left_alone(actor):
    """An optimizer that is on the host already."""
    parking = Parking([actor], torch.device("meta"))
    assert parking.out()["park/freed_bytes"] == (0, 1)
    assert bytes_in(actor.held[Component.optimizer]) == 24


def test_what_a_file_is_mapped_to_stays(actor, tmp_path):
    (tmp_path / "weights").write_bytes(bytes(400))
    mapped = torch.from_file(str(tmp_path / "weights"), size=100)
    parking = Parking([actor, Model(weights=mapped)], CPU)
    assert parking.out()["park/freed_bytes"] == (40, 1)
    assert mapped.sum() == 0
    parking.back()


def test_moments_that_come_later_and_a_second_time_out(actor):
    waited = []
    parking = Parking([actor], CPU, lambda: waited.append(True))
    parking.out()
    assert parking.out() == {} and waited == [True]  # it is out already
    parking.back()
    assert parking.back() == {}
    actor.held[Component.buckets] = torch.ones(3)
    actor.held[Component.activations] = torch.arange(1000.0)
    parking.out()
    parking.back()
    assert torch.equal(actor.held[Component.activations], torch.arange(1000.0))
    assert torch.equal(actor.held[Component.master], torch.tensor([0.0, 1.0, 2.0]))


def test_without_models_nothing_happens():
    parking = Parking()
    assert parking.out() == parking.back() == {} and not parking.is_out


def test_a_host_with_too_little_memory_is_said_with_the_key():
    with pytest.raises(OutOfMemory, match=r"no 1048576\.0 GiB .*trainer\.offload_during_rollout=false"):
        HostArena(torch.device("cpu")).reserve(1 << 50)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_leaves_a_gpu_is_free_for_other_processes():
    gpu = torch.device("cuda")
    actor = Model(weights=torch.ones(4, device=gpu), optimizer=torch.arange(64_000_000.0, device=gpu))
    parking, (before, _) = Parking([actor], gpu), torch.cuda.mem_get_info()
    metrics = parking.out()
    assert torch.cuda.mem_get_info()[0] - before >= 255_000_000
    assert metrics["park/out_gb_per_s"][0] > 5  # pinned: a pageable copy is slower
    parking.back()
    assert torch.equal(actor.held[Component.optimizer], torch.arange(64_000_000.0, device=gpu))
