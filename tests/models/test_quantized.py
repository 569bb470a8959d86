"""A base in 4 or 8 bits: how far it is from the original, that it is never changed, and what engines are handed."""

import pytest
import torch
from test_lora import TOKENS, adapted, full, logits

from rlhf_mp.config.schema import ModelConfig
from rlhf_mp.models.heads import PolicyHead, RewardHead, ValueHead
from rlhf_mp.models.lora import add_adapter
from rlhf_mp.models.merge import checkpoint_tensors
from rlhf_mp.models.quantized import is_quantized

pytest.importorskip("bitsandbytes")


KINDS = pytest.mark.parametrize("kind", ["nf4", "int8"])


def quantized(path, kind, head=None, dtype=torch.float32):
    head = head or PolicyHead()
    module = head.load(str(path), dtype, quantization=kind)
    add_adapter(module, module.model.layers, ModelConfig(str(path), lora_rank=4, lora_alpha=12), head, dtype)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


@pytest.mark.parametrize(("kind", "bits"), [("nf4", 4), ("int8", 8)])
def test_the_matrices_of_layers_take_so_many_bits_and_the_rest_is_as_it_was(tiny_checkpoint, kind, bits):
    module = quantized(tiny_checkpoint, kind)
    packed = {name: p for name, p in module.named_parameters() if is_quantized(p)}
    assert len(packed) == 4 * 7
    plain = PolicyHead().load(str(tiny_checkpoint), torch.float32)
    whole = plain.model.layers[0].mlp.up_proj.weight
    assert packed["model.layers.0.mlp.up_proj.base_layer.weight"].nbytes == whole.numel() * bits // 8
    assert torch.equal(module.model.embed_tokens.weight, plain.model.embed_tokens.weight)


def naive_nf4(blocks: torch.Tensor) -> torch.Tensor:
    """Nearest of the 16 values of NormalFloat, in units of each block's largest."""
    levels = torch.tensor([
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ])  # fmt: skip
    scale = blocks.abs().amax(-1, keepdim=True)
    return levels[(blocks[..., None] / scale[..., None] - levels).abs().argmin(-1)] * scale


def naive_int8(matrix: torch.Tensor) -> torch.Tensor:
    """Nearest of 255 whole numbers, in units of a 127th of each row's largest."""
    half = matrix.half().double()  # as bitsandbytes reads it
    unit = half.abs().amax(1, keepdim=True) / 127
    return ((half / unit).round() * unit).float()


def test_unpacked_matrices_are_rows_of_whole_numbers(tiny_checkpoint):
    base = PolicyHead().load(str(tiny_checkpoint), torch.float32, quantization="int8")
    original = dict(PolicyHead().load(str(tiny_checkpoint), torch.float32).named_parameters())
    for tensor in checkpoint_tensors(base):
        if is_quantized(tensor.parts[0]):
            expected = naive_int8(original[tensor.name].detach())
            unit = expected.abs().amax(1, keepdim=True) / 127
            off = (tensor.value() - expected).abs()
            assert (off < 1.01 * unit).all()  # where a value lies in the middle between two, either is near
            assert (off > 0.01 * unit).float().mean() < 0.002


def test_unpacked_matrices_are_nf4_of_the_checkpoints(tiny_checkpoint):
    base = PolicyHead().load(str(tiny_checkpoint), torch.float32, quantization="nf4")
    original = dict(PolicyHead().load(str(tiny_checkpoint), torch.float32).named_parameters())
    for tensor in checkpoint_tensors(base):
        if is_quantized(tensor.parts[0]):
            expected = naive_nf4(original[tensor.name].detach().view(-1, 64)).view(original[tensor.name].shape)
            # the scales are in 8 bits themselves
            torch.testing.assert_close(tensor.value(), expected, atol=0.01 * expected.abs().max().item(), rtol=0.02)


@KINDS
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_merged_weights_compute_what_quantized_base_and_adapter_do(tiny_checkpoint, kind, dtype, close):
    module = quantized(tiny_checkpoint, kind, dtype=dtype)
    first = logits(module)
    merged = PolicyHead().load(str(tiny_checkpoint), torch.float32)
    assert full(module).keys() == dict(merged.named_parameters()).keys()
    far = (logits(merged) - first).abs().max()
    merged.load_state_dict(full(module), strict=False)
    assert (logits(merged) - first).abs().max() < close < far
    assert torch.equal(logits(module), first)  # scoring and merging have changed nothing


@KINDS
def test_scores_are_of_the_model_that_trains(tiny_checkpoint, kind):
    """The same log-probs with and without gradient, before and after a score."""
    module = quantized(tiny_checkpoint, kind)
    scored = logits(module)
    module.train()
    trained = module(input_ids=TOKENS).logits
    assert torch.equal(scored, trained.detach())
    trained.sum().backward()
    grads = [p.grad for name, p in module.named_parameters() if "lora_" in name]
    assert len(grads) == 2 * 28 and all(grad.abs().max() > 0 for grad in grads)


@KINDS
def test_gradients_are_those_of_a_whole_model_of_the_unpacked_matrices(tiny_checkpoint, kind):
    packed = quantized(tiny_checkpoint, kind)
    base = PolicyHead().load(str(tiny_checkpoint), torch.float32, quantization=kind)
    whole = adapted(tiny_checkpoint)
    own = dict(whole.named_parameters())
    for tensor in checkpoint_tensors(base):
        name = tensor.name if tensor.name in own else tensor.name.replace(".weight", ".base_layer.weight")
        own[name].data.copy_(tensor.value())
    for name, parameter in packed.named_parameters():
        if "lora_" in name:
            own[name].data.copy_(parameter)
    for module in (packed, whole):
        module(input_ids=TOKENS).logits.square().sum().backward()
    grads = {name: p.grad for name, p in packed.named_parameters() if "lora_" in name}
    assert len(grads) == 2 * 28
    for name, grad in grads.items():
        torch.testing.assert_close(grad, own[name].grad, rtol=1e-4, atol=1e-4 * own[name].grad.abs().max().item())


@KINDS
def test_its_state_dict_is_the_adapter_alone(tiny_checkpoint, kind):
    assert quantized(tiny_checkpoint, kind).state_dict().keys() == adapted(tiny_checkpoint).state_dict().keys()
    critic = quantized(tiny_checkpoint, kind, ValueHead())
    assert {name for name in critic.state_dict() if "lora_" not in name} == {"score.weight", "score.bias"}
    assert not is_quantized(critic.score.weight)


@pytest.mark.parametrize(("kind", "off"), [("nf4", 1e-2), ("int8", 1e-3)])
def test_a_reward_model_scores_by_its_unpacked_matrices_and_its_head_stays_whole(reward_checkpoint, kind, off):
    head = RewardHead()
    packed = head.load(str(reward_checkpoint), torch.float32, quantization=kind).eval()
    whole = head.load(str(reward_checkpoint), torch.float32).eval()
    first = whole(input_ids=TOKENS)
    assert not is_quantized(packed.score.weight) and torch.equal(packed.score.weight, whole.score.weight)
    whole.load_state_dict({tensor.name: tensor.value() for tensor in checkpoint_tensors(packed)}, strict=False)
    close = (packed(input_ids=TOKENS) - whole(input_ids=TOKENS)).abs().max()
    far = (packed(input_ids=TOKENS) - first).abs().max()
    assert close < 1e-4 < off < far
