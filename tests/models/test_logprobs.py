"""Log-probs and entropy: numbers by hand, gradients on paper, and which columns of the logits are asked for."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import TokenBatch, Trajectory
from rlhf_mp.models.logprobs import policy_output, token_logprobs_and_entropy


def test_logprobs_and_entropy_by_hand():
    logits = torch.log(torch.tensor([[[0.2, 0.8, 1e-30], [0.25, 0.25, 0.5]]])) + 3.0  # a shift changes nothing
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([[1, 0]]), entropy_grad=True)
    torch.testing.assert_close(logprobs.exp(), torch.tensor([[0.8, 0.25]]))
    # -0.2 ln 0.2 - 0.8 ln 0.8 = 0.5004;  2 * 0.25 ln 4 + 0.5 ln 2 = 1.5 ln 2
    torch.testing.assert_close(entropy, torch.tensor([[0.5004, 1.5 * math.log(2)]]), atol=1e-4, rtol=0)


def test_equal_logits_have_the_entropy_of_the_vocabulary():
    _, entropy = token_logprobs_and_entropy(torch.full((1, 1, 64), 5.0), torch.tensor([[3]]), entropy_grad=False)
    assert entropy.item() == pytest.approx(math.log(64), rel=1e-5)


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[[1e4, -1e4, 0.0]]])
    logprobs, entropy = token_logprobs_and_entropy(logits, torch.tensor([[0]]), entropy_grad=False)
    assert (logprobs.item(), entropy.item()) == (0.0, 0.0)


@pytest.mark.parametrize("entropy_grad", [False, True])
def test_gradients_are_those_of_the_definition(entropy_grad):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)
    tokens = torch.randint(5, (2, 3), generator=generator)
    weights, others = torch.randn(2, 2, 3, generator=generator, dtype=torch.float64)

    naive = logits.clone().requires_grad_()
    log_p = naive.log_softmax(-1)
    loss = (log_p.gather(-1, tokens[..., None]).squeeze(-1) * weights).sum()
    if entropy_grad:
        loss = loss - ((log_p.exp() * log_p).sum(-1) * others).sum()
    loss.backward()

    ours = logits.clone().requires_grad_()
    logprobs, entropy = token_logprobs_and_entropy(ours, tokens, entropy_grad=entropy_grad)
    assert entropy.requires_grad == entropy_grad
    ((logprobs * weights).sum() + (entropy * others).sum()).backward()
    torch.testing.assert_close(ours.grad, naive.grad)


class Bigram(nn.Module):
    """Logits depend on the token before alone: a table whose log-softmax a test can look up."""

    def __init__(self, vocab: int = 6, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.head = nn.Linear(vocab, vocab, bias=False, dtype=dtype)  # of a one-hot hidden state: a table
        self.head.weight.data = torch.randn(vocab, vocab, generator=torch.Generator().manual_seed(3)).to(dtype)
        self.columns = []

    @property
    def table(self) -> torch.Tensor:
        return self.head.weight.T

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids, logits_to_keep, use_cache):
        self.columns.append(logits_to_keep.tolist())
        hidden = nn.functional.one_hot(input_ids[:, logits_to_keep], len(self.head.weight))
        return SimpleNamespace(logits=self.head(hidden.to(self.head.weight.dtype)))


class Capped(Bigram):
    """Some models change their logits after the head."""

    def forward(self, **inputs):
        logits = super().forward(**inputs).logits
        return SimpleNamespace(logits=30 * torch.tanh(logits / 30))


CHUNKS = [0, 1, 10**6]  # bytes: all at once, a position at a time, more than there are


def batch_of(*shapes: tuple[int, int]) -> TokenBatch:
    generator = torch.Generator().manual_seed(4)
    made = []
    for prompt, response in shapes:
        ids = torch.randint(6, (prompt + response,), generator=generator).tolist()
        made.append(Trajectory(ids[:prompt], ids[prompt:], [0.0] * response, [True] * response, 0.0, 0, 0, "stop"))
    return collate(made)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_token_is_scored_by_the_one_before_it_after_temperature(chunk, dtype):
    model, batch = Bigram(dtype=dtype), batch_of((2, 3), (4, 1), (1, 2))
    output = policy_output(model, batch, temperature=0.5, entropy_grad=False, logits_chunk_bytes=chunk)
    log_p = (model.table.float() / 0.5).log_softmax(-1)
    for b, t in batch.mask.nonzero().tolist():
        before, token = batch.tokens[b, t - 1], batch.tokens[b, t]
        assert output.logprobs[b, t].item() == pytest.approx(log_p[before, token].item(), abs=1e-5)
        entropy = -(log_p[before].exp() * log_p[before]).sum().item()
        assert output.entropy[b, t].item() == pytest.approx(entropy, abs=1e-5)
    assert output.logprobs.dtype == torch.float32 and output.logprobs.shape == batch.tokens.shape


@pytest.mark.parametrize("chunk", CHUNKS)
def test_logits_are_computed_only_where_some_row_has_sampled(chunk):
    model, batch = Bigram(), batch_of((3, 2), (4, 2))
    output = policy_output(model, batch, temperature=1.0, entropy_grad=False, logits_chunk_bytes=chunk)
    assert model.columns == [[2, 3, 4]]  # tokens 3, 4, 5 of six
    assert not output.logprobs[:, :3].any() and not output.entropy[:, :3].any()


@pytest.mark.parametrize("chunk", CHUNKS)
def test_a_micro_batch_that_counts_for_nothing_still_runs(chunk):
    model = Bigram()
    batch = batch_of((3, 2)).select([])
    output = policy_output(model, batch, temperature=1.0, entropy_grad=True, logits_chunk_bytes=chunk)
    assert output.logprobs.shape == (1, 2) and not batch.mask.any()
    (output.logprobs * batch.mask).sum().backward()
    assert not model.head.weight.grad.any()


def test_a_model_that_caps_its_logits_is_refused_in_chunks_and_right_without():
    model, batch = Capped(), batch_of((2, 3))
    with pytest.raises(ValueError, match="Capped scales or caps.*logits_chunk_mb=0"):
        policy_output(model, batch, temperature=1.0, entropy_grad=False, logits_chunk_bytes=10**6)
    assert "forward" not in vars(model.head)  # the head is itself again
    output = policy_output(model, batch, temperature=1.0, entropy_grad=False)
    capped = (30 * torch.tanh(model.table / 30)).log_softmax(-1)
    before, token = batch.tokens[0, 1], batch.tokens[0, 2]
    assert output.logprobs[0, 2].item() == pytest.approx(capped[before, token].item(), abs=1e-5)
