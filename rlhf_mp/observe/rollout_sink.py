"""A page of rollouts for every validation: ``rollouts/step_000050.html`` in the run directory."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from rlhf_mp.data.types import SampleText
from rlhf_mp.observe.rollout_page import Decode, Page, fitting, render_page

MAX_TOKENS = 60_000  # on one page: some 5 MB, half a second to write


class RolloutPageSink:
    """Shows a validation's samples and those of the last training step; a run without validation gets a last page.

    Args:
        load_decoder: token ids to text; called when the first page is written, because it takes a second.
        say: tells people where a page is.
    """

    def __init__(self, directory: Path, title: str, load_decoder: Callable[[], Decode], say: Callable[[str], None]):
        self.directory, self.title, self.say = directory, title, say
        self._decoder = cache(load_decoder)
        self._step = 0
        self._training: list[SampleText] = []
        self._validation: list[SampleText] = []

    def samples(self, step: int, texts: Sequence[SampleText]) -> None:
        self._step = step
        if any(text.source == "training" for text in texts):
            self._training = list(texts)
        else:
            self._validation = list(texts)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        found = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        if found and (self._validation or self._training):
            self._step = step
            self._write(found)

    def close(self) -> None:
        if self._training:
            self._write({})

    def _write(self, metrics: Mapping[str, float]) -> None:
        samples = [*self._validation, *self._training]
        shown = fitting(samples, MAX_TOKENS)
        page = Page(self.title, self._step, metrics, shown, len(samples) - len(shown))
        path = self.directory / f"step_{self._step:06d}.html"
        self.directory.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(page, self._decoder()), encoding="utf-8")
        self.say(f"rollouts {path}")
        self._validation, self._training = [], []
