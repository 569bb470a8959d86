"""The engine's side of a swap on a small model: what counts as arrived is what the model itself has taken."""

import torch
from torch import nn

from rlhf_mp.weights.manifest import Manifest, TensorRecord
from rlhf_mp.weights.receiver import Receiver


class Model(nn.Module):
    """Takes weights as engines' models do: one at a time, by name, tied head left out."""

    def __init__(self, tied: bool = False):
        super().__init__()
        self.embed, self.norm, self.tied = nn.Linear(4, 3, bias=False), nn.LayerNorm(4, bias=False), tied
        self.lm_head = self.embed if tied else nn.Linear(4, 3, bias=False)

    def load_weights(self, weights):
        own = dict(self.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            own[name].data.copy_(tensor)


def version(number: int, names=("embed.weight", "norm.weight", "lm_head.weight")) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = {"embed.weight": (3, 4), "norm.weight": (4,), "lm_head.weight": (3, 4)}
    return {name: torch.randn(shapes[name], generator=generator) for name in names}


def manifest(number: int, weights: dict[str, torch.Tensor]) -> Manifest:
    return Manifest(number, tuple(TensorRecord.of(name, tensor) for name, tensor in weights.items()))


def started(model: Model, tied: bool = False) -> Receiver:
    """A receiver whose engine has loaded version 0 from its checkpoint."""
    receiver = Receiver()
    model.load_weights(receiver.arriving(version(0).items()))
    receiver.adopt(tied)
    return receiver


def test_a_version_that_arrives_whole_is_committed_and_in_the_model():
    model = Model()
    receiver, weights = started(model), version(1)
    receiver.begin()
    parts = [*weights.items()]
    model.load_weights(receiver.arriving(parts[:2]))
    model.load_weights(receiver.arriving(parts[2:]))
    assert receiver.commit(manifest(1, weights)) == []
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert receiver.seconds > 0


def test_a_part_that_is_missing_is_told():
    receiver, weights = started(Model()), version(1)
    receiver.begin()
    [*receiver.arriving([*weights.items()][:2])]
    assert receiver.commit(manifest(1, weights)) == ["lm_head.weight was sent but did not arrive"]


def test_what_the_model_did_not_take_has_not_arrived():
    receiver, weights = started(Model()), version(1)
    receiver.begin()
    next(receiver.arriving(weights.items()))
    assert len(receiver.commit(manifest(1, weights))) == 2


def test_a_tensor_that_changed_on_its_way_is_told():
    receiver, weights = started(Model()), version(1)
    receiver.begin()
    damaged = {name: tensor.clone() for name, tensor in weights.items()}
    damaged["norm.weight"][2] += 1e-6
    [*receiver.arriving(damaged.items())]
    (told,) = receiver.commit(manifest(1, weights))
    assert told.startswith("norm.weight: checksum")


def test_a_trainer_that_forgets_a_tensor_of_the_checkpoint_is_told():
    receiver, weights = started(Model()), version(1, names=("embed.weight", "lm_head.weight"))
    receiver.begin()
    [*receiver.arriving(weights.items())]
    assert receiver.commit(manifest(1, weights)) == ["norm.weight is in the engine's checkpoint but was not sent"]


def test_a_trainer_that_forgets_a_head_of_its_own_is_told():
    receiver, weights = started(Model()), version(1, names=("embed.weight", "norm.weight"))
    receiver.begin()
    [*receiver.arriving(weights.items())]
    assert receiver.commit(manifest(1, weights)) == ["lm_head.weight is in the engine's checkpoint but was not sent"]


def test_a_tied_head_need_not_be_sent_though_the_checkpoint_has_it():
    model = Model(tied=True)
    receiver, weights = started(model, tied=True), version(1, names=("embed.weight", "norm.weight"))
    receiver.begin()
    model.load_weights(receiver.arriving(weights.items()))
    assert receiver.commit(manifest(1, weights)) == []


def test_what_an_aborted_version_left_behind_is_forgotten():
    receiver, weights = started(Model()), version(2)
    receiver.begin()
    [*receiver.arriving(version(1).items())]
    receiver.begin()
    assert receiver.seconds == 0
    [*receiver.arriving(weights.items())]
    assert receiver.commit(manifest(2, weights)) == []


def test_weights_of_the_version_before_do_not_pass_for_new_ones():
    receiver = started(Model())
    receiver.begin()
    [*receiver.arriving(version(1).items())]
    assert [text.split(":")[0] for text in receiver.commit(manifest(2, version(2)))] == [*version(2)]
