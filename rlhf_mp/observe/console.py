"""What people see while it runs: a progress bar in a terminal, one line a step anywhere else."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from tqdm import tqdm

from rlhf_mp.data.types import SampleText
from rlhf_mp.observe.eval_table import by_file
from rlhf_mp.observe.sinks import logged

COLUMNS = {  # wide enough that lines of a run stay aligned
    "rollout/reward_mean": "reward {:6.3f}",
    "rollout/response_length_mean": "length {:6.1f}",
    "train/loss": "loss {:7.4f}",
    "train/accuracy": "accuracy {:5.3f}",
    "throughput/tokens_per_s": "tok/s {:6.0f}",
    "time/step_s": "{:5.1f} s/step",
}
SMOOTHED_STEPS = 10  # the time left follows the last so many steps


def duration(seconds: float) -> str:
    """45s, 4m32s, 2h05m."""
    minutes, seconds_left = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{seconds_left}s"
    if minutes < 60:
        return f"{minutes}m{seconds_left:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def one_line(text: str, width: int) -> str:
    """Control characters escaped (a response must not move the cursor), the middle left out if too long."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text.strip())
    if len(shown) <= width:
        return shown
    head = (width - 3) // 2
    return f"{shown[:head]}...{shown[len(shown) - (width - 3 - head) :]}"


class ConsoleSink:
    """Steps, validations and sampled texts on a stream.

    Args:
        is_terminal: show a bar that is redrawn in place; otherwise a line per step.
        steps_done: steps of earlier processes, when resuming.
    """

    def __init__(self, stream: TextIO, is_terminal: bool, num_steps: int, steps_done: int = 0):
        self.stream, self.num_steps = stream, num_steps
        self._recent: deque[float] = deque(maxlen=SMOOTHED_STEPS)
        self._bar = _make_bar(stream, num_steps, steps_done) if is_terminal else None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if "time/step_s" in metrics:
            self._recent.append(metrics["time/step_s"])
            self._show_step(step, metrics)
        for file, found in by_file(metrics).items():
            # mean@n is the mean reward once more
            numbers = "  ".join(f"{name} {value:.3f}" for name, value in found.items() if "mean@" not in name)
            self._print(f"  {file}  {numbers}" if file else f"validation at step {step}  {numbers}")

    def samples(self, step: int, texts: Sequence[SampleText]) -> None:
        for text in logged(texts):
            of_file = "" if text.source == "training" else f"{text.source}: "
            self._print(
                f"  {of_file}{one_line(text.prompt, 64)} | {one_line(text.response, 64)} | "
                f"reward {text.reward:g} | truth {one_line(text.truth, 16)}"
            )

    def close(self) -> None:
        """Leave the bar on the screen. The stream stays open: it is the caller's."""
        if self._bar:
            self._bar.close()

    def _show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        cells = [template.format(metrics[name]) for name, template in COLUMNS.items() if name in metrics]
        left = (self.num_steps - step) * sum(self._recent) / len(self._recent)
        cells.append(f"left {duration(left)}")
        if self._bar is None:
            self._print(f"step {step:{len(str(self.num_steps))}d}/{self.num_steps}  " + "  ".join(cells))
        else:
            self._bar.n = step
            self._bar.set_description_str("  ".join(" ".join(cell.split()) for cell in cells))

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, file=self.stream, flush=True)
        else:
            tqdm.write(line, file=self.stream)  # above the bar


def _make_bar(stream: TextIO, num_steps: int, steps_done: int) -> tqdm:
    return tqdm(
        total=num_steps,
        initial=steps_done,
        file=stream,
        dynamic_ncols=True,
        mininterval=0,  # a step is rare enough to be drawn each time
        bar_format="step {n_fmt}/{total_fmt} |{bar}| {desc}",
    )
