"""Sampled episodes as one HTML file: every token with its log-prob, advantage and divergence from the reference.

It holds no script and loads nothing, so it can be mailed and opened anywhere; whatever a model wrote is escaped.
Which number colours the tokens is chosen by radio buttons, in CSS.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from html import escape
from itertools import groupby
from math import exp, isfinite

from rlhf_mp.data.types import SampleText, TokenTrace
from rlhf_mp.observe.eval_table import by_file

UNREADABLE = "\N{REPLACEMENT CHARACTER}"
OPEN_RESPONSES = 4
FAINT = 4.0  # nats: a token of probability 0.018 or less has the full colour
CHOICE = """<fieldset><legend>colour tokens by</legend>
<label><input type="radio" name="by" id="by-l" checked> surprise: low log-prob</label>
<label><input type="radio" name="by" id="by-a"> advantage:
<em class="up">raised</em> <em class="down">lowered</em></label>
<label><input type="radio" name="by" id="by-d"> distance to the reference</label>
<label><input type="radio" name="by" id="by-0"> nothing</label>
<p>Hold the pointer over a token for its numbers. <i>Grey tokens</i> were not chosen by the policy.</p>
</fieldset>"""
STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf8;--card:#fff;--ink:#24292f;--quiet:#6a737d;--line:#e3e0da;
--warm:#e0862b;--up:#2b8a5f;--down:#c4483f;--cool:#4a76c9}
@media(prefers-color-scheme:dark){:root{--paper:#16181b;--card:#1e2125;--ink:#d8dbdf;--quiet:#8b949e;--line:#33383e}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:68rem;padding:1.5rem 1rem 4rem;background:var(--paper);color:var(--ink);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.35rem;margin:0 0 .8rem}h2{font-size:1.05rem;margin:2rem 0 .6rem}
small,.facts,.truth span,fieldset,summary{color:var(--quiet);font-weight:400}
.metrics{border-collapse:collapse;font-variant-numeric:tabular-nums;margin-bottom:1rem}
.metrics th,.metrics td{padding:.2rem .9rem .2rem 0;text-align:right;border-bottom:1px solid var(--line)}
.metrics th{font-weight:500;color:var(--quiet)}.metrics th:first-child{text-align:left}
fieldset{border:1px solid var(--line);border-radius:8px;padding:.4rem .9rem;position:sticky;top:.5rem;
background:var(--card);z-index:1}
fieldset label{margin-right:1.2rem;white-space:nowrap}fieldset p{margin:.2rem 0 0;font-size:.85rem}
header{display:contents}
em{font-style:normal}.up{color:var(--up)}.down{color:var(--down)}
article{background:var(--card);border:1px solid var(--line);border-radius:8px;margin:0 0 1rem;overflow:hidden}
pre{font:13px/1.65 ui-monospace,"DejaVu Sans Mono",monospace;white-space:pre-wrap;overflow-wrap:anywhere;margin:0}
.prompt{padding:.8rem 1rem;background:color-mix(in srgb,var(--line) 35%,transparent)}
.truth{margin:.5rem 0 0;font-size:.9rem}.truth span+code{margin-right:1rem}
.response,summary{padding:.6rem 1rem;border-top:1px solid var(--line)}
.facts{margin:0 0 .3rem;font-size:.85rem}summary{cursor:pointer}
.good{color:var(--up)}.bad{color:var(--down)}.half{color:var(--warm)}
s{text-decoration:none;border-radius:3px;outline:1px solid color-mix(in srgb,var(--line) 60%,transparent)}
s:empty::before{content:"\\b7";color:var(--quiet)}
s:hover{outline:2px solid var(--quiet)}
i{color:var(--quiet);font-style:normal}u{color:var(--down);text-decoration:none}
body:has(#by-l:checked) s{background:color-mix(in srgb,var(--warm) calc(var(--l,0)*70%),transparent)}
body:has(#by-a:checked) s{background:color-mix(in srgb,var(--up) calc(var(--a,0)*60%),
color-mix(in srgb,var(--down) calc(var(--n,0)*60%),transparent))}
body:has(#by-d:checked) s{background:color-mix(in srgb,var(--cool) calc(var(--d,0)*70%),transparent)}
"""

Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Page:
    """What one page shows."""

    title: str
    step: int
    metrics: Mapping[str, float]  # of the validation
    samples: Sequence[SampleText]  # responses to one prompt follow each other
    num_left_out: int = 0


def fitting(samples: Sequence[SampleText], max_tokens: int) -> list[SampleText]:
    """As many as have room, and at least one: first responses to all prompts before second ones."""
    number, counts = [], Counter()
    for sample in samples:
        prompt = (sample.source, sample.prompt, sample.truth)
        number.append(counts[prompt])
        counts[prompt] += 1
    taken, used = [], 0
    for i in sorted(range(len(samples)), key=number.__getitem__):
        used += len(samples[i].trace.ids) if samples[i].trace else 0
        if taken and used > max_tokens:
            break
        taken.append(i)
    return [samples[i] for i in sorted(taken)]


def remembering(decode: Decode) -> Decode:
    """Tokens and pairs of them come again and again."""
    known = lru_cache(100_000)(lambda ids: decode(list(ids)))
    return lambda ids: known(tuple(ids))


def token_texts(ids: Sequence[int], decode: Decode) -> list[str]:
    """What each token adds to the text. A character of several tokens stands at the first of them.

    Decoding token by token would lose the spaces that some tokenizers write only between tokens.
    """
    texts = []
    for i, token in enumerate(ids):
        before, both = decode(list(ids[max(i - 1, 0) : i])), decode(list(ids[max(i - 1, 0) : i + 1]))
        texts.append(both[len(before) :] if both.startswith(before) else decode([token]))
    for is_part, run in groupby(range(len(ids)), key=lambda i: UNREADABLE in decode([ids[i]])):
        first, *others = run
        if is_part and UNREADABLE not in (whole := decode([ids[i] for i in (first, *others)])):
            texts[first], texts[first + 1 : first + 1 + len(others)] = whole, [""] * len(others)
    return texts


def render_page(page: Page, decode: Decode) -> str:
    """The whole file."""
    decode = remembering(decode)
    sources = "\n".join(
        source_section(source, [*of_source], decode) for source, of_source in groupby(page.samples, lambda s: s.source)
    )
    title = escape("".join(filter(str.isprintable, f"{page.title}, step {page.step}")))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>{visible(page.title)} <small>after step {page.step}</small></h1>
{metrics_table(page.metrics)}
{CHOICE}
</header>
<main>
{sources}
{f"<p>{page.num_left_out} more responses had no room on this page.</p>" if page.num_left_out else ""}
</main>
</body>
</html>
"""


def metrics_table(metrics: Mapping[str, float]) -> str:
    """``eval/`` metrics, a row for each file."""
    table = by_file(metrics)
    columns = list(dict.fromkeys(metric for row in table.values() for metric in row))
    rows = []
    for file, row in table.items():
        cells = "".join(f"<td>{row[column]:.3f}</td>" if column in row else "<td></td>" for column in columns)
        rows.append(f"<tr><th>{visible(file or 'all')}</th>{cells}</tr>")
    heads = "".join(f"<th>{visible(column.replace('_', ' '))}</th>" for column in columns)
    return f'<table class="metrics"><tr><th></th>{heads}</tr>{"".join(rows)}</table>' if rows else ""


def source_section(source: str, samples: Sequence[SampleText], decode: Decode) -> str:
    groups = [[*group] for _, group in groupby(samples, lambda s: (s.prompt, s.truth))]
    body = "\n".join(prompt_article(group, decode) for group in groups)
    about = "sampled in this step, trained on" if source == "training" else "validation"
    return f"<section><h2>{visible(source)} <small>{about}</small></h2>\n{body}\n</section>"


def prompt_article(group: Sequence[SampleText], decode: Decode) -> str:
    """A prompt with its responses; more than a few are folded."""
    advantages = [a for sample in group if sample.trace for a in sample.trace.advantages or []]
    largest = max((abs(a) for a in advantages if isfinite(a)), default=0) or 1.0
    shown = [response_block(sample, decode, largest) for sample in group]
    mean = sum(sample.reward for sample in group) / len(group)
    more = ""
    if len(shown) > OPEN_RESPONSES:
        more = (
            f"<details><summary>{len(shown) - OPEN_RESPONSES} more responses</summary>"
            f"{''.join(shown[OPEN_RESPONSES:])}</details>"
        )
    return (
        f'<article><div class="prompt"><pre>{visible(group[0].prompt)}</pre>'
        f'<p class="truth"><span>answer</span> <code>{visible(group[0].truth)}</code> '
        f"<span>mean reward of {len(group)}</span> {number(mean)}</p></div>"
        f"{''.join(shown[:OPEN_RESPONSES])}{more}</article>"
    )


def response_block(sample: SampleText, decode: Decode, largest_advantage: float) -> str:
    trace = sample.trace
    good = "good" if sample.reward >= 1 else "bad" if sample.reward <= 0 else "half"
    facts = [f'<b class="{good}">reward {number(sample.reward)}</b>']
    if trace is None:
        return f'<div class="response"><p class="facts">{facts[0]}</p><pre>{visible(sample.response)}</pre></div>'
    chosen = [i for i, mine in enumerate(trace.loss_mask) if mine]
    facts.append(f"{len(trace.ids)} tokens")
    if chosen:
        facts.append(f"mean log-prob {number(sum(trace.logprobs[i] for i in chosen) / len(chosen))}")
    if chosen and trace.advantages is not None:
        facts.append(f"mean advantage {number(sum(trace.advantages[i] for i in chosen) / len(chosen))}")
    facts.append({"stop": "ended by itself", "length": "cut at the length limit"}.get(trace.finish_reason, "aborted"))
    return (
        f'<div class="response"><p class="facts">{" · ".join(facts)}</p>'
        f'<pre class="tokens">{"".join(token_spans(trace, decode, largest_advantage))}</pre></div>'
    )


def token_spans(trace: TokenTrace, decode: Decode, largest_advantage: float) -> Iterator[str]:
    """One element a token. ``--l``, ``--a`` and ``--n``, ``--d``: how strong each number colours it, from 0 to 1."""
    for i, text in enumerate(token_texts(trace.ids, decode)):
        if not trace.loss_mask[i]:
            yield f'<i title="token {trace.ids[i]}: not chosen by the policy">{visible(text)}</i>'
            continue
        logprob = trace.logprobs[i]
        about = [f"token {trace.ids[i]}", f"log-prob {number(logprob)} (p {exp(min(logprob, 0)):.3f})"]
        style = [f"--l:{strength(-logprob / FAINT)}"]
        if trace.advantages is not None:
            about.append(f"advantage {number(trace.advantages[i])}")
            advantage = trace.advantages[i] / largest_advantage
            style += [f"--a:{strength(advantage)}", f"--n:{strength(-advantage)}"]
        if trace.values is not None:
            about.append(f"value before it {number(trace.values[i])}")
        if trace.ref_logprobs is not None:
            about.append(f"log-ratio to the reference {number(logprob - trace.ref_logprobs[i])}")
            style.append(f"--d:{strength(abs(logprob - trace.ref_logprobs[i]) / FAINT)}")
        yield f'<s style="{";".join(style)}" title="{escape(" | ".join(about))}">{visible(text)}</s>'


def strength(x: float) -> str:
    """0 to 1 in hundredths; what is not a number is as strong as can be, so that it shows."""
    return f"{min(max(x, 0.0), 1.0) if x == x else 1.0:.2f}".rstrip("0").rstrip(".")


def number(x: float | None) -> str:
    return "" if x is None else f"{x:.3f}".rstrip("0").rstrip(".") if x == x else "NaN"


def visible(text: str) -> str:
    """Escaped, with control characters as signs of their own: they must neither vanish nor reorder what is shown."""
    return "".join(map(visible_character, text))


def visible_character(c: str) -> str:
    if c in "\n\t":
        return ("\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}" if c == "\n" else "\N{RIGHTWARDS ARROW}") + c
    if c == " " or c.isprintable():
        return escape(c)
    return f"<u>{escape(repr(c)[1:-1])}</u>"
