import pytest
import torch.distributed as dist
import torch.multiprocessing

from rlhf_mp.cluster.ranks import leave_ranks
from rlhf_mp.observe import metrics as metrics_module
from rlhf_mp.observe.metrics import MetricLog
from rlhf_mp.observe.reduce import added, reduce_over_ranks
from rlhf_mp.phase import Phase


class Recorder:
    def __init__(self):
        self.written, self.texts, self.closed = [], [], False

    def write(self, step, metrics):
        self.written.append((step, dict(metrics)))

    def samples(self, step, texts):
        self.texts.append((step, texts))

    def close(self):
        self.closed = True


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it."""
    now = [100.0]
    monkeypatch.setattr(metrics_module, "perf_counter", lambda: now[0])
    return now


def alone(sums):
    return sums


def test_sums_of_micro_batches_and_ranks_are_divided_once():
    # rank 0: 2 tokens with loss sum 3, then 1 token with 9; rank 1: 5 tokens with 4 -> 16 / 8, no mean of means
    other_rank = {"actor/pg_loss": (4.0, 5.0), "rollout/reward_mean": (1.0, 2.0)}
    sink = Recorder()
    log = MetricLog([sink], lambda sums: added([sums, other_rank]))
    log.add({"pg_loss": (3.0, 2.0)}, prefix="actor/")
    log.add({"pg_loss": (9.0, 1.0)}, prefix="actor/")

    metrics = log.finish(7)

    assert metrics["actor/pg_loss"] == 2.0
    assert metrics["rollout/reward_mean"] == 0.5
    assert sink.written == [(7, metrics)]


def test_a_step_starts_with_nothing_of_the_step_before(clock):
    log = MetricLog([], alone)
    with log.time(Phase.sync):
        clock[0] += 1
    log.add({"a": (1.0, 1.0)})
    log.finish(1)
    log.add({"b": (2.0, 1.0)})
    assert log.finish(2) == {"b": 2.0, "time/step_s": 0.0}


def test_a_metric_nothing_was_counted_for_is_left_out(clock):
    log = MetricLog([], alone)
    log.add({"actor/entropy": (0.0, 0.0)})
    assert log.finish(1) == {"time/step_s": 0.0}


def test_times_add_up_within_a_rank_and_are_averaged_over_ranks(clock):
    slower_rank = {"time/train_s": (9.0, 1.0), "time/step_s": (8.0, 1.0)}
    log = MetricLog([], lambda sums: added([sums, slower_rank]))
    for seconds in (1.0, 2.0):
        with log.time(Phase.train):
            clock[0] += seconds
    clock[0] += 1.0  # in no phase, but in the step
    metrics = log.finish(1)
    assert metrics["time/train_s"] == (3.0 + 9.0) / 2
    assert metrics["time/step_s"] == (4.0 + 8.0) / 2


def test_throughput_is_all_ranks_tokens_by_the_mean_seconds_of_a_rank(clock):
    other_rank = {"train/tokens": (50.0, 1.0), "time/train_s": (2.0, 1.0), "time/step_s": (5.0, 1.0)}
    log = MetricLog([], lambda sums: added([sums, other_rank]))
    log.add({"rollout/response_tokens": (300.0, 60.0), "train/tokens": (350.0, 7.0)})
    with log.time(Phase.rollout):
        clock[0] += 3.0
    with log.time(Phase.train):
        clock[0] += 2.0
    metrics = log.finish(1)
    assert metrics["throughput/tokens_per_s"] == 300 / 5
    assert metrics["throughput/rollout_tokens_per_s"] == 300 / 3
    assert metrics["throughput/train_tokens_per_s"] == 400 / 2
    assert "throughput/score_tokens_per_s" not in metrics


def test_a_validation_of_its_own_is_timed_apart_from_the_steps(clock):
    log = MetricLog([], alone)
    clock[0] += 50  # engines start
    log.start()
    clock[0] += 2
    log.add({"accuracy": (1.0, 4.0)}, prefix="eval/")
    assert log.finish(0, "eval") == {"eval/accuracy": 0.25, "time/eval_s": 2.0}
    clock[0] += 3
    assert log.finish(1) == {"time/step_s": 3.0}


def test_every_sink_gets_texts_and_is_closed():
    sinks = [Recorder(), Recorder()]
    log = MetricLog(sinks, alone)
    log.samples(3, ["text"])
    log.close()
    assert [(s.texts, s.closed) for s in sinks] == [([(3, ["text"])], True)] * 2


def test_without_a_process_group_this_process_is_all_ranks():
    assert reduce_over_ranks({"a": (1.0, 2.0)}) == {"a": (1.0, 2.0)}


def reduce_as_rank(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    own = {"shared": (1.0 + rank, 1.0)} | ({"only_rank_0": (6.0, 3.0)} if rank == 0 else {})
    assert reduce_over_ranks(own) == {"shared": (3.0, 2.0), "only_rank_0": (6.0, 3.0)}
    leave_ranks()


def test_two_real_ranks_get_the_same_sums_though_their_names_differ(tmp_path):
    torch.multiprocessing.spawn(reduce_as_rank, args=(tmp_path / "store",), nprocs=2)


def test_of_extremes_the_largest_or_smallest_is_kept_and_what_has_no_count_says_nothing():
    parts = [{"a_max": (2.0, 1), "a_min": (2.0, 1)}, {"a_max": (-9.0, 0), "a_min": (-9.0, 0)}, {"a_max": (1.0, 1.0)}]
    assert added(parts) == {"a_max": (2.0, 1.0), "a_min": (2.0, 1.0)}
    assert added([{"a_max": (-3.0, 1)}, {"a_max": (-2.0, 1)}]) == {"a_max": (-2.0, 1.0)}
