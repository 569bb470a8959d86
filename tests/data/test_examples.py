"""Rows to token ids and masks: only what the policy would write is learned, and bad rows are named."""

import json

import pytest

from rlhf_mp.config.schema import DataConfig
from rlhf_mp.data.conversations import Unsuitable, answered, chat_pieces
from rlhf_mp.data.examples import ExampleReader
from rlhf_mp.errors import ConfigError
from rlhf_mp.models.tiny import character_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz:;|! 0123456789+=\n"
END = 1
# ";" begins a message, "|" ends the role, "!" ends a turn and a newline follows, as in templates people use
TEMPLATE = (
    "{% for m in messages %};{{ m['role'][0] }}|{{ m['content'] }}!\n{% endfor %}"
    "{% if add_generation_prompt %};a|{% endif %}"
)
FORGETFUL = (  # like templates that drop the reasoning of earlier turns
    "{% for m in messages %};{{ m['role'][0] }}|{{ m['content'] if loop.last else '' }}!{% endfor %}"
    "{% if add_generation_prompt %};a|{% endif %}"
)


@pytest.fixture
def tokenizer():
    made = character_tokenizer(LETTERS)
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def read(tmp_path, tokenizer):
    """``read(task, rows, **data)``: the examples."""

    def examples(task, rows, stop=("!",), **data):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        stop_ids = [END, *tokenizer.convert_tokens_to_ids([*stop])]
        return ExampleReader(task, tokenizer, stop_ids, DataConfig(max_length=60, **data)).read(
            [str(tmp_path / "rows.jsonl")]
        )

    return examples


def shown(tokenizer, sequence):
    """The text, and under every learned token a hat."""
    tokens = [tokenizer.convert_ids_to_tokens(i) for i in sequence.ids]
    text = "".join("." if t == "<eos>" else "/" if t == "\n" else t for t in tokens)
    return text, "".join("^" if m else " " for m in sequence.mask)


def test_of_a_raw_text_the_response_and_the_end_are_learned(read, tokenizer):
    (example,) = read("sft", [{"prompt": "1+1=", "response": "2"}], apply_chat_template=False).examples
    assert [shown(tokenizer, s) for s in example.sequences] == [("1+1=2.", "    ^^")]


def test_of_a_conversation_the_assistants_turns_are_learned_up_to_their_ends(read, tokenizer):
    messages = [
        {"role": "system", "content": "be"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "r"},
        {"role": "assistant", "content": "no"},
    ]
    (example,) = read("sft", [{"chat": messages}], messages_key="chat").examples
    assert [shown(tokenizer, s) for s in example.sequences] == [
        (";s|be!/;u|q!/;a|yes!/;u|r!/;a|no!/", "                ^^^^          ^^^ "),
    ]


def test_a_template_that_never_ends_a_turn_gets_an_end(read, tokenizer):
    (example,) = read("sft", [{"prompt": "q", "response": "no"}], stop=()).examples
    assert [shown(tokenizer, s) for s in example.sequences] == [(";u|q!/;a|no!/.", "         ^^^^^")]


def test_the_prompt_of_an_example_is_what_a_sampler_would_be_given(read, tokenizer):
    """Token for token: otherwise the policy would be trained to continue something it never sees."""
    (example,) = read("sft", [{"prompt": "q", "response": "no"}], system_prompt="be").examples
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "q"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    (sequence,) = example.sequences
    assert list(sequence.ids[: len(prompt)]) == prompt and not any(sequence.mask[: len(prompt)])


@pytest.mark.parametrize(
    "chosen",
    [
        "yes",
        [{"role": "assistant", "content": "yes"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes"}],
    ],
    ids=["text", "messages", "whole conversation"],
)
def test_a_pair_is_the_better_response_first_however_it_is_written(read, tokenizer, chosen):
    row = {"prompt": "q", "chosen": chosen, "rejected": "no", "by": 2}
    (example,) = read("reward_model", [row], margin_key="by").examples
    assert [shown(tokenizer, s)[0] for s in example.sequences] == [";u|q!/;a|yes!/", ";u|q!/;a|no!/"]
    better, worse = example.trajectories(7)
    assert (better.reward, worse.reward, better.group_id, worse.group_id) == (2.0, 0.0, 7, 7)
    assert better.response_ids == list(example.sequences[0].ids)
    assert better.loss_mask == [bool(m) for m in example.sequences[0].mask]


def test_a_system_prompt_stays_in_front_of_a_repeated_conversation():
    data = DataConfig(system_prompt="be")
    again = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert answered("q", again, data) == [{"role": "system", "content": "be"}, *again]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_row(read, tokenizer):
    tokenizer.chat_template = FORGETFUL
    messages = [
        {"role": r, "content": c} for r, c in [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    ]
    with pytest.raises(Unsuitable):
        chat_pieces(messages, tokenizer)
    with pytest.raises(ConfigError, match=r"rows.jsonl:2 = .*one row of each answer"):
        read("sft", [{"chat": messages[:2]}, {"chat": messages}], messages_key="chat")


def test_every_bad_row_is_named_before_anything_is_tokenized(read):
    rows = [
        {"prompt": "q", "response": "a"},
        {"prompt": "q"},
        {"prompt": "", "response": "a"},
        {"prompt": "q", "response": ["a"]},
    ]
    with pytest.raises(ConfigError) as error:
        read("sft", rows)
    text = str(error.value)
    assert "3 problem(s)" in text and all(f"rows.jsonl:{n} = " in text for n in (2, 3, 4))


def test_too_long_examples_are_dropped_and_counted_or_refused(read):
    rows = [{"prompt": "q", "response": "a" * n} for n in (1, 70, 3)]
    found = read("sft", rows)
    assert len(found.examples) == 2 and found.num_dropped == 1
    with pytest.raises(ConfigError, match="1 of 3 examples are longer, up to 81 tokens"):
        read("sft", rows, filter_overlong_prompts=False)
    with pytest.raises(ConfigError, match="drops all 1 examples\n    fix: data.max_length=81 keeps all"):
        read("sft", rows[1:2])


def test_only_the_first_rows_are_read_where_so_many_are_wanted(tmp_path, tokenizer):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "q", "response": "a"}\n' * 5)
    reader = ExampleReader("sft", tokenizer, [END], DataConfig(max_length=60))
    rows = str(tmp_path / "rows.jsonl")
    found = reader.read([rows, rows], at_most=3)
    assert (len(found.examples), found.sizes) == (6, [3, 3])


def test_without_a_chat_template_there_is_a_way_out(read, tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="data.apply_chat_template=false"):
        read("sft", [{"prompt": "q", "response": "a"}])
