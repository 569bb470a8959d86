import fcntl
import io
import os
import pty
import select
import struct
import termios

import pytest

from rlhf_mp.data.types import SampleText
from rlhf_mp.observe.console import ConsoleSink, duration, one_line

METRICS = {
    "rollout/reward_mean": 0.53,
    "rollout/response_length_mean": 4.0,
    "throughput/tokens_per_s": 1830.4,
    "time/step_s": 3.1,
    "actor/grad_norm": 1.0,
}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (45, "45s"), (59.7, "1m00s"), (272.3, "4m32s"), (7530, "2h05m"), (360000, "100h00m")],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


def lines_of(write):
    stream = io.StringIO()
    write(ConsoleSink(stream, is_terminal=False, num_steps=100))
    return stream.getvalue().splitlines()


def test_a_step_is_one_short_line():
    (line,) = lines_of(lambda console: console.write(12, METRICS))
    # 88 steps of 3.1 s are left
    assert line == "step  12/100  reward  0.530  length    4.0  tok/s   1830    3.1 s/step  left 4m33s"


def test_lines_of_a_run_are_aligned():
    def write(console):
        console.write(1, METRICS)
        console.write(100, METRICS | {"rollout/reward_mean": -1.0, "throughput/tokens_per_s": 123456.0})

    first, last = lines_of(write)
    assert first.index("left") == last.index("left")


def test_time_left_follows_the_last_ten_steps():
    def write(console):
        console.write(1, METRICS | {"time/step_s": 1000.0})  # compiled, warmed up
        for step in range(2, 12):
            console.write(step, METRICS | {"time/step_s": 2.0})

    lines = lines_of(write)
    assert lines[0].endswith("left 27h30m")  # 99 x 1000 s
    assert lines[-1].endswith("left 2m58s")  # 89 x 2 s


def test_a_step_without_a_rollout_metric_shows_the_others():
    (line,) = lines_of(lambda console: console.write(1, {"time/step_s": 3.0}))
    assert line == "step   1/100    3.0 s/step  left 4m57s"


def test_a_validation_is_a_line_of_its_own():
    lines = lines_of(
        lambda console: console.write(10, {"eval/accuracy": 0.9312, "eval/reward_mean": 1.0, "time/eval_s": 2})
    )
    assert lines == ["validation at step 10  accuracy 0.931  reward_mean 1.000"]


def test_several_validation_files_have_a_line_each():
    names = ("response_length_mean", "pass@16", "pass@2", "reward_mean", "accuracy", "mean@16")
    metrics = {f"eval/{file}{name}": 0.5 for name in names for file in ("math/test/", "")}
    numbers = "accuracy 0.500  reward_mean 0.500  pass@2 0.500  pass@16 0.500  response_length_mean 0.500"
    assert lines_of(lambda console: console.write(10, metrics)) == [
        f"validation at step 10  {numbers}",
        f"  math/test  {numbers}",
    ]


def test_a_validation_sample_names_its_file():
    text = SampleText("3 + 4 =", "7", 1.0, "7", source="math/test")
    assert lines_of(lambda console: console.samples(1, [text])) == ["  math/test: 3 + 4 = | 7 | reward 1 | truth 7"]


def test_a_sampled_text_is_one_line_whatever_is_in_it():
    text = SampleText("3 + 4 =\n", "so\n\x1b[2J\\boxed{7} 七", 0.5, "7")
    assert lines_of(lambda console: console.samples(1, [text])) == [
        r"  3 + 4 = | so\n\x1b[2J\boxed{7} 七 | reward 0.5 | truth 7"
    ]


def test_a_long_text_keeps_its_beginning_and_its_end():
    assert one_line("abcdefghijklmnop", 16) == "abcdefghijklmnop"
    assert one_line("abcdefghijklmnopq", 10) == "abc...nopq"


def test_a_terminal_gets_a_bar_that_is_redrawn_and_lines_above_it():
    terminal, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    with os.fdopen(screen, "w", encoding="utf-8") as stream:
        console = ConsoleSink(stream, stream.isatty(), num_steps=100, steps_done=10)
        console.write(50, METRICS)
        console.samples(50, [SampleText("3 + 4 =", "7", 1.0, "7")])
        console.close()
        stream.flush()
        shown = b""
        while select.select([terminal], [], [], 0.2)[0]:  # a terminal may pass on what was written in parts
            shown += os.read(terminal, 100_000)
    os.close(terminal)

    drawn = [line for line in shown.decode().replace("\r", "\n").split("\n") if line.strip()]
    assert drawn[0].startswith("step 10/100 |")
    assert drawn[1].startswith("step 50/100 |█")
    assert drawn[1].endswith("| reward 0.530  length 4.0  tok/s 1830  3.1 s/step  left 2m35s")
    assert "  3 + 4 = | 7 | reward 1 | truth 7" in drawn
    assert drawn[-1] == drawn[1]  # the bar stays below the lines
    assert all(len(line) < 100 for line in drawn)
