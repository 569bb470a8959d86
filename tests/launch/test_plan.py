"""launch/plan.py as it is typed, and with nothing installed but Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quick_command import run_quickly

from launch.plan import BAD_QUESTION, DOES_NOT_FIT, FITS, main

ROOT = Path(__file__).parents[2]
CONFIG = str(ROOT / "configs" / "grpo_qwen2.5_7b_deepspeed.yaml")
SHORT = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096"


def test_a_config_is_planned_for_other_cards_than_this_machines(capsys):
    assert main(["--config", CONFIG, "--gpu", "h200", SHORT]) == FITS
    assert "8 x H200" in capsys.readouterr().out


def test_what_does_not_fit_ends_with_another_exit_code(capsys):
    whole_logits = "actor_rollout_ref.model.logits_chunk_mb=0"
    assert main(["--config", CONFIG, "--gpu", "rtx4090", whole_logits]) == DOES_NOT_FIT
    assert "does not fit" in capsys.readouterr().out


def test_json_and_table_and_explanation_are_of_one_plan(capsys):
    def said(*options):
        main(["--config", CONFIG, "--gpu", "h100", SHORT, *options])
        return capsys.readouterr().out

    record = json.loads(said("--json"))
    peak = f"{record['peak_bytes'] / 2**30:.2f} GiB"
    assert peak in said() and peak in said("--explain")
    assert "7,615,616,512 parameters / 8 ranks" in said("--explain")


def test_a_search_lists_layouts_and_reasons(capsys):
    assert main(["--model", "qwen2.5-32b", "--gpu", "h100", "--num-gpus", "16", "--algorithm", "grpo"]) == FITS
    printed = capsys.readouterr().out
    assert "ZeRO-3 over 16 +optimizer offload" in printed and "does not fit" in printed


def test_a_search_without_an_answer_ends_with_1():
    assert main(["--model", "llama-3.1-70b", "--gpu", "rtx4090", "--num-gpus", "1"]) == DOES_NOT_FIT


@pytest.mark.parametrize(("words", "message"), [
    (["--model", "qwen2.5-7bb"], "Qwen2.5-7B"),
    (["--model", "qwen2.5-7b", "--gpu", "h1000"], "H100-80G"),
    (["--model", "qwen2.5-7b", "--num-gpus", "0"], "--num-gpus 1"),
    (["--model", "qwen2.5-7b", "--gpus-per-node", "0"], "--gpus-per-node 1"),
    (["--model", "qwen2.5-7b", "--backend", "deepspeed", "--tp", "2"], "--backend megatron"),
    (["--model", "nowhere/config.json"], "no such file"),
    (["--model", "qwen2.5-7b", "--reward-model", "llama-3-8b"], "Llama-3.1-8B"),
    (["--what-needs", "llama-13"], "Llama-2-13B"),
    (["--config", CONFIG, "--gpu", "h100", "trainer.nnods=2"], "nnodes"),
    (["--model", "gpt-2", "--num-gpus", "1", "--plot", "plan.pdf"], ".svg"),
])  # fmt: skip
def test_a_bad_question_is_answered_with_the_nearest_good_one(words, message, capsys):
    assert main(words) == BAD_QUESTION
    assert message in capsys.readouterr().err


def test_what_fits_and_what_needs(capsys):
    assert main(["--what-fits", "24GB"]) == main(["--what-needs", "llama-2-13b"]) == FITS
    printed = capsys.readouterr().out
    assert "QLoRA" in printed and "A100-80G" in printed
    main(["--what-fits", "24GB", "--json"])
    assert json.loads(capsys.readouterr().out).keys() == {"full", "LoRA", "QLoRA"}


def test_a_model_whose_config_says_nonsense_is_told_entry_by_entry(tmp_path, capsys):
    entries = {"hidden_size": "x", "num_hidden_layers": 0, "num_attention_heads": 8, "vocab_size": -3}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | entries))
    assert main(["--model", str(tmp_path)]) == BAD_QUESTION
    told = capsys.readouterr().err
    assert all(name in told for name in ("hidden_size = 'x'", "num_hidden_layers = 0", "vocab_size = -3"))
    assert "intermediate_size = None" in told and "num_attention_heads" not in told


def test_clouds_and_prices(capsys):
    assert main(["--what-needs", "llama-2-13b", "--cloud"]) == FITS
    assert "p4d.24xlarge (8 x A100-40G)" in capsys.readouterr().out
    assert main(["--model", "qwen2.5-7b", "--num-gpus", "8", "--price-per-gpu-hour", "2.5"]) == FITS
    assert "1e9 tokens" in capsys.readouterr().out


def test_an_explanation_says_what_stays_once(capsys):
    assert main(["--config", CONFIG, "--gpu", "h200", SHORT, "--explain"]) == FITS
    printed = capsys.readouterr().out
    assert printed.count("engine KV cache") == 1 and "all along" in printed


def test_a_size_without_a_unit_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--what-fits", "24"])
    assert "what-fits" in capsys.readouterr().err


def test_a_plot_is_written(tmp_path):
    assert main(["--config", CONFIG, "--gpu", "h200", SHORT, "--plot", str(tmp_path / "plan.svg")]) == FITS
    assert "<rect" in (tmp_path / "plan.svg").read_text()


def test_it_runs_in_a_bare_environment_in_under_a_second(tmp_path):
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    python = bare / "bin" / "python"
    missing = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True)
    assert "ModuleNotFoundError" in missing.stderr
    for words in (["--model", "llama-3.1-8b", "--num-gpus", "8"], ["--what-fits", "24GB"], ["--what-needs", "gpt-2"]):
        assert_under_a_second([python, "launch/plan.py", *words], env={"PYTHONPATH": str(ROOT)})


def assert_under_a_second(command, **options):
    """Of processor time: on a busy machine a core does less in a second."""
    run_quickly(1, command, FITS, clock=seconds_of_children, cwd=ROOT, **options)


def seconds_of_children():
    times = os.times()
    return times.children_user + times.children_system


def test_planning_a_config_needs_neither_torch_nor_a_gpu_library():
    heavy = ["torch", "deepspeed", "sglang", "ray", "transformers", "numpy"]
    blocked = f"import sys; sys.modules.update(dict.fromkeys({heavy}))"
    code = f"{blocked}; from launch.plan import main; sys.exit(main({['--config', CONFIG, '--gpu', 'h200', SHORT]!r}))"
    assert_under_a_second([sys.executable, "-c", code])
