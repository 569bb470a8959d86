"""A plan as stacked bars, one a phase, against the card's size: SVG by hand, PNG through Pillow."""

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from rlhf_mp.phase import Phase
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.plan import Plan
from rlhf_mp.planner.report import headline

COLORS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948"),
    *("#9c755f", "#bab0ac", "#ff9da7", "#86bcb6", "#d4a6c8", "#499894"),
)
WIDTH, HEIGHT, LEFT, TOP, BASE = 980, 560, 70, 90, 500


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    color: str


@dataclass(frozen=True)
class Text:
    x: float
    y: float
    words: str


def bars(plan: Plan) -> tuple[list[Box], list[Text]]:
    """What to draw, in pixels from the top left."""
    moments = [m for m in (plan.peak_of(phase) for phase in Phase) if m is not None]
    on_host = plan.job.gpu is None
    limit = plan.job.gpu.memory if plan.job.gpu else 0.0
    totals = [m.host_bytes if on_host else m.gpu_bytes for m in moments]
    scale = (BASE - TOP) / (1.05 * max([limit, *totals]))
    boxes: list[Box] = []
    texts = [Text(LEFT, 20 + 18 * i, line) for i, line in enumerate(headline(plan.job).split("\n"))]
    colors: dict[str, str] = {}
    for column, (moment, whole) in enumerate(zip(moments, totals, strict=True)):
        x, y = LEFT + 20 + column * 140, float(BASE)
        for term in moment.terms:
            if term.on_host != on_host:
                continue
            color = colors.setdefault(term.label, COLORS[len(colors) % len(COLORS)])
            y -= term.bytes * scale
            boxes.append(Box(x, y, 90, term.bytes * scale, color))
        texts += [Text(x, BASE + 20, moment.phase.value), Text(x, y - 6, f"{whole / GIB:.1f} GiB")]
    if limit:
        boxes.append(Box(LEFT, BASE - limit * scale, len(moments) * 140 + 20, 2, "#000000"))
        texts.append(Text(LEFT, BASE - limit * scale - 6, f"{plan.job.gpu.name}: {limit / GIB:.1f} GiB"))
    for row, (label, color) in enumerate(reversed(colors.items())):  # as the stacks are, from the top
        y = TOP + row * 22
        boxes.append(Box(680, y, 14, 14, color))
        texts.append(Text(702, y + 12, label))
    return boxes, texts


def draw(plan: Plan, path: Path) -> None:
    """Write ``path``: .svg, or .png if Pillow is installed.

    Raises:
        ValueError: another ending, or a PNG without Pillow.
    """
    boxes, texts = bars(plan)
    if path.suffix == ".svg":
        path.write_text(_svg(boxes, texts))
        return
    if path.suffix != ".png":
        raise ValueError(f"{path}: a plot is a .png or a .svg file")
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise ValueError(
            f"{path}: PNG needs Pillow (pip install pillow); {path.with_suffix('.svg')} needs nothing"
        ) from None
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    canvas = ImageDraw.Draw(image)
    for box in boxes:
        canvas.rectangle((box.x, box.y, box.x + box.width, box.y + box.height), fill=box.color)
    for text in texts:
        canvas.text((text.x, text.y - 10), text.words, fill="black")
    image.save(path)


def _svg(boxes: list[Box], texts: list[Text]) -> str:
    shapes = [
        f'<rect x="{b.x:.1f}" y="{b.y:.1f}" width="{b.width:.1f}" height="{b.height:.1f}" fill="{b.color}"/>'
        for b in boxes
    ]
    words = [f'<text x="{t.x:.1f}" y="{t.y:.1f}">{escape(t.words)}</text>' for t in texts]
    body = "\n".join(shapes + words)
    style = 'font-family="sans-serif" font-size="12"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" {style}>\n{body}\n</svg>\n'
