"""Activations in host memory: the same gradients, the promised order, and nothing kept that should have left."""

import pytest
import torch
from torch import nn

from rlhf_mp.train.activation_offload import ActivationOffload, decoder_layers

CPU = torch.device("cpu")


class Stack(nn.Module):
    """Four layers between an embedding and a head that shares its weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4)])
        self.pair = nn.ModuleList([nn.Identity(), nn.Identity()])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.embedding.weight.T


def made() -> tuple[Stack, torch.Tensor]:
    torch.manual_seed(0)
    return Stack(), torch.randint(7, (3, 5))


def gradients(model: Stack, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("layers", [0, 1, 2, 3, 9])
def test_gradients_are_bit_identical(layers):
    model, tokens = made()
    expected = gradients(model, model(tokens).square().sum())
    offload = ActivationOffload(model.layers, CPU, layers)
    with offload.saving():
        loss = model(tokens).square().sum()
    found = gradients(model, loss)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert offload.num_bytes > 0


def test_two_forward_passes_may_wait_for_their_backward_passes():
    model, tokens = made()
    expected = gradients(model, model(tokens).sum() + model(tokens + 0).square().sum())
    offload = ActivationOffload(model.layers, CPU, 1)
    with offload.saving():
        first = model(tokens).sum()
    with offload.saving():
        second = model(tokens + 0).square().sum()
    found = gradients(model, first + second)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_graph_may_be_walked_twice():
    model, tokens = made()
    with ActivationOffload(model.layers, CPU, 1).saving():
        loss = model(tokens).square().sum()
    first = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [*model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_weights_stay_and_a_tensor_kept_by_several_operations_moves_once():
    weight, x = nn.Parameter(torch.ones(8, 8)), torch.ones(3, 8, requires_grad=True)
    offload = ActivationOffload([], CPU, 1)
    with offload.saving():
        hidden = x.exp()  # keeps its result
        loss = (hidden @ weight).sum() + (hidden @ weight.T).sum() + (hidden @ nn.Parameter(torch.ones(8, 2))).sum()
    assert offload.num_bytes == hidden.nbytes
    loss.backward()
    assert offload.num_bytes == 2 * hidden.nbytes
    torch.testing.assert_close(x.grad, torch.full((3, 8), torch.e * 18))


def test_at_most_two_groups_are_back_at_once_and_hooks_are_gone_afterwards(monkeypatch):
    model, tokens = made()
    offload, order, most = ActivationOffload(model.layers, CPU, 1), [], []
    fetch = offload._fetch
    groups_seen = []

    def counted(group):
        fetch(group)
        if group not in groups_seen:
            groups_seen.append(group)
        order.append(groups_seen.index(group))
        most.append(sum(bool(g.back) for g in groups_seen))

    monkeypatch.setattr(offload, "_fetch", counted)
    with offload.saving():
        loss = model(tokens).square().sum()
    assert not any(layer._forward_pre_hooks for layer in model.layers)
    loss.backward()
    assert order == [0, 1, 2, 3]  # each once, the last layers' first
    assert max(most) <= 3  # the one in use, the next, and the one that has just been used up


def test_the_layers_are_the_longest_list():
    model, _ = made()
    assert decoder_layers(model) is model.layers
    assert len(decoder_layers(nn.Linear(1, 1))) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_activations_leave_the_device_and_come_back():
    device = torch.device("cuda")
    layers = nn.ModuleList([nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(8)]).to(device)
    x = torch.randn(8192, 2048, device=device)

    def peak(layers_per_group: int | None) -> tuple[int, list[torch.Tensor]]:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        offload = ActivationOffload(layers, device, layers_per_group or 0)
        hidden = x
        if layers_per_group is None:
            for layer in layers:
                hidden = layer(hidden)
        else:
            with offload.saving():
                for layer in layers:
                    hidden = layer(hidden)
        found = torch.autograd.grad(hidden.square().sum(), [*layers.parameters()])
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated(), [*found]

    plain, expected = peak(None)
    for layers_per_group in (0, 1, 2):
        offloaded, found = peak(layers_per_group)
        assert offloaded < 0.75 * plain
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
