"""What stands between turns, with real tokenizers."""

import pytest

from rlhf_mp.models.tiny import byte_pair_tokenizer, character_tokenizer
from rlhf_mp.rollout.turns import TurnEncoder

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def chat():
    tokenizer = byte_pair_tokenizer(["some text to learn from"] * 3, 300)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = CHATML
    return tokenizer


def stop(tokenizer):
    return tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_without_a_template_the_observation_is_what_stands_there():
    tokenizer = character_tokenizer("0123456789<>")
    encoder = TurnEncoder(tokenizer, chat=False, stop_token_ids=[tokenizer.eos_token_id], max_tokens=3)
    assert tokenizer.decode(encoder.between([5, tokenizer.eos_token_id], "<12")) == "<12"
    assert tokenizer.decode(encoder.between([5], "<1234")) == "<12"  # at most max_tokens
    assert encoder.opening("") == [] and tokenizer.decode(encoder.opening("7")) == "7"


def test_a_whole_chat_reads_as_the_template_would_write_it(chat):
    encoder = TurnEncoder(chat, chat=True, stop_token_ids=[stop(chat)], max_tokens=50)
    messages = [{"role": "user", "content": "hello"}]
    ids = chat.encode(chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    for answer, observation in (("first", "seen"), ("second", "more")):
        sampled = [*chat.encode(answer), stop(chat)]
        ids += sampled + encoder.between(sampled, observation)
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": observation}]
    assert chat.decode(ids) == chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def test_a_turn_that_was_cut_off_is_closed_by_the_template(chat):
    encoder = TurnEncoder(chat, chat=True, stop_token_ids=[stop(chat)], max_tokens=50)
    cut, whole = chat.encode("some"), [*chat.encode("some"), stop(chat)]
    assert encoder.between(cut, "x") == [stop(chat), *encoder.between(whole, "x")]


def test_a_long_observation_is_cut_and_the_turn_still_begins(chat):
    encoder = TurnEncoder(chat, chat=True, stop_token_ids=[stop(chat)], max_tokens=4)
    text = chat.decode(encoder.between([stop(chat)], "0123456789"))
    assert text == "\n<|im_start|>user\n0123<|im_end|>\n<|im_start|>assistant\n"
