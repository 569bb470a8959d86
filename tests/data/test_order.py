"""Which prompt comes when: every batch is a function of the seed and of how many came before."""

import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_mp.config.schema import DataConfig
from rlhf_mp.data.order import MixedOrder, PromptOrder, make_order
from rlhf_mp.errors import CheckpointError, ConfigError


def batches(order, count):
    return [order.next() for _ in range(count)]


def drawn(order, num_batches):
    return [i for _, indices in batches(order, num_batches) for i in indices]


def test_every_epoch_visits_each_prompt_at_most_once_and_drops_only_the_incomplete_batch():
    order = PromptOrder(num_prompts=11, batch_size=3, seed=1, shuffle=True)
    visited = batches(order, 3 * order.batches_per_epoch)
    assert [epoch for epoch, _ in visited] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    epochs = [[i for e, indices in visited if e == epoch for i in indices] for epoch in range(3)]
    assert all(len(seen) == len(set(seen)) == 9 and set(seen) <= set(range(11)) for seen in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(epochs[0]) != set(epochs[1])  # not always the same ones are dropped


def test_the_order_depends_on_the_seed_alone():
    def visited(seed):
        return batches(PromptOrder(20, 4, seed, shuffle=True), 10)

    assert visited(1) == visited(1) != visited(2)


def test_without_shuffling_prompts_come_as_they_are_in_the_file_every_epoch():
    order = PromptOrder(num_prompts=5, batch_size=2, seed=1, shuffle=False)
    assert batches(order, 3) == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1])]


def pool(**change):
    return PromptOrder(**{"num_prompts": 10, "batch_size": 3, "seed": 5, "shuffle": True} | change)


def mixed(**change):
    return MixedOrder(
        **{"sizes": [7, 3, 5], "weights": [1, 2, 0.5], "batch_size": 4, "seed": 5, "shuffle": True} | change
    )


@pytest.mark.parametrize("make", [pool, mixed])
@pytest.mark.parametrize("done", range(8))
def test_a_resumed_order_continues_exactly_where_it_stopped(make, done):
    order, resumed = make(), make()
    batches(order, done)
    resumed.load_state_dict(json.loads(json.dumps(order.state_dict())))
    assert batches(resumed, 9) == batches(order, 9)


KEYS = np.array([3.0, 1.0, 2.0, 1.0, 9.0, 8.0, 7.0, 6.0, 5.0, 4.0])


@pytest.mark.parametrize(
    "make, change",
    [
        *((pool, change) for change in ({"num_prompts": 11}, {"batch_size": 2}, {"seed": 6}, {"shuffle": False})),
        (pool, {"keys": KEYS}),
        *((mixed, change) for change in ({"sizes": [7, 4, 4]}, {"weights": [1, 2, 1]}, {"seed": 6})),
    ],
)
def test_resuming_with_other_data_or_settings_is_refused(make, change):
    with pytest.raises(CheckpointError, match="now it is"):
        make(**change).load_state_dict(make().state_dict())


def test_resuming_with_another_curriculum_is_refused():
    state = pool(keys=KEYS).state_dict()
    pool(keys=KEYS * 2).load_state_dict(state)  # the same order
    with pytest.raises(CheckpointError, match="curriculum"):
        pool(keys=-KEYS).load_state_dict(state)


@pytest.mark.parametrize("make", [lambda: pool(batch_size=11), lambda: mixed(batch_size=16)])
def test_fewer_prompts_than_a_batch_are_an_error_with_numbers(make):
    with pytest.raises(ConfigError, match=r"train_batch_size = 1[16]: there are only 1[05] prompts"):
        make()
    assert pool(batch_size=10).batches_per_epoch == 1


def test_a_curriculum_goes_from_small_to_large_every_epoch_and_shuffles_equal_ones():
    keys = np.repeat([2.0, 0.0, 1.0], 20)
    order = PromptOrder(60, 20, seed=1, shuffle=True, keys=keys)
    first, second = drawn(order, 3), drawn(order, 3)
    assert [keys[i] for i in first] == [keys[i] for i in second] == sorted(keys)
    assert first[:20] != second[:20] and set(first[:20]) == set(second[:20]) == set(range(20, 40))
    unshuffled = PromptOrder(60, 20, seed=1, shuffle=False, keys=keys)
    assert drawn(unshuffled, 3) == [*range(20, 40), *range(40, 60), *range(20)]


def test_descending_turns_the_curriculum_round():
    data = DataConfig(train_batch_size=5, curriculum_key="level", curriculum_order="descending", shuffle=False)
    assert drawn(make_order([10], KEYS, data), 2) == [4, 5, 6, 7, 8, 9, 0, 2, 1, 3]


SIZES_AND_WEIGHTS = st.lists(
    st.tuples(st.integers(1, 9), st.sampled_from([0.1, 0.25, 1, 2, 3, 7.5, 100])), min_size=1, max_size=5
)


@given(SIZES_AND_WEIGHTS, st.booleans())
def test_after_any_number_of_prompts_each_file_has_given_its_share_to_within_one(files, shuffle):
    sizes, weights = zip(*files, strict=True)
    order = MixedOrder(sizes, weights, batch_size=1, seed=3, shuffle=shuffle)
    exact = [Fraction(str(w)) for w in weights]
    counts = [0] * len(sizes)
    for number, index in enumerate(drawn(order, 120), start=1):
        counts[next(f for f in range(len(sizes)) if index < sum(sizes[: f + 1]))] += 1
        assert all(abs(c - number * w / sum(exact)) < 1 for c, w in zip(counts, exact, strict=True))


def test_a_file_is_gone_through_before_any_of_it_comes_again():
    order = mixed()
    prompts = drawn(order, 30)
    for start, size in ((0, 7), (7, 3), (10, 5)):
        of_file = [i for i in prompts if start <= i < start + size]
        passes = [of_file[k : k + size] for k in range(0, len(of_file) - size + 1, size)]
        assert len(passes) >= 3
        assert all(sorted(seen) == [*range(start, start + size)] for seen in passes)
        assert passes[0] != passes[1]


def test_an_epoch_of_a_mix_is_as_many_batches_as_all_prompts_fill():
    order = mixed()  # 15 prompts in batches of 4
    assert order.batches_per_epoch == 3
    assert [epoch for epoch, _ in batches(order, 7)] == [0, 0, 0, 1, 1, 1, 2]


def test_a_mix_by_hand():
    # shares 2/3 and 1/3. Due at (drawn + 1) / share: a at 1.5, b at 3, then a at 3: a tie goes to the first file
    order = MixedOrder([2, 2], [2, 1], batch_size=3, seed=1, shuffle=False)
    assert [order.next()[1] for _ in range(2)] == [[0, 1, 2], [0, 1, 3]]


def test_weights_choose_the_mix_and_a_curriculum_holds_within_each_file():
    data = DataConfig(train_files=["a", "b"], train_batch_size=4, train_weights=[1, 1], shuffle=False)
    keys = np.array([2.0, 1.0, 0.0, 5.0, 6.0])
    order = make_order([3, 2], keys, data)
    assert isinstance(order, MixedOrder)
    assert order.next()[1] == [2, 3, 1, 4]


def test_a_file_without_prompts_cannot_have_a_share():
    data = DataConfig(train_files=["a.jsonl", "b.jsonl"], train_batch_size=2, train_weights=[1, 1])
    with pytest.raises(ConfigError, match="no prompt is left of b.jsonl"):
        make_order([3, 0], None, data)
    assert make_order([3, 0], None, DataConfig(train_batch_size=2)).batches_per_epoch == 1
