"""What ``python -m rlhf_mp.data.inspect`` shows, and how it refuses."""

import json
import subprocess
import sys

import pytest

from rlhf_mp.data.histogram import histogram, quantiles
from rlhf_mp.data.inspect import main
from rlhf_mp.models.tiny import CHAT_TEMPLATE, byte_pair_tokenizer, character_tokenizer

ROWS = [{"question": "1 + 1?\x1b[2J", "answer": 2, "level": 3}, {"question": "how much is 2 + 2?", "answer": "4"}]


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    byte_pair_tokenizer(["how much is 2 + 2?"], 300).save_pretrained(folder)
    return str(folder)


KEY = "data.prompt_key=question"


def shown(capsys, *words) -> list[str]:
    assert main(words) == 0
    return capsys.readouterr().out.splitlines()


def refused(capsys, *words) -> str:
    assert main(words) == 2
    return capsys.readouterr().err


def test_without_a_model_rows_are_shown_as_they_are(capsys, file):
    lines = shown(capsys, file, KEY, "--rows", "1")
    assert lines[:5] == [f"# {file}", "", "columns   question (text), answer (int), level (int)", "", f"## {file}:1"]
    assert r"    | 1 + 1?\x1b[2J" in lines and "level     3" in lines  # nothing moves the cursor
    assert "prompts, characters, of 2 rows" in lines
    assert f"## {file}:2" not in lines


def test_with_a_model_text_and_ids_are_what_it_sees(capsys, file, model):
    lines = shown(capsys, file, KEY, "--model", model, "--row", "2")
    tokenizer = byte_pair_tokenizer(["how much is 2 + 2?"], 300)
    ids = tokenizer("user: how much is 2 + 2?\nassistant: ")["input_ids"]
    assert f"## {file}:2   {len(ids)} tokens" in lines
    assert f"ids       {' '.join(map(str, ids))}" in lines
    start = lines.index(f"## {file}:2   {len(ids)} tokens")
    assert lines[start + 2 : start + 4] == ["    | user: how much is 2 + 2?", "    | assistant: "]
    assert lines[2] == f"    | {CHAT_TEMPLATE.splitlines()[0]}"
    assert "0 of 2 longer than data.max_prompt_length=512" in lines
    assert f"## {file}:1" not in "\n".join(lines)


def test_what_is_cut_is_shown_cut(capsys, file, model):
    cut = ["data.max_prompt_length=4", "data.filter_overlong_prompts=false", "data.truncation=right"]
    lines = shown(capsys, file, KEY, "--model", model, "--row", "2", *cut)
    (head,) = [line for line in lines if line.startswith("## ")]
    assert head.endswith("4 after data.truncation=right")
    (ids,) = [line for line in lines if line.startswith("ids ")]
    assert len(ids.split()) == 1 + 4
    assert "2 of 2 longer than data.max_prompt_length=4: data.truncation=right" in lines
    dropped = shown(capsys, file, KEY, "--model", model, "--row", "2", cut[0])
    assert any("dropped: more than data.max_prompt_length=4" in line for line in dropped)


def test_a_config_names_files_and_knobs(capsys, file, tmp_path):
    (tmp_path / "run.yaml").write_text(f"data: {{train_files: {file}, val_files: {file}, prompt_key: question}}\n")
    lines = shown(capsys, "--config", str(tmp_path / "run.yaml"), "--rows", "0")
    assert lines.count(f"# {file}") == 2


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "nothing to look at"),
        (["gone.jsonl"], "no such file or folder"),
        (["{file}"], "has no column 'prompt'\n    fix: data.prompt_key=<one of these>"),
        (["{file}", KEY, "--model", "gone"], "--model = 'gone': no such folder"),
        (["{file}", KEY, "--model", "{folder}"], "no tokenizer in it"),
        (["{file}", KEY, "--row", "3"], "has 2 rows\n    fix: --row 2"),
        (["{file}", "data.prompt_kye=question"], "did you mean data.prompt_key?"),
    ],
)
def test_bad_input_is_a_message_with_a_fix(capsys, file, tmp_path, words, message):
    (tmp_path / "empty").mkdir()
    assert message in refused(capsys, *(word.format(file=file, folder=tmp_path / "empty") for word in words))


def test_a_model_without_a_template_is_refused_with_a_way_out(capsys, file, tmp_path):
    tokenizer = character_tokenizer("12+? ")
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "plain")
    words = [file, KEY, "--model", str(tmp_path / "plain")]
    assert "fix: data.apply_chat_template=false" in refused(capsys, *words)
    assert "## " in "\n".join(shown(capsys, *words, "data.apply_chat_template=false"))


def test_help_shows_how_it_is_used():
    command = [sys.executable, "-m", "rlhf_mp.data.inspect", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--config my.yaml" in told and "--limit N" in told


def test_a_histogram_by_hand():
    lines = histogram([1, 1, 2, 5, 6, 6, 6, 6], num_bins=3, width=4)
    # 3 of the 5 in the fullest bin fill 4 * 3/5 = 2.4 columns, 19 eighths
    assert lines == ["1 - 2 ██▍   3", "3 - 4       0", "5 - 6 ████  5"]


@pytest.mark.parametrize("values", [[7], [7, 7], [0, 100], list(range(1, 1001))])
def test_a_histogram_counts_everything_once(values):
    lines = histogram(values)
    assert sum(int(line.split()[-1]) for line in lines) == len(values)
    assert len(lines) <= 10 and len({len(line.rstrip("0123456789")) for line in lines}) == 1


def test_quantiles_in_one_line():
    assert quantiles(list(range(101))) == "min 0  median 50  95% 95  max 100"
