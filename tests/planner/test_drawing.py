"""The picture shows the plan's numbers."""

import pytest

from rlhf_mp.phase import Phase
from rlhf_mp.planner.drawing import BASE, bars, draw
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.job import Batch, Engine, Job, ZeroLayout
from rlhf_mp.planner.known_models import find_model
from rlhf_mp.planner.plan import make_plan

JOB = Job(find_model("qwen2.5-7b"), ZeroLayout(8), Batch(8192, 2048), find_gpu("h100"), engine=Engine(num_engines=8))


def test_bars_are_as_high_as_their_terms_on_one_scale():
    plan = make_plan(JOB)
    boxes, texts = bars(plan)
    stacked = [b for b in boxes if b.width == 90]
    for column, phase in enumerate(Phase):
        x = min(b.x for b in stacked) + 140 * column
        moment = plan.peak_of(phase)
        heights = [b.height for b in stacked if b.x == x]
        gpu_terms = [t for t in moment.terms if not t.on_host]
        assert len(heights) == len(gpu_terms)
        scale = heights[0] / gpu_terms[0].bytes
        assert sum(heights) == pytest.approx(moment.gpu_bytes * scale)
    line = next(b for b in boxes if b.color == "#000000")
    assert BASE - line.y == pytest.approx(plan.job.gpu.memory * scale)
    assert {p.value for p in Phase} <= {t.words for t in texts}


def test_svg_needs_nothing_and_png_needs_pillow(tmp_path):
    draw(make_plan(JOB), tmp_path / "plan.svg")
    assert (tmp_path / "plan.svg").read_text().startswith("<svg")
    pytest.importorskip("PIL")
    draw(make_plan(JOB), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_other_endings_are_refused(tmp_path):
    with pytest.raises(ValueError, match=".png or a .svg"):
        draw(make_plan(JOB), tmp_path / "plan.pdf")
