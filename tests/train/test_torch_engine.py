"""The reference engine: log-probs against a loop over unpadded sequences, steps against their own invariances."""

import gc
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rlhf_mp.config.derive import derive
from rlhf_mp.config.schema import ActorConfig, OptimConfig, RunConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import TokenBatch, Totals, Trajectory
from rlhf_mp.models.heads import PolicyHead
from rlhf_mp.models.hf import load_causal_lm
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint
from rlhf_mp.observe.live_tensors import live_bytes
from rlhf_mp.train.accumulate import ForwardSettings, MetricSums
from rlhf_mp.train.build import make_actor, make_reference
from rlhf_mp.train.torch_engine import TorchEngine

CPU = torch.device("cpu")
# A large epsilon: Adam divides by the gradient's own size, which would blow rounding up to a whole step.
OPTIM = OptimConfig(lr=1e-2, eps=1e-2, weight_decay=0.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("small")
    shape = TinyShape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16)
    make_checkpoint(folder, character_tokenizer("0123456789+="), shape, std=0.2)
    return str(folder)


def engine(path: str, optim: OptimConfig = OPTIM, grad_clip: float = 0.0, **settings) -> TorchEngine:
    head = PolicyHead(**{"temperature": 0.7, "entropy_grad": True} | settings)
    actor = ActorConfig(optim=optim, grad_clip=grad_clip)
    return TorchEngine(load_causal_lm(path, torch.float32), ForwardSettings(CPU, head), actor, num_steps=10)


def trajectories() -> list[Trajectory]:
    """Six of unequal lengths; in the second a token of the response is not the policy's own."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for prompt, response in [(3, 4), (1, 9), (5, 1), (2, 2), (7, 3), (4, 6)]:
        ids = torch.randint(2, 14, (prompt + response,), generator=generator).tolist()
        mask = [True] * response
        if len(made) == 1:
            mask[3] = False
        made.append(Trajectory(ids[:prompt], ids[prompt:], [0.0] * response, mask, 0.0, 0, 0, "stop"))
    return made


@pytest.fixture
def batch() -> TokenBatch:
    whole = collate(trajectories())
    whole.advantages = torch.randn(whole.mask.shape, generator=torch.Generator().manual_seed(1)) * whole.mask
    return whole


def loss_fn(output, batch: TokenBatch, totals: Totals):
    """Policy gradient with an entropy term: touches both outputs."""
    per_token = -(output.logprobs * batch.advantages) - 0.1 * output.entropy
    loss = (per_token * batch.mask).sum() / totals.num_tokens
    return loss, {"loss": (loss, torch.ones(()))}


def totals_of(batch: TokenBatch) -> Totals:
    return Totals(int(batch.mask.sum()), len(batch.tokens))


def step(engine: TorchEngine, batch: TokenBatch, cut: list[list[int]] | None = None) -> dict[str, tuple[float, float]]:
    cut = cut or [list(range(len(batch.tokens)))]
    return engine.train_step([batch.select(rows) for rows in cut], totals_of(batch), loss_fn)


def weights(engine: TorchEngine) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.weights()}


def gradients(engine: TorchEngine) -> dict[str, torch.Tensor]:
    """Filled when the optimizer steps: what it is given."""
    seen = {}

    def record(*_) -> None:
        seen.update({name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None})

    engine.optimizer.register_step_pre_hook(record)
    return seen


@torch.no_grad()
def naive_logprobs(module: nn.Module, trajectory: Trajectory, temperature: float) -> list[float]:
    """Token by token on the unpadded sequence, straight from the definition."""
    ids = trajectory.prompt_ids + trajectory.response_ids
    logits = module(input_ids=torch.tensor([ids])).logits[0]
    found = [0.0] * len(ids)
    for t, own in enumerate(trajectory.loss_mask, start=len(trajectory.prompt_ids)):
        if own:
            found[t] = torch.log_softmax(logits[t - 1].double() / temperature, -1)[ids[t]].item()
    return found


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_scores_are_those_of_each_sequence_alone(path, temperature):
    model = engine(path, temperature=temperature)
    whole = collate(trajectories())
    cut = [[5, 0], [1], [2, 3, 4]]
    for rows, scored in zip(cut, model.score([whole.select(rows) for rows in cut]), strict=True):
        for row, logprobs in zip(rows, scored, strict=True):
            expected = naive_logprobs(model.module, trajectories()[row], temperature)
            padded = torch.tensor(expected + [0.0] * (len(logprobs) - len(expected)))
            torch.testing.assert_close(logprobs, padded, atol=2e-5, rtol=0)


def test_what_stands_in_the_padding_does_not_matter(path):
    model, whole = engine(path), collate(trajectories())
    other = collate(trajectories())
    other.tokens[torch.arange(other.tokens.shape[1]) >= other.lengths[:, None]] = 9
    torch.testing.assert_close(model.score([whole])[0], model.score([other])[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("cut", [[[i] for i in range(6)], [[0, 1, 2], [3, 4, 5]], [[5, 0], [], [1, 2, 4, 3], []]])
def test_a_step_does_not_depend_on_the_cut_into_micro_batches(path, batch, cut):
    whole, parts = engine(path), engine(path)
    expected, found = step(whole, batch), step(parts, batch, cut)
    assert found["loss"][0] == pytest.approx(expected["loss"][0], rel=1e-5)
    assert found["grad_norm"][0] == pytest.approx(expected["grad_norm"][0], rel=1e-5)
    torch.testing.assert_close(weights(parts), weights(whole), atol=1e-6, rtol=0)


def test_a_step_goes_downhill(path, batch):
    model = engine(path)
    losses = [step(model, batch)["loss"][0] for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("clip", [0.05, 0.0, 1e6])
def test_clipping_bounds_what_the_optimizer_sees_and_the_metric_is_before_it(path, batch, clip):
    free, clipped = engine(path), engine(path, grad_clip=clip)
    free_gradients, seen = gradients(free), gradients(clipped)
    norm = step(free, batch)["grad_norm"][0]
    assert norm > 0.1 and step(clipped, batch)["grad_norm"][0] == pytest.approx(norm)
    factor = clip / norm if clip == 0.05 else 1.0
    for name, gradient in free_gradients.items():
        torch.testing.assert_close(seen[name], gradient * factor, rtol=1e-4, atol=1e-8)


def test_the_rate_warms_up_and_is_the_one_of_the_step_it_is_reported_with(path, batch):
    model = engine(path, OptimConfig(lr=8e-3, lr_warmup_steps=4, lr_scheduler_type="linear"))
    used = []
    model.optimizer.register_step_pre_hook(lambda optimizer, *_: used.append(optimizer.param_groups[0]["lr"]))
    reported = [step(model, batch)["lr"] for _ in range(7)]
    # 10 steps, 4 of warm-up: then 1, 5/6, 4/6 of the rate
    assert [rate for rate, _ in reported] == pytest.approx([2e-3, 4e-3, 6e-3, 8e-3, 8e-3, 8e-3 * 5 / 6, 8e-3 * 4 / 6])
    assert used == [rate for rate, _ in reported]


def test_a_loaded_engine_continues_bit_identically(path, batch, tmp_path):
    optim = OptimConfig(lr=1e-2, lr_warmup_steps=4, lr_scheduler_type="cosine")
    straight = engine(path, optim)
    for _ in range(3):
        step(straight, batch)
    straight.save(tmp_path / "checkpoint")
    expected = [step(straight, batch) for _ in range(2)]

    resumed = engine(path, optim)
    resumed.load(tmp_path / "checkpoint")
    assert [step(resumed, batch) for _ in range(2)] == expected
    assert all(torch.equal(p, weights(straight)[name]) for name, p in resumed.weights())


def state(model: TorchEngine) -> dict[str, torch.Tensor]:
    """Everything that the next step depends on."""
    moments = model.optimizer.state_dict()["state"]
    found = {f"{index}.{name}": x.clone() for index, state in moments.items() for name, x in state.items()}
    return weights(model) | found | {"lr": torch.tensor(model.schedule.get_last_lr())}


def harmful(where: str):
    """A loss that is no finite number, or one that is, with a gradient that is not."""

    def loss_of(output, batch, totals):
        loss, metrics = loss_fn(output, batch, totals)
        match where:
            case "loss":
                return loss + torch.inf, metrics
            case "number alone":  # which has no gradient of its own
                return loss + torch.tensor(torch.nan), metrics
            case "gradient":
                return loss + (output.logprobs[:1, 1:2] * 0).sqrt().sum(), metrics
        return loss, metrics

    return loss_of


@pytest.mark.parametrize("where", ["loss", "number alone", "gradient"])
def test_a_step_without_a_finite_loss_or_gradient_changes_nothing(path, batch, where):
    model = engine(path, OptimConfig(lr=1e-2, lr_warmup_steps=4))
    step(model, batch)
    before = state(model)
    cut = [batch.select(rows) for rows in ([0, 1, 2], [3, 4, 5])]
    skipped = model.train_step(cut, totals_of(batch), harmful(where))
    assert not math.isfinite(skipped["grad_norm"][0])
    assert all(torch.equal(x, before[name]) for name, x in state(model).items())

    straight = engine(path, OptimConfig(lr=1e-2, lr_warmup_steps=4))
    step(straight, batch)
    assert step(model, batch) == step(straight, batch)  # and nothing of it is left for the next one
    assert all(torch.equal(x, state(straight)[name]) for name, x in state(model).items())


def test_weights_have_the_names_of_the_checkpoint_and_tied_ones_come_once(path):
    from safetensors import safe_open

    names = [name for name, _ in engine(path).weights()]
    with safe_open(Path(path) / "model.safetensors", "pt") as stored:
        assert sorted(names) == sorted(stored.keys())
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names


def run_config(path: str, **model) -> RunConfig:
    config = RunConfig()
    config.actor_rollout_ref.model.path = path
    config.actor_rollout_ref.actor.strategy = "torch"
    config.actor_rollout_ref.actor.optim = OPTIM
    for name, value in model.items():
        setattr(config.actor_rollout_ref.model, name, value)
    derive(config)
    return config


PLAIN = {"dtype": "float32", "enable_gradient_checkpointing": False, "enable_activation_offload": False}


@pytest.mark.parametrize(
    "saving",
    [
        {"enable_gradient_checkpointing": True},
        {"enable_gradient_checkpointing": True, "checkpoint_every_n_layers": 2},
        {"enable_activation_offload": True},
        {"enable_activation_offload": True, "activation_offload_layers": 0},
        {"enable_gradient_checkpointing": True, "enable_activation_offload": True},
    ],
    ids=["checkpointing", "every second layer", "offload", "offload at once", "both"],
)
def test_saving_memory_changes_no_loss_and_no_gradient(path, batch, saving):
    found = []
    for memory in (PLAIN, PLAIN | saving):
        model = make_actor(run_config(path, **memory), CPU, num_updates=10)
        seen = gradients(model)
        found.append((step(model, batch, [[0, 1, 2], [3, 4, 5]])["loss"], seen))
    (plain_loss, plain), (loss, saved) = found
    assert loss == plain_loss and plain.keys() == saved.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(saved[name], gradient, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("enabled", "passes"), [(False, 1), (True, 2)])
def test_checkpointing_runs_every_layer_again_in_the_backward_pass(path, batch, enabled, passes):
    model = make_actor(run_config(path, **PLAIN | {"enable_gradient_checkpointing": enabled}), CPU, num_updates=1)
    calls = []
    for layer in model.module.model.layers:
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    step(model, batch)
    assert len(calls) == passes * len(model.module.model.layers)
    calls.clear()
    model.score([batch])
    assert len(calls) == len(model.module.model.layers)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_micro_batch_of_one_chunk_of_logits_trains_bit_identically(path, batch, temperature):
    """So small runs, the quickstart among them, don't depend on the lever."""
    found = []
    for chunk_mb in (0, 512):
        config = run_config(path, **PLAIN | {"logits_chunk_mb": chunk_mb})
        config.actor_rollout_ref.rollout.temperature = temperature
        model = make_actor(config, CPU, num_updates=10)
        without_entropy = lambda output, *rest: loss_fn(replace(output, entropy=output.entropy.detach()), *rest)  # noqa: E731
        cut = [[0, 1, 2], [3, 4, 5]]
        micro_batches = [batch.select(rows) for rows in cut]
        losses = [model.train_step(micro_batches, totals_of(batch), without_entropy)["loss"] for _ in range(3)]
        found.append((losses, model.score([batch])[0], weights(model)))
    (losses, scores, trained), (chunked_losses, chunked_scores, chunked) = found
    assert losses == chunked_losses and torch.equal(scores, chunked_scores)
    assert all(torch.equal(chunked[name], weight) for name, weight in trained.items())


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 32 * 5])
def test_many_chunks_of_logits_train_alike(path, batch, chunk_bytes):
    whole, chunked = engine(path), engine(path, logits_chunk_bytes=chunk_bytes)
    assert step(chunked, batch)["loss"][0] == pytest.approx(step(whole, batch)["loss"][0], abs=1e-6)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(chunked)[name], weight, atol=1e-6, rtol=0)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_activation_offload_says_how_much_it_moved(path, batch, layers):
    saving = {"enable_activation_offload": True, "activation_offload_layers": layers}
    model = make_actor(run_config(path, **PLAIN | saving), CPU, num_updates=1)
    moved, _ = step(model, batch, [[0, 1, 2], [3, 4, 5]])["activation_offload_gb"]
    assert moved * 1e9 > 2 * 4 * 32 * batch.tokens.numel()  # more than one hidden state, there and back
    assert "activation_offload_gb" not in step(make_actor(run_config(path, **PLAIN), CPU, num_updates=1), batch)


@pytest.mark.parametrize(("every", "passes"), [(1, [2, 2]), (2, [2, 1]), (3, [2, 1])])
def test_only_every_so_many_th_layer_is_recomputed(path, batch, every, passes):
    saving = {"enable_gradient_checkpointing": True, "checkpoint_every_n_layers": every}
    model = make_actor(run_config(path, **PLAIN | saving), CPU, num_updates=1)
    calls = [0, 0]
    for index, layer in enumerate(model.module.model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, index=index: calls.__setitem__(index, calls[index] + 1))
    step(model, batch)
    assert calls == passes


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(path, batch):
    exact = make_actor(run_config(path, **PLAIN), CPU, num_updates=10)
    half = make_actor(run_config(path, **PLAIN | {"dtype": "bfloat16"}), CPU, num_updates=10)
    difference = (half.score([batch])[0] - exact.score([batch])[0]).abs().max()
    assert 0 < difference < 0.2
    assert step(half, batch)["loss"][0] == pytest.approx(step(exact, batch)["loss"][0], abs=0.05)
    assert {p.dtype for _, p in half.weights()} == {torch.float32}


def test_the_reference_stays_where_it_started(path, batch):
    config = run_config(path, **PLAIN)
    actor = make_actor(config, CPU, num_updates=10)
    reference = make_reference(config, CPU, actor)
    before = reference.score([batch])[0]
    torch.testing.assert_close(before, actor.score([batch])[0], atol=1e-6, rtol=0)
    step(actor, batch)
    assert torch.equal(reference.score([batch])[0], before)
    assert (actor.score([batch])[0] - before).abs().max() > 1e-3


def test_extremes_of_micro_batches_are_kept_and_empty_ones_say_nothing():
    sums = MetricSums()
    for largest, smallest, count in [(0.0, 0.0, 0), (-3.0, -3.0, 1), (-1.0, -1.0, 1), (5.0, 5.0, 0)]:
        pairs = {"r_max": largest, "r_min": smallest}
        sums.add({name: (torch.tensor(x), torch.tensor(count)) for name, x in pairs.items()})
    assert sums.result() == {"r_max": (-1.0, 1.0), "r_min": (-3.0, 1.0)}


def test_nothing_is_left_behind_by_many_steps(path, batch):
    """With every lever on: what is alive after eight steps was alive after two."""
    levers = {"enable_gradient_checkpointing": True, "enable_activation_offload": True, "use_remove_padding": True}
    model = make_actor(run_config(path, **PLAIN | levers), CPU, num_updates=10)

    def alive(num_steps: int) -> dict[str, int]:
        for _ in range(num_steps):
            step(model, batch, [[0, 1, 2], [3, 4, 5]])
            model.score([batch])
        gc.collect()
        return live_bytes(CPU)

    assert alive(2) == alive(6)
