"""Everything on disk that can be wrong, told with key or file and line before anything is started."""

import json
import struct

import pyarrow
import pyarrow.parquet
import pytest

from rlhf_mp.config.files import file_problems
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.model_folder import count_parameters

MODEL = "actor_rollout_ref.model.path"


def write_safetensors(path, shapes):
    """The header alone: nothing here reads the numbers."""
    header = json.dumps({"__metadata__": {"format": "pt"}} | {k: {"shape": v} for k, v in shapes.items()}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.fixture
def run(tmp_path):
    """A config whose files are all there, and ``problems(overrides)`` of it."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 64, "num_attention_heads": 4}')
    write_safetensors(model / "model.safetensors", {"a": [2, 3], "b": [5]})
    (model / "tokenizer.json").write_text("{}")
    (model / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 8)
    tree = {
        "data": {
            "train_files": str(tmp_path / "train.jsonl"),
            "train_batch_size": 8,
            "max_prompt_length": 32,
            "max_response_length": 32,
        },
        "actor_rollout_ref": {"model": {"path": str(model)}, "actor": {"ppo_mini_batch_size": 8}},
    }

    class Run:
        folder = tmp_path

        def problems(self, *overrides, world_size=None):
            return list(file_problems(config_from_dict(tree, overrides), world_size))

        def data_problems(self, name, content):
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
            return self.problems(f"data.train_files={tmp_path / name}")

    return Run()


def test_a_complete_run_has_no_problem(run):
    assert run.problems(world_size=8) == []


# --- model


def test_no_model(run):
    (problem,) = run.problems(f"{MODEL}=")
    assert (problem.key, problem.reason) == (MODEL, "there is no model to train")


def test_a_hub_name_is_not_downloaded_but_the_command_is_told(run):
    (problem,) = run.problems(f"{MODEL}=Qwen/Qwen2.5-7B-Instruct")
    assert "models are not downloaded" in problem.reason
    local = "models/Qwen2.5-7B-Instruct"
    assert problem.fix == f"hf download Qwen/Qwen2.5-7B-Instruct --local-dir {local}, then {MODEL}={local}"


def test_a_local_path_that_is_missing_is_not_taken_for_a_hub_name(run):
    (problem,) = run.problems(f"{MODEL}=/nowhere/model")
    assert "hf download" not in problem.fix


@pytest.mark.parametrize(
    ("removed", "key", "reason"),
    [
        (["config.json"], MODEL, "no config.json"),
        (["model.safetensors"], MODEL, "no weights"),
        (["tokenizer.json", "tokenizer_config.json"], MODEL, "no tokenizer"),
        (["tokenizer_config.json"], "data.apply_chat_template", "no chat template"),
    ],
)
def test_a_checkpoint_with_a_part_missing(run, removed, key, reason):
    for name in removed:
        (run.folder / "model" / name).unlink()
    problems = {p.key: p for p in run.problems()}
    assert reason in problems[key].reason
    assert problems[key].fix


def test_a_half_downloaded_checkpoint_names_a_missing_shard(run):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (run.folder / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = run.problems()
    assert problem.reason == "1 weight file(s) missing, first model-00002-of-00002.safetensors"


def test_a_chat_template_may_be_a_file_of_its_own_or_unwanted(run):
    (run.folder / "model" / "tokenizer_config.json").write_text("{}")
    (problem,) = run.problems()
    assert problem.fix.startswith("data.apply_chat_template=false, or put a chat_template.jinja")
    assert run.problems("data.apply_chat_template=false") == []
    (run.folder / "model" / "chat_template.jinja").write_text("{{ messages }}")
    assert run.problems() == []


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
def test_a_damaged_json_file_of_the_checkpoint_is_named(run, name):
    (run.folder / "model" / name).write_text('{"half": ')
    (problem,) = run.problems()
    assert problem.key == str(run.folder / "model" / name)


def test_sequences_must_fit_the_models_context(run):
    (problem,) = run.problems("data.max_response_length=33")
    assert problem.key == "actor_rollout_ref.rollout.max_model_len"
    assert "ends at 64 tokens" in problem.reason


def test_tensor_parallelism_must_divide_the_attention_heads(run):
    (problem,) = run.problems("actor_rollout_ref.rollout.tensor_model_parallel_size=8")
    assert "4 attention heads" in problem.reason
    assert problem.fix == "actor_rollout_ref.rollout.tensor_model_parallel_size=4"


def test_parameters_are_counted_from_the_headers(run):
    write_safetensors(run.folder / "model" / "more.safetensors", {"c": [7, 1]})
    assert count_parameters(run.folder / "model") == 2 * 3 + 5 + 7
    assert count_parameters(run.folder) is None


# --- data


def test_no_training_data(run):
    (problem,) = run.problems("data.train_files=")
    assert (problem.key, problem.fix) == ("data.train_files", "data.train_files=<train.jsonl>")


@pytest.mark.parametrize("knob", ["train_files", "val_files"])
def test_a_missing_data_file_is_told_under_its_own_key(run, knob):
    (problem,) = run.problems(f"data.{knob}=nowhere.jsonl")
    assert (problem.key, problem.found) == (f"data.{knob}", "nowhere.jsonl")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("empty.jsonl", "", "no rows"),
        ("blank.jsonl", "\n \n", "no rows"),
        ("data.csv", "prompt,answer\n", "unknown format '.csv'"),
        ("broken.parquet", "not parquet", "cannot be read"),
    ],
)
def test_a_file_without_prompts(run, name, content, reason):
    (problem,) = run.data_problems(name, content)
    assert problem.key == "data.train_files"
    assert reason in problem.reason


GOOD = '{"prompt": "1+1=", "answer": "2"}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "x", \n', "not JSON"),
        ('["x", "y"]\n', "a list, not an object"),
        (b'{"prompt": "\xff", "answer": "2"}\n', "not UTF-8"),
        ('{"prompt": "x"}\n', "this line has no 'answer'"),
        ('{"prompt": "", "answer": "2"}\n', "not empty"),
        ('{"prompt": 3, "answer": "2"}\n', "must be a text"),
        ('{"prompt": "x", "answer": null}\n', "must be a text or a number"),
    ],
)
def test_a_bad_line_is_told_with_file_and_line(run, line, reason):
    raw = line if isinstance(line, bytes) else line.encode()
    (problem,) = run.data_problems("data.jsonl", GOOD.encode() * 10_000 + b"\n" + raw + GOOD.encode())
    assert problem.key == f"{run.folder / 'data.jsonl'}:10002"
    assert reason in problem.reason


def test_a_file_broken_everywhere_is_not_told_a_thousand_times(run):
    assert [p.key.rpartition(":")[2] for p in run.data_problems("data.jsonl", "oops\n" * 1000)] == ["1", "2", "3"]


def test_chat_messages_need_a_chat_template(run):
    messages = '{"prompt": [{"role": "user", "content": "hi"}], "answer": "2"}\n' * 8
    assert run.data_problems("chat.jsonl", messages) == []
    path = run.folder / "chat.jsonl"
    problems = run.problems(f"data.train_files={path}", "data.apply_chat_template=false")
    assert problems[0].key == f"{path}:1"


def test_an_absent_column_names_those_that_are_there_and_the_likely_one(run):
    problems = run.data_problems("data.jsonl", '{"question": "x", "answer": "2"}\n' * 8)
    (problem,) = problems
    assert problem.key == "data.prompt_key"
    assert f"{run.folder / 'data.jsonl'}:1 has no such column; it has: answer, question" in problem.reason
    assert problem.fix == "data.prompt_key=question"

    problems = {p.key: p.fix for p in run.data_problems("data.jsonl", '{"q": 1, "a": 2, "prompts": 3}\n')}
    assert problems == {
        "data.prompt_key": "data.prompt_key=prompts",
        "data.answer_key": "data.answer_key=<one of a, prompts, q>",
    }


def test_parquet_columns_and_rows_come_from_its_metadata(run):
    path = run.folder / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"] * 8, "answer": ["y"] * 8}), path)
    assert run.problems(f"data.train_files={path}") == []
    (problem,) = run.problems(f"data.train_files={path}", "data.answer_key=solution")
    assert (problem.key, problem.found) == ("data.answer_key", "solution")
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    (problem,) = run.problems(f"data.train_files={path}")
    assert problem.reason == "the file has no rows"


def test_a_saved_dataset_is_read_by_its_schema(run):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"question": ["x"] * 8, "answer": ["y"] * 8})
    data.save_to_disk(run.folder / "saved")
    (problem,) = run.problems(f"data.train_files={run.folder / 'saved'}")
    assert (problem.key, problem.fix) == ("data.prompt_key", "data.prompt_key=question")
    assert run.problems(f"data.train_files={run.folder / 'saved'}", "data.prompt_key=question") == []

    datasets.DatasetDict({"train": data, "test": data}).save_to_disk(run.folder / "splits")
    (problem,) = run.problems(f"data.train_files={run.folder / 'splits'}")
    assert problem.fix == f"data.train_files={run.folder / 'splits' / 'train'}"


def test_a_folder_stands_for_the_files_in_it(run):
    folder = run.folder / "parts"
    folder.mkdir()
    (problem,) = run.problems(f"data.train_files={folder}")
    assert "neither a saved dataset" in problem.reason
    (folder / "a.jsonl").write_text(GOOD * 5)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x"] * 3, "answer": ["y"] * 3}), folder / "b.parquet")
    assert run.problems(f"data.train_files={folder}") == []


def test_a_step_needs_enough_prompts(run):
    (problem,) = run.data_problems("few.jsonl", GOOD * 7)
    assert (problem.key, problem.found) == ("data.train_batch_size", 8)
    assert problem.fix == "data.train_batch_size=7 or less, or more data"


# --- the rest


def test_resuming_needs_the_folder(run):
    words = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run.folder / 'global_step_3'}")
    (problem,) = run.problems(*words)
    assert problem.key == "trainer.resume_from_path"


@pytest.mark.parametrize(
    ("nnodes", "world_size", "override"),
    [(1, 1, "trainer.n_gpus_per_node=1"), (2, 8, "trainer.n_gpus_per_node=4"), (2, 5, "trainer.nnodes=1 trainer.n_g")],
)
def test_another_number_of_ranks_than_planned_can_be_mended_both_ways(run, nnodes, world_size, override):
    words = ["trainer.n_gpus_per_node=2", f"trainer.nnodes={nnodes}"]
    (problem,) = run.problems(*words, world_size=world_size)
    assert problem.key == "trainer.n_gpus_per_node"
    assert f"started {world_size} rank(s)" in problem.reason
    assert "deepspeed --num_gpus 2 launch/train.py" in problem.fix
    assert override in problem.fix
    assert run.problems(*words, world_size=2 * nnodes) == []


def test_machines_with_engines_alone_are_launched_like_the_others(run):
    words = ["trainer.n_gpus_per_node=2", "trainer.placement=disjoint", "actor_rollout_ref.rollout.nnodes=1"]
    assert run.problems(*words, world_size=4) == []
    (problem,) = run.problems(*words, world_size=2)
    assert "(trainer.nnodes + actor_rollout_ref.rollout.nnodes) * trainer.n_gpus_per_node = 4" in problem.reason
    assert "on 2 machines, or trainer.n_gpus_per_node=1" in problem.fix
    (problem,) = run.problems(*words, world_size=1)
    assert "trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.nnodes=0" in problem.fix
