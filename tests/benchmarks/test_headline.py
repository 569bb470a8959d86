"""The four headline rows as Slurm jobs: what would be submitted. The jobs themselves need 60 GPUs."""

from benchmarks.slurm import headline


def test_every_row_is_one_job_with_the_gpus_that_its_config_names(capfd):
    assert headline.main(["--dry-run", "--steps", "5"]) == 0
    commands = [line for line in capfd.readouterr().out.splitlines() if line.startswith("sbatch ")]
    asked = []
    for command in commands:
        options = dict(word.partition("=")[::2] for word in command.split())
        asked.append(int(options["--nodes"]) * int(options["--gpus-per-node"]))
        assert options["trainer.total_training_steps"] == "5"
        assert options["--job-name"].startswith("headline_")
    assert asked == [row.num_gpus for row in headline.ROWS]


def test_a_row_whose_job_fails_is_not_counted(tmp_path, capsys):
    commands = {"3B": ["true"], "8B": ["sh", "-c", "echo no such partition; exit 3"]}
    assert headline.finished_runs(commands, tmp_path) == ["3B"]
    assert f"8B: exit code 3, {tmp_path}/8B.log" in capsys.readouterr().out
    assert (tmp_path / "8B.log").read_text() == "no such partition\n"
