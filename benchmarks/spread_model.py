"""The realistic workload's model: 20 M parameters, 4096 tokens, responses from 1 token to the limit.

Nothing is downloaded. Sentences of a made-up language, with digits among the words, train a byte-level BPE tokenizer
and then, for a minute, the model. Afterwards it continues any prompt with such words and stops at each with about the
same small probability: in one group of responses some end at once and some reach the limit.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from rlhf_mp.models.hf import load_causal_lm, load_tokenizer
from rlhf_mp.models.tiny import TinyShape, byte_pair_tokenizer, make_checkpoint

SHAPE = TinyShape(hidden=384, layers=11, heads=6, kv_heads=2, head_dim=64, context=512)
NUM_WORDS, VOCAB_SIZE = 3000, 4096
DIGIT_SHARE = 0.1  # of the words of a sentence; nearly every response has a last number
MEAN_RESPONSE_WORDS = 50  # of the training data; after so short a training the model goes on about twice as long
PROMPT_WORDS = (12, 44)  # a little over one token each
NUM_PROMPTS = 4096
ANSWER = "7"  # of every prompt: what a policy finds within few steps
SFT_STEPS, SFT_BATCH, SFT_TOKENS, SFT_LR = 80, 16, 96, 1e-3  # cut at SFT_TOKENS: stopping does not depend on position


def words(rng: random.Random) -> list[str]:
    """NUM_WORDS different words of one to four syllables."""
    syllables = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    found: dict[str, None] = {}
    while len(found) < NUM_WORDS:
        found["".join(rng.choices(syllables, k=rng.randint(1, 4)))] = None
    return list(found)


def sentence(vocabulary: list[str], num_words: int, rng: random.Random) -> str:
    """Words by Zipf's law, word i with weight 1 / (i + 10), and digits from 1 to 9."""
    weights = [1 / (i + 10) for i in range(len(vocabulary))]
    chosen = rng.choices(vocabulary, weights, k=num_words)
    return " ".join(str(rng.randint(1, 9)) if rng.random() < DIGIT_SHARE else word for word in chosen)


def prompt(vocabulary: list[str], rng: random.Random) -> str:
    return sentence(vocabulary, rng.randint(*PROMPT_WORDS), rng) + ":"


def samples(tokenizer: PreTrainedTokenizerFast, vocabulary: list[str], rng: random.Random) -> Iterator[list[int]]:
    """Endless prompt + response + end token as ids; a response's length in words is exponentially distributed."""
    while True:
        num_words = 1 + int(rng.expovariate(1 / MEAN_RESPONSE_WORDS))
        text = prompt(vocabulary, rng) + " " + sentence(vocabulary, num_words, rng)
        yield (tokenizer.encode(text) + [tokenizer.eos_token_id])[:SFT_TOKENS]


def warm_start(model: AutoModelForCausalLM, ids: Iterator[list[int]]) -> float:
    """A short supervised training; return the last loss in nats per token."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, weight_decay=0.0)
    for _ in range(SFT_STEPS):
        batch = [torch.tensor(next(ids)) for _ in range(SFT_BATCH)]
        tokens = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        labels = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=-100)
        loss = model(input_ids=tokens, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def build(directory: Path, seed: int = 0) -> None:
    """Write ``directory/model`` (a Hugging Face checkpoint) and ``directory/train.jsonl`` (prompt, answer)."""
    rng = random.Random(seed)
    vocabulary = words(rng)
    corpus = [prompt(vocabulary, rng) + " " + sentence(vocabulary, 100, rng) for _ in range(300)]
    model_folder = directory / "model"
    make_checkpoint(model_folder, byte_pair_tokenizer([*corpus, " ".join(vocabulary)], VOCAB_SIZE), SHAPE, seed=seed)
    tokenizer, model = load_tokenizer(str(model_folder)), load_causal_lm(str(model_folder), torch.float32)
    loss = warm_start(model, samples(tokenizer, vocabulary, rng))
    print(f"{directory}: {model.num_parameters() / 1e6:.1f} M parameters, {len(tokenizer)} tokens, loss {loss:.2f}")
    model.save_pretrained(model_folder)
    rows = [{"prompt": prompt(vocabulary, rng), "answer": ANSWER} for _ in range(NUM_PROMPTS)]
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
