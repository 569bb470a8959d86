"""Sequences in one row without padding give what each gives alone: values, gradients, and nothing between them."""

import pytest
import torch

from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import TokenBatch, Trajectory
from rlhf_mp.models.heads import Head, PolicyHead, RewardHead, ValueHead
from rlhf_mp.models.packed_attention import check_packing
from rlhf_mp.models.packing import packed_row
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint

HEADS = {
    "policy": PolicyHead(0.7, entropy_grad=True),
    "policy in chunks": PolicyHead(0.7, entropy_grad=True, logits_chunk_bytes=3 * 4 * 32),
    "critic": ValueHead(),
    "reward model": RewardHead(),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("packing")
    shape = TinyShape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16)
    make_checkpoint(folder, character_tokenizer("0123456789+="), shape, std=0.2)
    return str(folder)


def trajectories() -> list[Trajectory]:
    """Of unequal lengths; the third has a token in its response that the policy did not choose."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for i, (prompt, response) in enumerate([(3, 4), (1, 9), (5, 3), (2, 1), (7, 3)]):
        ids = torch.randint(2, 14, (prompt + response,), generator=generator).tolist()
        mask = [not (i == 2 and t == 1) for t in range(response)]
        made.append(Trajectory(ids[:prompt], ids[prompt:], [0.0] * response, mask, 0.0, 0, 0, "stop"))
    return made


def packing(head: Head) -> Head:
    return type(head)(**{**vars(head), "packed": True})


def loaded(head: Head, path: str) -> torch.nn.Module:
    model = head.load(path, torch.float32)
    if hasattr(model, "score"):  # a new head is 0: let it say something
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(5))
    return model


def result(head: Head, model: torch.nn.Module, batch: TokenBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Everything the head says where it counts, and the gradients of a loss that weighs each number differently."""
    output = head.forward(model, batch)
    parts = [x if x.dim() == 1 else x * batch.mask for x in vars(output).values()]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(i)) for i, x in enumerate(parts)]
    sum((x * w).sum() for x, w in zip(parts, weights, strict=True)).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return torch.cat([x.detach().flatten() for x in parts]), gradients


@pytest.mark.parametrize("name", HEADS)
def test_a_packed_micro_batch_gives_what_a_padded_one_does(path, name):
    head, batch = HEADS[name], collate(trajectories())
    expected, gradients = result(head, loaded(head, path), batch)
    found, packed_gradients = result(packing(head), loaded(packing(head), path), batch)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert packed_gradients.keys() == gradients.keys() and gradients
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(packed_gradients[parameter], gradient, atol=1e-5 * gradient.abs().max(), rtol=1e-5)


def test_scores_are_those_of_each_sequence_alone(path):
    head = packing(PolicyHead())
    model, whole = loaded(head, path), collate(trajectories())
    together = head.forward(model, whole).logprobs * whole.mask
    for row, trajectory in enumerate(trajectories()):
        ids = torch.tensor([trajectory.prompt_ids + trajectory.response_ids])
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)
        own = log_p[:-1].gather(-1, ids[0, 1:, None])[:, 0] * whole.mask[row, 1 : ids.shape[1]]
        torch.testing.assert_close(together[row, 1 : ids.shape[1]], own, atol=2e-6, rtol=1e-5)


def test_no_sequence_sees_another(path):
    """Other neighbours, the same bits."""
    head = packing(PolicyHead())
    model, whole = loaded(head, path), collate(trajectories())
    other = collate(trajectories())
    other.tokens[[0, 2, 3, 4]] = 9
    found = [head.forward(model, batch).logprobs[1] for batch in (whole, other)]
    assert torch.equal(found[0] * whole.mask[1], found[1] * whole.mask[1])


@pytest.mark.parametrize("head", [PolicyHead(), PolicyHead(logits_chunk_bytes=512), ValueHead()])
def test_an_empty_micro_batch_still_runs(path, head):
    batch = collate(trajectories()).select([])
    found, gradients = result(packing(head), loaded(packing(head), path), batch)
    assert not found.any() and not any(gradient.any() for gradient in gradients.values())


def test_a_row_has_every_token_once_and_counts_positions_from_0_in_each_sequence():
    batch = collate(trajectories()[:3])  # 7, 10 and 8 tokens
    row = packed_row(batch)
    assert row.tokens.tolist() == [[t for made in trajectories()[:3] for t in made.prompt_ids + made.response_ids]]
    assert row.positions.tolist() == [[*range(7), *range(10), *range(8)]]
    assert (row.starts.tolist(), row.lengths, row.longest) == ([0, 7, 17, 25], (7, 10, 8), 10)
    assert row.tokens[0, row.last].tolist() == [made.response_ids[-1] for made in trajectories()[:3]]
    home = row.home(row.tokens[0, row.source + 1].float())
    assert torch.equal(home[:, 1:], batch.tokens[:, 1:].float()) and not home[:, 0].any()


def test_a_window_hides_what_is_further_back(path):
    """Against the whole matrix of scores."""
    from rlhf_mp.models.packed_attention import packed_sdpa

    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 9, 4, generator=generator).unbind()
    lengths, window = (3, 6), 4
    found, _ = packed_sdpa(torch.nn.Module(), q, k, v, None, lengths, window, scaling=0.5)
    sequence = torch.tensor([0] * 3 + [1] * 6)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    visible = (distance >= 0) & (distance < window) & (sequence[:, None] == sequence)
    scores = (q @ k.transpose(-1, -2) * 0.5).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(found, (scores.softmax(-1) @ v).transpose(1, 2))


def test_a_model_whose_layers_would_mix_sequences_is_refused(path):
    model = PolicyHead(packed=True).load(path, torch.float32)
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="linear_attention.*use_remove_padding=false"):
        check_packing(model)
