"""The page of rollouts: what it shows, that nothing in it can do anything, and how a real browser draws it."""

import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import apt_packages
import pytest
from PIL import Image

from rlhf_mp.data.types import SampleText, TokenTrace
from rlhf_mp.models.tiny import byte_pair_tokenizer
from rlhf_mp.observe.rollout_page import Page, fitting, render_page, token_texts
from rlhf_mp.observe.rollout_sink import RolloutPageSink

EVIL = '<script>document.title="changed"</script><img src=x onerror=alert(1)>" style="x \x1b[2J\u202e é 🎉 七\n</pre>'
ELEMENTS = r"html|head|meta|title|style|body|header|h[12]|small|table|t[rhd]|fieldset|legend|label|input|em|p|i|main|"
ELEMENTS += r"section|article|div|pre|code|span|[sub]"  # none that does anything
BROWSERS = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def tokenizer():
    return byte_pair_tokenizer(["some plain text to learn from, twice: some plain text"], 300)


@pytest.fixture(scope="module")
def decode(tokenizer):
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def traced(tokenizer, text, **known) -> TokenTrace:
    ids = tokenizer(text)["input_ids"]
    count = len(ids)
    values = {name: [value] * count if isinstance(value, float) else value for name, value in known.items()}
    values.setdefault("loss_mask", [True] * count)
    return TokenTrace(**{"ids": ids, "logprobs": [-0.5] * count, "finish_reason": "stop"} | values)


class Reader(HTMLParser):
    """Elements in order, and text by the element it is in."""

    def __init__(self, page: str):
        super().__init__()
        self.elements, self.text, self._open = [], {}, []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag):
        assert self._open.pop() == tag  # what is opened is closed, in order

    def handle_data(self, data):
        if self._open:
            self.text[self._open[-1]] = self.text.get(self._open[-1], "") + data

    def all(self, tag):
        return [attrs for name, attrs in self.elements if name == tag]


def evil_page(tokenizer, decode) -> str:
    trace = traced(tokenizer, EVIL, advantages=0.5, ref_logprobs=-0.75)
    texts = [SampleText(EVIL, EVIL, 1.0, EVIL, source=EVIL, trace=trace)]
    return render_page(Page(EVIL, 3, {"eval/accuracy": 0.5, f"eval/{EVIL}/accuracy": 1.0}, texts), decode)


def test_whatever_a_model_writes_is_text_on_the_page(tokenizer, decode):
    page = Reader(evil_page(tokenizer, decode))
    assert [name for name, _ in page.elements if not re.fullmatch(ELEMENTS, name)] == []
    assert {name for _, attrs in page.elements for name in attrs} <= {
        *("lang", "charset", "name", "content", "http-equiv", "class", "type", "id", "checked", "style", "title"),
    }
    assert not any(c in "".join(page.text.values()) for c in ("\x1b", "\u202e"))
    written = page.text["s"]
    assert '<script>document.title="changed"</script><img src=x onerror=alert(1)>' in written
    assert "é 🎉 七" in written


def test_every_token_has_its_numbers_and_its_colours(tokenizer, decode):
    trace = traced(
        tokenizer,
        "some text",
        logprobs=[-0.1, -8.0, math.nan],
        loss_mask=[True, True, True],
        ids=[5, 6, 7],
        advantages=[1.0, -0.25, 0.0],
        ref_logprobs=[-0.1, -6.0, -1.0],
        values=[0.25, 0.5, 1.0],
    )
    page = Reader(render_page(Page("run", 1, {}, [SampleText("q", "r", 0.0, "a", trace=trace)]), decode))
    first, second, third = page.all("s")
    assert first["title"] == (
        "token 5 | log-prob -0.1 (p 0.905) | advantage 1 | value before it 0.25 | log-ratio to the reference 0"
    )
    assert first["style"] == "--l:0.03;--a:1;--n:0;--d:0"
    assert second["style"] == "--l:1;--a:0;--n:0.25;--d:0.5"
    assert "log-prob NaN" in third["title"] and third["style"].startswith("--l:1;")  # it shows


def test_tokens_of_others_are_told_apart(tokenizer, decode):
    trace = traced(tokenizer, "ab", ids=[10, 11], logprobs=[-1.0, 0.0], loss_mask=[True, False])
    page = Reader(render_page(Page("run", 1, {}, [SampleText("q", "r", 0.0, "a", trace=trace)]), decode))
    assert len(page.all("s")) == 1
    assert {"title": "token 11: not chosen by the policy"} in page.all("i")
    assert "mean log-prob -1 " in page.text["p"]


def test_responses_beyond_a_few_are_folded_and_each_prompt_stands_once(tokenizer, decode):
    texts = [SampleText("q", f"r{i}", float(i % 2), "a", trace=traced(tokenizer, "x")) for i in range(7)]
    page = Reader(render_page(Page("run", 1, {}, texts), decode))
    assert len(page.all("article")) == len(page.all("details")) == 1
    assert page.text["summary"] == "3 more responses"
    assert sum(attrs.get("class") == "response" for attrs in page.all("div")) == 7


def test_the_responses_to_a_prompt_share_one_scale_of_advantages(tokenizer, decode):
    texts = [
        SampleText("q", "r", reward, "a", trace=traced(tokenizer, "x", advantages=advantage))
        for reward, advantage in ((1.0, 1.5), (0.0, -0.375), (0.0, math.inf))
    ]
    page = Reader(render_page(Page("run", 1, {}, texts), decode))
    assert [attrs["style"].split(";", 1)[1] for attrs in page.all("s")] == [
        "--a:1;--n:0",
        "--a:0;--n:0.25",
        "--a:1;--n:0",
    ]


def test_a_page_too_full_leaves_out_last_responses_before_prompts(tokenizer, decode):
    texts = [SampleText(q, f"{q}{i}", 0.0, "a", trace=traced(tokenizer, "four")) for q in "xyz" for i in range(3)]
    size = len(texts[0].trace.ids)
    assert [t.response for t in fitting(texts, 5 * size)] == ["x0", "x1", "y0", "y1", "z0"]
    assert [t.response for t in fitting(texts, 0)] == ["x0"]
    assert fitting(texts, 9 * size) == texts
    page = Reader(render_page(Page("run", 1, {}, texts[:5], num_left_out=4), decode))
    assert "4 more responses had no room" in page.text["p"]


def test_metrics_are_a_table_with_a_row_for_each_file(decode):
    metrics = {"eval/accuracy": 0.5, "eval/gsm8k/test/accuracy": 0.25, "eval/pass@4": 1.0}
    page = Reader(render_page(Page("run", 1, metrics, []), decode))
    assert page.text["th"] == "accuracypass@4" + "all" + "gsm8k/test"
    assert page.text["td"] == "0.500" + "1.000" + "0.250"


def test_tokens_together_are_the_text(tokenizer, decode):
    text = "some é 🎉 text, 七\n twice"
    ids = tokenizer(text)["input_ids"]
    texts = token_texts(ids, decode)
    assert "".join(texts) == text and len(texts) == len(ids)
    assert "🎉" in texts  # stands at the first of its tokens


class SpacesBetween:
    """Decodes as SentencePiece does: the space before a word is written only after another token."""

    WORDS = ["one", "two"]

    def __call__(self, ids):
        return " ".join(self.WORDS[i] for i in ids)


def test_spaces_between_tokens_are_kept():
    assert token_texts([0, 1, 1], SpacesBetween()) == ["one", " two", " two"]


def test_a_page_is_written_for_each_validation_with_the_training_samples_before_it(tokenizer, decode, tmp_path):
    said, loaded = [], []
    sink = RolloutPageSink(tmp_path / "rollouts", "run", lambda: loaded.append(1) or decode, said.append)
    validation = SampleText("held out", "7", 1.0, "7", source="test", trace=traced(tokenizer, "7"))
    training = SampleText("asked", "8", 0.0, "8", trace=traced(tokenizer, "8", advantages=-1.0))
    sink.samples(0, [validation])
    sink.write(0, {"eval/accuracy": 1.0})
    assert said == [f"rollouts {tmp_path}/rollouts/step_000000.html"]
    for step in (1, 2):
        sink.samples(step, [training])
        sink.write(step, {"time/step_s": 1.0})
    sink.samples(2, [validation])
    sink.write(2, {"eval/accuracy": 1.0})
    page = (tmp_path / "rollouts" / "step_000002.html").read_text()
    assert re.findall("<h2>(.*?) <", page) == ["test", "training"] and "advantage -1" in page
    sink.close()
    assert len(said) == 2 and loaded == [1]


def test_without_validation_the_last_step_has_a_page(tokenizer, decode, tmp_path):
    sink = RolloutPageSink(tmp_path, "run", lambda: decode, lambda _: None)
    for step in (1, 2):
        sink.samples(step, [SampleText("asked", "8", 0.0, "8", trace=traced(tokenizer, "8"))])
        sink.write(step, {"time/step_s": 1.0})
    sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["step_000002.html"]


@pytest.fixture(scope="module")
def browser() -> str:
    if not any(map(shutil.which, BROWSERS)) and (why := apt_packages.install(BROWSERS[0])):
        pytest.skip(f"needs a browser, one of {', '.join(BROWSERS)} in the PATH: {why}")
    return next(filter(None, map(shutil.which, BROWSERS)))


def drawn(browser, page, folder, *options) -> str:
    (folder / "page.html").write_text(page, encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command = [browser, *flags, *options, (folder / "page.html").as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_a_browser_shows_it_and_runs_nothing_in_it(browser, tokenizer, decode, tmp_path):
    dom = drawn(browser, evil_page(tokenizer, decode), tmp_path, "--dump-dom")
    page = Reader(dom)
    assert page.text["title"].startswith("<script>document.title=")  # and not "changed"
    assert page.all("script") == page.all("img") == []
    assert len(page.all("s")) == len(tokenizer(EVIL)["input_ids"])


def test_a_browser_colours_an_unlikely_token(browser, tokenizer, decode, tmp_path):
    def warm_pixels(logprob: float) -> int:
        trace = traced(tokenizer, "some plain text", logprobs=float(logprob))
        page = render_page(Page("run", 1, {}, [SampleText("q", "r", 1.0, "a", trace=trace)]), decode)
        shot = tmp_path / f"{logprob}.png"
        drawn(browser, page, tmp_path, "--window-size=900,600", f"--screenshot={shot}")
        pixels = Image.open(shot).convert("RGB")
        assert pixels.size == (900, 600)
        colours = pixels.getcolors(900 * 600)
        return sum(count for count, (r, g, b) in colours if r - b > 60 and r > 180)

    assert warm_pixels(-4.0) > warm_pixels(0.0) + 1000  # the rest of the page has some too
