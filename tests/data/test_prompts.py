import copy
import hashlib
import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_mp.config.schema import DataConfig
from rlhf_mp.data import prompts
from rlhf_mp.data.prompt_table import DataFile, changed_files, compare_files
from rlhf_mp.data.prompts import Prompt, given_prompts, load_prompts
from rlhf_mp.errors import CheckpointError, ConfigError

WORDS = ["<pad>", "<s>", "<user>", "<system>", "<assistant>", "?", "one", "two", "three", "be", "brief"]
ID = {word: i for i, word in enumerate(WORDS)}
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A real tokenizer of eleven words that puts <s> before raw text, as Llama's does."""
    words = Tokenizer(models.WordLevel(ID, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ID["<s>"])])
    special = ["<s>", "<user>", "<system>", "<assistant>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", additional_special_tokens=special)
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [str(path)]

    return write_rows


@pytest.fixture
def knobs(tmp_path):
    """Makes a DataConfig with tables in a folder of the test."""
    return partial(DataConfig, cache_dir=str(tmp_path / "cache"))


def ids(*words):
    return [ID[word] for word in words]


def test_a_text_prompt_becomes_a_user_message_after_the_system_prompt(tokenizer, write, knobs):
    files = write({"prompt": "one two ?", "answer": 3})
    loaded = load_prompts(files, tokenizer, knobs(system_prompt="be brief"))
    expected = ids("<s>", "<system>", "be", "brief", "<user>", "one", "two", "?", "<assistant>")
    assert list(loaded) == [Prompt(0, expected, "<s><system>be brief<user>one two ?<assistant>", "3")]
    assert loaded.facts.num_dropped == 0


def test_ids_are_those_of_the_tokenizers_own_chat_template_call(tokenizer, write, knobs):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    messages.append({"role": "user", "content": "three ?"})
    [prompt] = load_prompts(write({"prompt": messages, "answer": "x"}), tokenizer, knobs())
    own = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert prompt.ids == own
    assert all(type(token) is int for token in prompt.ids)


def test_messages_are_left_as_they_are_even_with_a_system_prompt_configured(tokenizer, write, knobs):
    files = write({"prompt": [{"role": "user", "content": "one"}], "answer": "x"})
    [prompt] = load_prompts(files, tokenizer, knobs(system_prompt="be brief"))
    assert prompt.ids == ids("<s>", "<user>", "one", "<assistant>")


def test_without_the_template_the_raw_text_gets_what_the_tokenizer_adds_itself(tokenizer, write, knobs):
    files = write({"prompt": "one two", "answer": "x"})
    [prompt] = load_prompts(files, tokenizer, knobs(apply_chat_template=False))
    assert (prompt.text, prompt.ids) == ("one two", ids("<s>", "one", "two"))


def test_other_column_names_can_be_configured(tokenizer, write, knobs):
    files = write({"question": "one", "solution": "two"})
    data = knobs(prompt_key="question", answer_key="solution", apply_chat_template=False)
    assert load_prompts(files, tokenizer, data)[0].answer == "two"


ROWS = [{"prompt": text, "answer": text[0]} for text in ("one", "one two three", "two", "one two three ?")]


def test_too_long_prompts_are_dropped_counted_and_leave_no_gap_in_the_indices(tokenizer, write, knobs):
    data = knobs(apply_chat_template=False, max_prompt_length=2)  # <s> counts too
    loaded = load_prompts(write(*ROWS), tokenizer, data)
    assert [(p.index, p.text, p.answer) for p in loaded] == [(0, "one", "o"), (1, "two", "t")]
    assert loaded.facts.num_dropped == 2


def test_too_long_prompts_are_an_error_if_they_may_not_be_dropped(tokenizer, write, knobs):
    data = knobs(apply_chat_template=False, max_prompt_length=2, filter_overlong_prompts=False)
    with pytest.raises(ConfigError, match="2 of 4 prompts are longer, up to 5 tokens"):
        load_prompts(write(*ROWS), tokenizer, data)


@pytest.mark.parametrize(
    "truncation, left",
    [
        ("left", ["two", "three", "?"]),
        ("right", ["<s>", "one", "two"]),
        ("middle", ["<s>", "three", "?"]),  # the first 3 // 2 and the last 3 - 3 // 2
    ],
)
def test_too_long_prompts_can_be_cut_and_their_text_is_what_is_left(tokenizer, write, knobs, truncation, left):
    data = knobs(apply_chat_template=False, max_prompt_length=3, filter_overlong_prompts=False, truncation=truncation)
    loaded = load_prompts(write(*ROWS), tokenizer, data)
    assert [len(p.ids) for p in loaded] == [2, 3, 2, 3]
    assert (loaded[3].ids, loaded[3].text) == (ids(*left), " ".join(left))
    assert loaded[0].text == "one"
    assert (loaded.facts.num_dropped, loaded.facts.num_truncated) == (0, 2)


def test_a_curriculum_is_read_from_its_column(tokenizer, write, knobs):
    rows = [row | {"level": level} for row, level in zip(ROWS, (3, 0.5, 2, 7), strict=True)]
    data = knobs(apply_chat_template=False, curriculum_key="level", max_prompt_length=4)
    loaded = load_prompts(write(*rows), tokenizer, data)
    assert loaded.curriculum.tolist() == [3, 0.5, 2]  # of the prompts that are left
    assert load_prompts(write(*rows), tokenizer, knobs(apply_chat_template=False)).curriculum is None


@pytest.mark.parametrize("level", [None, "hard", float("nan")])
def test_a_curriculum_needs_numbers(tokenizer, write, knobs, level):
    files = write(ROWS[0] | {"level": 1}, ROWS[0] | {"level": level})
    with pytest.raises(ConfigError, match=r":2 = .*: 'level' must be a number"):
        load_prompts(files, tokenizer, knobs(apply_chat_template=False, curriculum_key="level"))


def test_nothing_left_is_an_error_with_numbers(tokenizer, write, knobs):
    data = knobs(apply_chat_template=False, max_prompt_length=1)
    with pytest.raises(ConfigError, match="max_prompt_length = 1: drops all 4 prompts; the shortest has 2 tokens"):
        load_prompts(write(*ROWS), tokenizer, data)
    with pytest.raises(ConfigError, match="no rows in it"):
        load_prompts(write(), tokenizer, data)


def test_a_tokenizer_without_a_chat_template_is_an_error_with_a_way_out(tokenizer, write, knobs):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="no chat template\n    fix: data.apply_chat_template=false"):
        load_prompts(write(*ROWS), plain, knobs())
    assert len(load_prompts(write(*ROWS), plain, knobs(apply_chat_template=False))) == 4


@pytest.mark.parametrize(
    "row, message",
    [
        ({"question": "one", "answer": "1"}, "['answer', 'question']: has no column 'prompt'"),
        ({"prompt": "one"}, "has no column 'answer'\n    fix: data.answer_key=<one of these>"),
        ({"prompt": "one", "answer": None}, "None: 'answer' must be a text or a number"),
        ({"prompt": 7, "answer": "1"}, "7: 'prompt' must be a text or a list of messages"),
        ({"prompt": "\ud83d", "answer": "1"}, "half a character (a lone surrogate) is no text"),
        ({"prompt": [{"role": "user", "content": "\ud83d"}], "answer": "1"}, "half a character"),
        ({"prompt": [], "answer": "1"}, "[]: 'prompt' must be a text or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "'prompt' must be a text or a list of messages"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tokenizer, write, knobs, row, message):
    files = write({"prompt": "one", "answer": "1"}, row)
    with pytest.raises(ConfigError) as caught:
        load_prompts(files, tokenizer, knobs())
    assert f"{files[0]}:2 = " in str(caught.value)
    assert message in str(caught.value)


def test_messages_without_a_chat_template_are_refused(tokenizer, write, knobs):
    files = write({"prompt": [{"role": "user", "content": "one"}], "answer": "1"})
    with pytest.raises(ConfigError, match="chat messages need a chat template"):
        load_prompts(files, tokenizer, knobs(apply_chat_template=False))


def test_prompts_from_no_file_are_what_a_file_would_have_given(tokenizer, write, knobs):
    rows = [{"prompt": "one two", "answer": "3"}, {"prompt": [{"role": "user", "content": "be brief"}], "answer": 7}]
    assert given_prompts(rows, tokenizer, knobs()) == [*load_prompts(write(*rows), tokenizer, knobs())]
    (unanswered,) = given_prompts(["one two"], tokenizer, knobs())
    assert unanswered == replace(given_prompts(rows, tokenizer, knobs())[0], answer="")


@pytest.mark.parametrize(
    "row, message",
    [({"prompt": "one"}, "has no column 'answer'"), ("one " * 50, "more tokens than data.max_prompt_length")],
)
def test_a_prompt_from_no_file_can_be_wrong_too(tokenizer, knobs, row, message):
    with pytest.raises(ConfigError, match=f"prompt 1(.|\n)*{message}"):
        given_prompts(["two", row], tokenizer, knobs(max_prompt_length=20))


def test_many_bad_rows_are_counted_not_all_printed(tokenizer, write, knobs):
    with pytest.raises(ConfigError) as caught:
        load_prompts(write(*[{"prompt": "one"}] * 25), tokenizer, knobs())
    assert len(caught.value.problems) == 11
    assert "15 more like these" in str(caught.value)


def test_gsm8k_loads_as_it_is_published(tokenizer, knobs):
    path = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k" / "test.jsonl"
    if not path.exists():
        pytest.skip(f"needs GSM8K's test set at {path}")
    loaded = load_prompts([str(path)], tokenizer, knobs(prompt_key="question", max_prompt_length=10_000))
    assert len(loaded) == 1319
    assert loaded[0].answer.endswith("#### 18")


def read_again(monkeypatch):
    """Counts how often files are read from here on."""
    times = []
    read = prompts.read_rows
    monkeypatch.setattr(prompts, "read_rows", lambda name: times.append(name) or read(name))
    return times


def test_prompts_are_tokenised_once_and_then_found(tokenizer, write, knobs, monkeypatch):
    files, data = write(*ROWS), knobs(apply_chat_template=False, max_prompt_length=4)
    made, times = load_prompts(files, tokenizer, data), read_again(monkeypatch)
    found = load_prompts(files, tokenizer, replace(data, seed=9, train_batch_size=7))  # change no prompt
    assert times == []
    assert (list(found), found.facts) == (list(made), made.facts)


@pytest.mark.parametrize("change", ["rows", "time", "knob", "tokenizer", "damage"])
def test_a_table_is_made_again_when_anything_it_was_made_from_has_changed(
    tokenizer, write, knobs, monkeypatch, tmp_path, change
):
    files, data = write(*ROWS), knobs(apply_chat_template=False)
    load_prompts(files, tokenizer, data)
    (table,) = (tmp_path / "cache").glob("*/prompts.arrow")
    times = read_again(monkeypatch)
    match change:
        case "rows":
            write(*ROWS, {"prompt": "three", "answer": "t"})
        case "time":
            os.utime(files[0], ns=(1, 1))
        case "knob":
            data = replace(data, max_prompt_length=4)
        case "tokenizer":
            tokenizer = copy.deepcopy(tokenizer)
            tokenizer.add_tokens(["be"], special_tokens=True)
        case "damage":
            table.write_bytes(table.read_bytes()[:-1])
    loaded = load_prompts(files, tokenizer, data)
    assert times == files
    assert len(loaded) == {"rows": 5, "knob": 3}.get(change, 4)


def test_a_refused_load_leaves_no_table_behind(tokenizer, write, knobs, tmp_path):
    with pytest.raises(ConfigError):
        load_prompts(write({"prompt": "one"}), tokenizer, knobs())
    assert list((tmp_path / "cache").iterdir()) == []


def test_prompts_are_a_sequence(tokenizer, write, knobs):
    loaded = load_prompts(write(*ROWS), tokenizer, knobs(apply_chat_template=False))
    assert [p.index for p in loaded[1:3]] == [1, 2]
    assert [p.answer for p in loaded.first(2)] == ["o", "o"]
    assert len(loaded.first(-1)) == len(loaded.first(9)) == 4
    with pytest.raises(IndexError):
        loaded[4]


def test_the_prompts_of_each_entry_are_counted_and_each_file_is_remembered(tokenizer, tmp_path, knobs):
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, count in (("a", 2), ("b", 1)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:count]))
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    facts = load_prompts([str(folder), str(tmp_path / "c.jsonl")], tokenizer, knobs(apply_chat_template=False)).facts
    assert facts.sizes == [3, 4]
    assert [Path(file.path).name for file in facts.files] == ["a.jsonl", "b.jsonl", "c.jsonl"]
    assert facts.files[2].sha256 == hashlib.sha256((tmp_path / "c.jsonl").read_bytes()).hexdigest()


def test_the_first_of_each_entry(tokenizer, tmp_path, knobs):
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"]
    for file, count in zip(files, (3, 1, 4), strict=True):
        rows = [{"prompt": "p", "answer": f"{file.stem}{i}", "level": i} for i in range(count)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded = load_prompts([*map(str, files)], tokenizer, knobs(apply_chat_template=False, curriculum_key="level"))
    first = loaded.first(2)
    assert [prompt.answer for prompt in first] == ["a0", "a1", "b0", "c0", "c1"]
    assert first.facts.sizes == [2, 1, 2] and first.curriculum.tolist() == [0, 1, 0, 0, 1]


def test_a_changed_file_is_named_and_a_moved_one_is_the_same():
    a, b = DataFile("a.jsonl", 10, "aa"), DataFile("b.jsonl", 20, "bb")
    assert list(changed_files([a, b], [replace(a, path="moved/a.jsonl"), b])) == []
    (change,) = changed_files([a, b], [a, replace(b, num_bytes=21, sha256="xx")])
    assert change == "b.jsonl has changed: 20 bytes then, 21 now, other contents"
    assert list(changed_files([a, b], [a])) == ["b.jsonl is not named any more"]
    assert list(changed_files([a], [a, b])) == ["b.jsonl was not there"]


def test_changed_training_files_end_a_resume_and_changed_validation_files_are_told():
    a, b = DataFile("a.jsonl", 10, "aa"), DataFile("b.jsonl", 20, "bb")
    other = replace(a, sha256="xx")
    then = {"data.train_files": [a], "data.val_files": [b]}
    assert compare_files(then, then) == []
    (remark,) = compare_files(then, then | {"data.val_files": [b, a]})
    assert remark == "validation before and after is not comparable: a.jsonl was not there"
    with pytest.raises(CheckpointError, match="a.jsonl has changed.*\n    fix: put the old files back"):
        compare_files(then, then | {"data.train_files": [other]})
