"""Small Qwen3-shaped checkpoints with a tokenizer, made from nothing: for the quickstart, tests and benchmarks.

  python -m rlhf_mp.models.tiny --tokenizer-from data/gsm8k/train.jsonl --text-keys question,answer --out runs/x/model

trains a byte-pair tokenizer on the texts of a jsonl or parquet file and writes it beside random weights.
"""

import argparse
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

from rlhf_mp.data.rows import read_rows

PAD, EOS = "<pad>", "<eos>"
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a Qwen3 decoder."""

    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    context: int = 1024
    tied: bool = True


def character_tokenizer(characters: str) -> PreTrainedTokenizerFast:
    """One token per character; the chat template adds nothing."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD, special=True), AddedToken(EOS, special=True)])
    return _finished(tokenizer, PLAIN_TEMPLATE)


def byte_pair_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on ``texts``, with a role-labelled chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finished(tokenizer, CHAT_TEMPLATE)


def _finished(tokenizer: Tokenizer, chat_template: str) -> PreTrainedTokenizerFast:
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    wrapped.chat_template = chat_template
    return wrapped


def make_checkpoint(
    directory: Path,
    tokenizer: PreTrainedTokenizerFast,
    shape: TinyShape = TinyShape(),
    *,
    seed: int = 0,
    std: float = 0.02,
) -> None:
    """Write a randomly initialised model (float32, normal with ``std``) and ``tokenizer`` to ``directory``."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 32) * 32,  # divisible by any small tensor-parallel size
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        initializer_range=std,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main(argv: list[str]) -> None:
    shape = TinyShape()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer-from", required=True, metavar="FILE", help="the texts to learn a vocabulary from")
    parser.add_argument("--text-keys", default="question,answer", help="columns with the texts (%(default)s)")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens (%(default)s)")
    parser.add_argument("--hidden", type=int, default=shape.hidden, help="width (%(default)s)")
    parser.add_argument("--layers", type=int, default=shape.layers, help="depth (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (%(default)s)")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    args = parser.parse_args(argv)
    keys = args.text_keys.split(",")
    texts = (row[key] for _, row in read_rows(args.tokenizer_from) for key in keys)
    tokenizer = byte_pair_tokenizer(texts, args.vocab_size)
    make_checkpoint(args.out, tokenizer, TinyShape(hidden=args.hidden, layers=args.layers), seed=args.seed)
    print(f"{args.out}: {len(tokenizer)} tokens, {args.layers} layers of width {args.hidden}")


if __name__ == "__main__":
    main(sys.argv[1:])
