"""How good the quickstart's model is when it is handed over."""

import pytest

from rlhf_mp import quickstart


@pytest.fixture
def learns(monkeypatch, tmp_path):
    """``learns(curve)``: the held-out accuracy after each step, whatever is learnt; returns the steps of each look."""
    quickstart.make_checkpoint(tmp_path / "model", quickstart.character_tokenizer(quickstart.CHARACTERS))
    monkeypatch.setattr(quickstart, "BATCH", 1)

    def as_in(curve):
        steps, looks = {}, []

        class Engine(quickstart.TorchEngine):
            def train_step(self, *args):
                steps[self] = steps.get(self, 0) + 1
                return super().train_step(*args)

        def look(engine, held_out):
            looks.append(steps[engine])
            return curve(steps[engine])

        monkeypatch.setattr(quickstart, "TorchEngine", Engine)
        monkeypatch.setattr(quickstart, "accuracy", look)
        return quickstart.warm_start(tmp_path, seed=0), looks

    return as_in


def test_it_is_handed_over_at_the_first_look_that_finds_it_good_enough(learns):
    assert learns(lambda step: step / 50) == (pytest.approx(0.4), [10, 20])


def test_where_it_gets_too_good_between_two_looks_it_is_trained_again_and_looked_at_after_each_step(learns):
    assert learns(lambda step: step / 15) == (pytest.approx(1 / 3), [10, 1, 2, 3, 4, 5])


def test_a_step_that_makes_it_too_good_at_once_asks_for_another_seed(learns):
    with pytest.raises(RuntimeError, match="jumped to 0.900 at step 3; choose another --seed"):
        learns(lambda step: 0.9 if step > 2 else 0.0)
