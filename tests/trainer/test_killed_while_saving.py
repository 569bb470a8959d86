"""kill -9 at random moments: there is always a whole checkpoint, and little is lost."""

import pytest
from killed_run import SAVE_FREQ, kill_again_and_again

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    "in_background",
    [pytest.param(False, marks=pytest.mark.long, id="waiting"), pytest.param(True, id="in the background")],
)
def test_ten_kills_while_it_saves_and_every_resume_works(tmp_path, tiny_checkpoint, in_background):
    tally = kill_again_and_again(tmp_path / "run", str(tiny_checkpoint), 10, in_background=in_background)
    assert tally.kills == 10 and tally.step > 10
    assert tally.while_saving > 0  # kills that came in the middle of it
    # One that is being written may be lost with the steps since the one before; in the background they go on meanwhile.
    assert tally.most_lost <= SAVE_FREQ * (2 if in_background else 1)
