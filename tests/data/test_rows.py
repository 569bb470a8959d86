import datasets
import pyarrow
import pyarrow.parquet
import pytest

from rlhf_mp.data.rows import read_rows
from rlhf_mp.errors import ConfigError

ROWS = [{"prompt": "1 + 1?", "answer": "2"}, {"prompt": "Größe?", "answer": "3"}]
JSONL = '{"prompt": "1 + 1?", "answer": "2"}\n\n{"prompt": "Größe?", "answer": "3"}\n'


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def test_jsonl_rows_carry_their_line_and_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(JSONL, encoding="utf-8")
    assert list(read_rows(str(path))) == [(f"{path}:1", ROWS[0]), (f"{path}:3", ROWS[1])]


def test_parquet_rows_are_the_same_rows_even_with_messages_in_them(tmp_path):
    path = tmp_path / "train.parquet"
    rows = [*ROWS, {"prompt": "x", "answer": "y"}]
    write_parquet(path, rows)
    assert list(read_rows(str(path))) == [(f"{path}:{n}", row) for n, row in enumerate(rows, 1)]
    messages = [{"prompt": [{"role": "user", "content": "hi"}], "answer": "2"}]
    write_parquet(path, messages)
    assert [row for _, row in read_rows(str(path))] == messages


def test_a_saved_dataset_gives_the_same_rows(tmp_path):
    path = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    assert list(read_rows(str(path))) == [(f"{path}:1", ROWS[0]), (f"{path}:2", ROWS[1])]


def test_several_saved_datasets_are_answered_with_their_names(tmp_path):
    path = tmp_path / "saved"
    data = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict(train=data, test=data).save_to_disk(path)
    with pytest.raises(ConfigError, match=f"holds several datasets: train, test\n    fix: name one: {path}/train"):
        list(read_rows(str(path)))
    assert [row for _, row in read_rows(str(path / "test"))] == ROWS


def test_a_folder_is_read_file_by_file_in_the_order_of_names(tmp_path):
    write_parquet(tmp_path / "b.parquet", ROWS[1:])
    (tmp_path / "a.jsonl").write_text('{"prompt": "first"}')
    (tmp_path / "README.md").write_text("not data")
    assert [row for _, row in read_rows(str(tmp_path))] == [{"prompt": "first"}, ROWS[1]]


def test_several_files_are_read_in_the_order_given(tmp_path):
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"prompt": "{name}"}}')
    files = [str(tmp_path / "b.jsonl"), str(tmp_path / "a.jsonl")]
    assert [row["prompt"] for _, row in read_rows(files)] == ["b", "a"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("bad.jsonl", b'{"prompt": 1}\n{"prompt": \n', "bad.jsonl:2': not JSON: Expecting value"),
        ("list.jsonl", b"[1, 2]\n", "list.jsonl:1': not a JSON object"),
        ("latin.jsonl", b'{"prompt": "Gr\xf6\xdfe"}\n', "latin.jsonl:1': not JSON: 'utf-8' codec"),
        ("bad.parquet", b"PAR0", "bad.parquet': not a Parquet file"),
        ("train.csv", b"prompt\n", "train.csv': prompts are not read from .csv files"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        list(read_rows(str(tmp_path / name)))
    assert message in str(caught.value)


def test_a_missing_file_and_a_folder_without_data_are_named(tmp_path):
    with pytest.raises(ConfigError, match="gone.jsonl': no such file or folder"):
        list(read_rows(str(tmp_path / "gone.jsonl")))
    with pytest.raises(ConfigError, match="neither a saved dataset nor any .jsonl"):
        list(read_rows(str(tmp_path)))
