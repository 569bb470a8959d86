"""LoRA in the one-process engine: what moves, what is kept, what the reference model is."""

from itertools import product

import pytest
import torch

from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Totals, Trajectory
from rlhf_mp.observe.footprint import held_bytes
from rlhf_mp.planner.preflight import Machine, plan_of
from rlhf_mp.planner.term import Component, Role
from rlhf_mp.train.build import make_actor, make_reference

CPU = torch.device("cpu")


def config_of(path, **model) -> RunConfig:
    knobs = {"path": str(path), "dtype": "float32", "lora_rank": 4, "enable_gradient_checkpointing": False}
    optim = {"lr": 1e-2, "eps": 1e-6}
    actor = {"strategy": "torch", "optim": optim, "use_kl_loss": True, "ppo_mini_batch_size": 8}
    tree = {
        "actor_rollout_ref": {"model": knobs | model, "actor": actor},
        "trainer": {"n_gpus_per_node": 1, "device": "cpu"},
        "data": {"train_batch_size": 8, "max_prompt_length": 8, "max_response_length": 8},
    }
    return config_from_dict(tree)


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(2, 14, (4, 12), generator=generator).tolist()
    return collate([Trajectory(row[:4], row[4:], [0.0] * 8, [True] * 8, 0.0, 0, 0, "stop") for row in rows])


def loss_fn(output, batch, totals):
    loss = -(output.logprobs * batch.mask).sum() / totals.num_tokens
    return loss, {"loss": (loss, torch.ones(()))}


def step(engine, batch) -> float:
    return engine.train_step([batch], Totals(32, 4), loss_fn)["loss"][0]


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in engine.weights()}


def bits(module) -> dict[str, torch.Tensor]:
    """Packed numbers are kept in elements that may be no numbers: nan differs from itself."""
    return {name: p.data.clone().view(torch.uint8) for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "quantization"), [*product(["float32", "bfloat16"], [None, "nf4"]), ("bfloat16", "int8")], ids=str
)
def test_only_adapters_move_and_only_they_have_optimizer_state(tiny_checkpoint, batch, dtype, quantization):
    engine = make_actor(config_of(tiny_checkpoint, dtype=dtype, quantization=quantization), CPU, 10)
    before = bits(engine.module)
    losses = [step(engine, batch) for _ in range(5)]
    assert losses[-1] < losses[0] - 0.05
    moved = {name for name, now in bits(engine.module).items() if not torch.equal(now, before[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert len(engine.optimizer.state) == len(moved)
    held = {getattr(torch, dtype) if "lora_" not in name else torch.float32 for name in before}
    assert {p.dtype for p in engine.module.parameters()} == held  # the base needs no float32 copy


def test_the_reference_is_the_base_exactly_and_holds_nothing(tiny_checkpoint, batch):
    config = config_of(tiny_checkpoint)
    engine = make_actor(config, CPU, 10)
    reference = make_reference(config, CPU, engine)
    separate = make_reference(config_of(tiny_checkpoint, lora_rank=0), CPU, engine)
    for _ in range(3):
        step(engine, batch)
        assert torch.equal(reference.score([batch])[0], separate.score([batch])[0])
    assert (engine.score([batch])[0] - reference.score([batch])[0]).abs().max() > 0.01
    assert held_bytes({Role.actor: engine, Role.reference: reference}) == held_bytes({Role.actor: engine})
    assert step(engine, batch) < 10  # and it still trains


@pytest.mark.parametrize(("quantization", "close"), [(None, 0.005), ("nf4", 0.02), ("int8", 0.03)])
def test_what_is_held_is_what_is_planned(tiny_checkpoint, batch, quantization, close):
    """But for the scales of quantized matrices, which are no weights of the module: much in matrices this narrow."""
    config = config_of(tiny_checkpoint, quantization=quantization)
    engine = make_actor(config, CPU, 10)
    engine.before_step = lambda _: found.update(held_bytes({Role.actor: engine}))
    found = {}
    for _ in range(2):
        step(engine, batch)
    moments = plan_of(config, Machine(None, 1e12)).moments
    assert {t.role for m in moments for t in m.terms if t.component is Component.weights} == {Role.actor, Role.engine}
    (training,) = (m for m in moments if m.name == "actor backward")
    for component in (Component.weights, Component.gradients, Component.optimizer):
        planned = sum(t.bytes for t in training.terms if t.component is component and t.role is Role.actor)
        assert found[Role.actor, component, True] == pytest.approx(planned, rel=close)


@pytest.mark.parametrize(
    "model", [{}, {"dtype": "bfloat16"}, {"quantization": "nf4"}, {"quantization": "int8"}], ids=str
)
def test_a_resumed_adapter_continues_bit_for_bit_from_a_small_file(tiny_checkpoint, batch, tmp_path, model):
    config = config_of(tiny_checkpoint, **model)
    straight = make_actor(config, CPU, 8)
    for _ in range(4):
        step(straight, batch)
    straight.save(tmp_path)
    for _ in range(4):
        step(straight, batch)
    torch.manual_seed(99)  # another start
    resumed = make_actor(config, CPU, 8)
    resumed.load(tmp_path)
    for _ in range(4):
        step(resumed, batch)
    ours, theirs = weights(resumed), weights(straight)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    num_adapter = sum(p.numel() for p in straight.module.parameters() if p.requires_grad)
    size = (tmp_path / "torch_engine.pt").stat().st_size
    assert 12 * num_adapter < size < 12 * num_adapter + 120_000  # weight and two moments, and zip's own


def test_dropout_is_for_training_alone(tiny_checkpoint, batch):
    tree = {
        "actor_rollout_ref": {
            "model": {"path": str(tiny_checkpoint), "dtype": "float32", "lora_rank": 4, "lora_dropout": 0.5},
            "actor": {"strategy": "torch", "optim": {"lr": 1e-2}},
        },
        "trainer": {"task": "sft", "n_gpus_per_node": 1, "device": "cpu"},
    }
    engine = make_actor(config_from_dict(tree), CPU, 10)
    for _ in range(2):
        step(engine, batch)
    assert torch.equal(engine.score([batch])[0], engine.score([batch])[0])
    assert step(engine, batch) != -(engine.score([batch])[0] * batch.mask).sum().item() / 32
