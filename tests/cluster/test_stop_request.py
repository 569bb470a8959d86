"""One rank looks, all stop alike; what an earlier run left doesn't stop this one."""

from rlhf_mp.cluster.stop_request import STOP, STOPPED, StopRequest


def test_a_request_is_seen_by_all_and_its_fulfilment_is_left_to_read(tmp_path):
    first = StopRequest(tmp_path, True, lambda seen: seen)
    assert not first.made()
    (tmp_path / STOP).touch()
    assert first.made()
    first.fulfil()
    assert [path.name for path in tmp_path.iterdir()] == [STOPPED]
    assert not first.made()


def test_other_ranks_take_the_first_ones_word(tmp_path):
    (tmp_path / STOP).touch()
    sent = []
    other = StopRequest(tmp_path, False, lambda seen: sent.append(seen) or "rank 0's")
    assert other.made() == "rank 0's"
    assert sent == [False]
    other.fulfil()
    assert (tmp_path / STOP).exists()  # rank 0 changes files, nobody else


def test_leftovers_of_an_earlier_run_are_removed(tmp_path):
    for name in (STOP, STOPPED):
        (tmp_path / name).touch()
    assert not StopRequest(tmp_path, True, lambda seen: seen).made()
    assert list(tmp_path.iterdir()) == []
