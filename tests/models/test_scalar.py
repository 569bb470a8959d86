"""Critics and reward models: new heads are 0, checkpoints are those of transformers, padding does not matter."""

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    OlmoConfig,
    Qwen2Config,
)

from rlhf_mp.data.collate import collate
from rlhf_mp.data.types import Trajectory
from rlhf_mp.errors import ConfigError
from rlhf_mp.models.heads import RewardHead, ValueHead
from rlhf_mp.models.hf import save_checkpoint
from rlhf_mp.models.tiny import TinyShape, character_tokenizer, make_checkpoint

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
FAMILIES = {
    "llama": LlamaConfig(vocab_size=40, num_key_value_heads=1, **SMALL),
    "qwen2": Qwen2Config(vocab_size=40, num_key_value_heads=1, tie_word_embeddings=True, **SMALL),
    "olmo": OlmoConfig(vocab_size=40, **SMALL),  # transformers has no token classifier of it
    "gpt2": GPT2Config(vocab_size=40, n_embd=32, n_layer=2, n_head=2),  # dropout of 0.1, another name for its decoder
}
HEADS = {"values": ValueHead(), "rewards": RewardHead()}


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    shape = TinyShape(hidden=32, layers=2, heads=2, kv_heads=1, head_dim=16)
    make_checkpoint(folder, character_tokenizer("0123456789+="), shape, std=0.2)
    return folder


def trained(head, path: Path):
    """A model whose head is no longer new."""
    model = head.load(str(path), torch.float32)
    with torch.no_grad():
        for i, parameter in enumerate(model.score.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)))
    return model


def batch():
    """Rows of 7, 10 and 6 tokens, padded with 0."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for prompt, response in [(3, 4), (1, 9), (5, 1)]:
        ids = torch.randint(2, 14, (prompt + response,), generator=generator).tolist()
        made.append(Trajectory(ids[:prompt], ids[prompt:], [0.0] * response, [True] * response, 0.0, 0, 0, "stop"))
    return collate(made)


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_a_new_head_says_0_of_everything(path, head):
    b = batch()
    assert torch.count_nonzero(head.score(head.forward(head.load(str(path), torch.float32), b), b)) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_any_decoder_can_have_one(tmp_path, family, head):
    AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path)
    model = trained(head, tmp_path).train()
    b = batch()
    first, second = (head.score(head.forward(model, b), b) for _ in range(2))
    assert torch.equal(first, second)  # no dropout
    assert torch.count_nonzero(first) > 0
    body = AutoModelForCausalLM.from_pretrained(tmp_path).base_model.state_dict()
    found = model.base_model.state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in body.items())


def test_transformers_reads_a_critic_and_so_do_we(path, tmp_path):
    model, head = trained(ValueHead(), path), ValueHead()
    save_checkpoint(model.named_parameters(), str(path), tmp_path, torch.float32, head.saved_config)
    theirs, info = AutoModelForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and theirs.config.num_labels == 1
    b = batch()
    expected = theirs.eval()(input_ids=b.tokens).logits[:, :-1, 0]  # of the token before each
    for critic in (model, head.load(str(tmp_path), torch.float32)):
        values = head.forward(critic, b).values
        torch.testing.assert_close(values[:, 1:], expected, atol=1e-5, rtol=0)
        assert torch.equal(values[:, 0], torch.zeros(3))


def test_transformers_reads_a_reward_model_and_so_do_we(path, tmp_path):
    model, head = trained(RewardHead(), path), RewardHead()
    save_checkpoint(model.named_parameters(), str(path), tmp_path, torch.float32, head.saved_config)
    theirs, info = AutoModelForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    b = batch()
    rows = [b.tokens[i : i + 1, :length] for i, length in enumerate(b.lengths.tolist())]
    expected = torch.cat([theirs.eval()(input_ids=row).logits[0] for row in rows])
    for ours in (model, head.load(str(tmp_path), torch.float32)):
        torch.testing.assert_close(head.forward(ours, b).rewards, expected, atol=1e-5, rtol=0)


def test_a_critic_may_start_from_a_reward_model(path, tmp_path):
    reward = trained(RewardHead(), path)
    save_checkpoint(reward.named_parameters(), str(path), tmp_path, torch.float32, RewardHead().saved_config)
    critic = ValueHead().load(str(tmp_path), torch.float32)
    assert torch.equal(critic.score.weight, reward.score.weight) and critic.score.bias.item() == 0
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["Qwen3ForSequenceClassification"]


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_what_stands_in_the_padding_does_not_matter(path, head):
    model, b, other = trained(head, path), batch(), batch()
    other.tokens[torch.arange(other.tokens.shape[1]) >= other.lengths[:, None]] = 9
    scores = [head.score(head.forward(model, x), x) for x in (b, other)]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=0)


def test_an_empty_micro_batch_is_run_like_any_other(path):
    stub = batch().silenced()
    for head in HEADS.values():
        assert head.score(head.forward(trained(head, path), stub), stub).shape == head.like(stub).shape


def test_a_model_that_transformers_does_not_contain_is_refused(tmp_path, monkeypatch):
    from rlhf_mp.models import scalar

    monkeypatch.setattr(scalar, "MODEL_MAPPING", {})
    MambaConfig(hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no decoder of type mamba"):
        ValueHead().load(str(tmp_path), torch.float32)
