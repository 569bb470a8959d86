"""The demonstrations that the examples of several turns start from; their training is what the examples show."""

from pathlib import Path

import pytest

from rlhf_mp import episode_quickstart
from rlhf_mp.config.load import load_config
from rlhf_mp.episode_quickstart import CHARACTERS, EXAMPLES, demonstrations
from rlhf_mp.models.tiny import character_tokenizer

CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.fixture(scope="module")
def tokenizer():
    return character_tokenizer(CHARACTERS)


def played(name, tokenizer, monkeypatch):
    """Per episode: its text with ends of turns as "|", and what of it the player said."""
    monkeypatch.setattr(episode_quickstart, "NUM_DEMONSTRATIONS", 40)
    batch = demonstrations(name, tokenizer, seed=3)
    for row, mask, length in zip(batch.tokens.tolist(), batch.mask.tolist(), batch.lengths.tolist(), strict=True):
        tokens = [tokenizer.decode([token]).replace("<eos>", "|") for token in row[:length]]
        yield "".join(tokens), "".join(token for token, chosen in zip(tokens, mask, strict=False) if chosen)


def test_the_player_asks_the_calculator_or_guesses_and_repeats_what_it_is_told(tokenizer, monkeypatch):
    asked = 0
    for text, said in played("calculator", tokenizer, monkeypatch):
        question, _, rest = text.partition("=")
        a, b = map(int, question.split("*"))
        if rest.startswith("?"):
            asked += 1
            assert rest == f"?{a}*{b}|={a * b};{a * b}|" and said == f"?{a}*{b}|{a * b}|"
        else:
            assert rest == said and said.rstrip("|").isdigit()
    assert 8 < asked < 32  # of 40


def test_the_player_guesses_four_times_at_most_and_is_told_the_direction(tokenizer, monkeypatch):
    for text, said in played("guess", tokenizer, monkeypatch):
        guesses = said.rstrip("|").split("|")
        assert 1 <= len(guesses) <= 4 and all(0 <= int(guess) <= 15 for guess in guesses)
        assert text.startswith("?") and text.count("<") + text.count(">") == len(guesses) - 1


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_demonstrations_fit_the_config(name, tokenizer, monkeypatch):
    config = load_config(CONFIGS / f"{name}.yaml")
    episodes = [*played(name, tokenizer, monkeypatch)]
    assert max(len(text) for text, _ in episodes) <= config.data.max_prompt_length + config.data.max_response_length
    turns = [turn for _, said in episodes for turn in said.rstrip("|").split("|")]
    assert max(map(len, turns)) < config.actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn
