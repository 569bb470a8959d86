"""R2 (whole groups) and R3 (global counts, equally many micro-batches) as properties of any plan."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlhf_mp.algorithms.aggregate import loss_aggregations
from rlhf_mp.algorithms.losses import make_policy_loss
from rlhf_mp.config.schema import ActorConfig
from rlhf_mp.data.collate import collate
from rlhf_mp.data.partition import Cut, Cuts, RankPlan, cut_rows, plan_step
from rlhf_mp.data.types import MiniBatch, Passes, PolicyOutput, Totals, Trajectory
from rlhf_mp.observe.reduce import added

LONGEST = 30

cuts = st.one_of(
    st.builds(Cut, max_tokens=st.integers(LONGEST, 3 * LONGEST), packed=st.booleans()),
    st.integers(1, 5).map(lambda n: Cut(max_sequences=n)),
)


@st.composite
def steps(draw):
    """Arguments of plan_step: groups of unequal size, their rows interleaved, enough groups for every mini-batch."""
    num_ranks = draw(st.integers(1, 4))
    groups_per_minibatch = draw(st.integers(num_ranks, num_ranks + 3))
    num_groups = groups_per_minibatch * draw(st.integers(1, 3))
    names = draw(st.lists(st.integers(0, 1000), min_size=num_groups, max_size=num_groups, unique=True))
    group_ids = draw(st.permutations([name for name in names for _ in range(draw(st.integers(1, 4)))]))
    lengths = [draw(st.integers(2, LONGEST)) for _ in group_ids]
    return {
        "lengths": lengths,
        "mask_counts": [draw(st.integers(0, length - 1)) for length in lengths],
        "group_ids": group_ids,
        "num_ranks": num_ranks,
        "groups_per_minibatch": groups_per_minibatch,
        "ppo_epochs": draw(st.integers(1, 2)),
        "train_cut": draw(cuts),
        "score_cut": draw(cuts),
    }


def for_any_step(test):
    """Without limits on time: the machine may be busy."""
    return settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])(given(steps())(test))


def first_epoch(plan, step):
    return plan.minibatches[: len(plan.minibatches) // step["ppo_epochs"]]


def rows_of(plan, minibatch):
    return [plan.rows[i] for rows in minibatch.micro_batches for i in rows]


@for_any_step
def test_every_trajectory_is_scored_once_and_trained_on_once_an_epoch(step):
    plans = plan_step(**step)
    everything = list(range(len(step["lengths"])))
    assert sorted(row for plan in plans for row in plan.rows) == everything
    for plan in plans:
        assert sorted(i for rows in plan.score_rows for i in rows) == list(range(len(plan.rows)))
        assert sorted(row for m in first_epoch(plan, step) for row in rows_of(plan, m)) == sorted(plan.rows)
        assert plan.minibatches == first_epoch(plan, step) * step["ppo_epochs"]


@for_any_step
def test_a_group_stays_on_one_rank_and_in_one_minibatch_and_the_order_of_groups_decides_which(step):
    plans = plan_step(**step)
    homes = {}
    for rank, plan in enumerate(plans):
        for number, minibatch in enumerate(first_epoch(plan, step)):
            assert rows_of(plan, minibatch), f"rank {rank} has nothing to do in mini-batch {number}"
            for row in rows_of(plan, minibatch):
                homes.setdefault(step["group_ids"][row], set()).add((rank, number))
    in_order = dict.fromkeys(step["group_ids"])
    for position, group in enumerate(in_order):
        [(_, number)] = homes[group]
        assert number == position // step["groups_per_minibatch"]


@for_any_step
def test_no_micro_batch_is_over_budget_and_all_ranks_have_equally_many(step):
    plans = plan_step(**step)

    def within(plan, rows, cut):
        lengths = [step["lengths"][plan.rows[i]] for i in rows]
        if cut.max_tokens is None:
            return len(rows) <= cut.max_sequences
        if cut.packed:
            return sum(lengths) <= cut.max_tokens
        return not rows or len(rows) * max(lengths) <= cut.max_tokens

    for plan in plans:
        assert all(within(plan, rows, step["score_cut"]) for rows in plan.score_rows)
        assert all(within(plan, rows, step["train_cut"]) for m in plan.minibatches for rows in m.micro_batches)
        assert len(plan.score_rows) == len(plans[0].score_rows)
        assert [len(m.micro_batches) for m in plan.minibatches] == [len(m.micro_batches) for m in plans[0].minibatches]
    # padding is there only to be as many as the rank with the most
    assert any(all(plan.score_rows) for plan in plans)
    for peers in zip(*(plan.minibatches for plan in plans), strict=True):
        assert any(all(m.micro_batches) for m in peers)


@for_any_step
def test_totals_are_of_the_whole_minibatch_on_every_rank(step):
    plans = plan_step(**step)
    for peers in zip(*(plan.minibatches for plan in plans), strict=True):
        rows = [row for plan, m in zip(plans, peers, strict=True) for row in rows_of(plan, m)]
        num_tokens = sum(step["mask_counts"][row] for row in rows)
        assert {m.totals for m in peers} == {Totals(max(1, num_tokens), len(rows))}


@for_any_step
def test_ranks_differ_by_at_most_the_longest_group(step):
    """Of any greedy assignment: the fullest rank was the emptiest before it got its last group."""
    plans = plan_step(**step)
    tokens_of_group = {}
    for group, length in zip(step["group_ids"], step["lengths"], strict=True):
        tokens_of_group[group] = tokens_of_group.get(group, 0) + length
    for peers in zip(*(first_epoch(plan, step) for plan in plans), strict=True):
        loads = [sum(step["lengths"][r] for r in rows_of(plan, m)) for plan, m in zip(plans, peers, strict=True)]
        present = {step["group_ids"][r] for plan, m in zip(plans, peers, strict=True) for r in rows_of(plan, m)}
        assert max(loads) - min(loads) <= max(tokens_of_group[group] for group in present)


def test_a_step_by_hand():
    plans = plan_step(
        lengths=[5, 2, 9, 3, 4, 4],
        mask_counts=[1, 2, 3, 0, 1, 1],
        group_ids=[7, 7, 3, 3, 8, 8],
        num_ranks=2,
        groups_per_minibatch=3,
        ppo_epochs=1,
        train_cut=Cut(max_tokens=10),
        score_cut=Cut(max_sequences=4),
    )
    # groups 7, 3, 8 have 7, 12 and 8 tokens: 3 goes to rank 0, 8 to rank 1, and 7 to rank 1, which has fewer (8 < 12)
    # rank 0, rows 2 (9 tokens) and 3 (3): 2 * 9 > 10, so they are apart
    # rank 1, rows 4 5 0 1 of 4, 4, 5 and 2 tokens: [0 with 4: 2 * 5 <= 10], [5 with 1: 2 * 4 <= 10]
    totals = Totals(num_tokens=8, num_sequences=6)
    assert plans == [
        RankPlan([2, 3], [[0, 1]], [MiniBatch([[0], [1]], totals)]),
        RankPlan([4, 5, 0, 1], [[2, 0, 1, 3]], [MiniBatch([[2, 0], [1, 3]], totals)]),
    ]


@for_any_step
def test_a_critic_gets_the_same_mini_batches_in_its_own_cuts(step):
    """As if the actor had its cuts and epochs."""
    theirs = {"train_cut": step["score_cut"], "score_cut": step["train_cut"], "ppo_epochs": step["ppo_epochs"] + 1}
    plans = plan_step(**step, critic=Cuts(theirs["train_cut"], theirs["score_cut"], theirs["ppo_epochs"]))
    assert [replace(plan, critic=None) for plan in plans] == plan_step(**step)
    expected = plan_step(**step | theirs)
    assert [plan.critic for plan in plans] == [Passes(plan.score_rows, plan.minibatches) for plan in expected]


def test_without_padding_rows_fill_the_room_that_is_left():
    lengths = [9, 3, 6, 1, 5]
    # by length 9, 6, 5, 3, 1 into tens: 9 + 1, 6 + 3, 5; padded, 9 | 6 | 5 with 3 | 1
    assert cut_rows([[row] for row in range(5)], lengths, Cut(max_tokens=10, packed=True)) == [[0, 3], [2, 1], [4]]
    assert cut_rows([[row] for row in range(5)], lengths, Cut(max_tokens=10)) == [[0], [2], [4, 1], [3]]


@given(st.lists(st.integers(1, LONGEST), min_size=1, max_size=60), st.integers(LONGEST, 3 * LONGEST))
def test_packing_needs_no_more_micro_batches_than_padding_and_leaves_less_than_half_empty(lengths, budget):
    rows = [[row] for row in range(len(lengths))]
    packed = cut_rows(rows, lengths, Cut(max_tokens=budget, packed=True))
    assert len(packed) <= len(cut_rows(rows, lengths, Cut(max_tokens=budget)))
    # of first-fit: any two micro-batches hold more than one may
    fills = sorted(sum(lengths[row] for row in rows) for rows in packed)
    assert len(fills) < 2 or fills[0] + fills[1] > budget


ONE_ROW = {"num_ranks": 1, "groups_per_minibatch": 1, "ppo_epochs": 1, "score_cut": Cut(max_sequences=1)}


def test_with_everything_masked_out_the_token_count_is_one_so_that_the_loss_is_zero_and_not_nan():
    [plan] = plan_step([5], [0], [0], train_cut=Cut(max_tokens=5), **ONE_ROW)
    assert plan.minibatches[0].totals == Totals(num_tokens=1, num_sequences=1)


def test_a_row_that_fits_no_micro_batch_is_named():
    with pytest.raises(ValueError, match="trajectory 1 has 11 tokens, more than the 10 of a micro-batch"):
        plan_step([5, 11], [1, 1], [0, 0], train_cut=Cut(max_tokens=10), **ONE_ROW)


def test_fewer_groups_than_ranks_are_refused():
    with pytest.raises(ValueError, match=r"1 prompt\(s\) cannot feed 2 ranks"):
        plan_step([5, 5], [1, 1], [0, 0], train_cut=Cut(max_tokens=10), **ONE_ROW | {"num_ranks": 2})


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 lengths, 1 mask counts and 2 group ids"):
        plan_step([5, 5], [1], [0, 0], train_cut=Cut(max_tokens=10), **ONE_ROW)


@pytest.mark.parametrize("limits", [{}, {"max_tokens": 1, "max_sequences": 1}])
def test_a_cut_has_exactly_one_limit(limits):
    with pytest.raises(ValueError, match="exactly one"):
        Cut(**limits)


def random_trajectories(generator, num_groups=6, group_size=3):
    def integers(low, high, count):
        return torch.randint(low, high, (count,), generator=generator).tolist()

    trajectories = []
    for group in range(num_groups):
        prompt = integers(1, 11, integers(1, 6, 1)[0])
        for length in integers(1, 12, group_size):
            mask = [bool(x) for x in integers(0, 4, length)]
            logprobs = [-x / 10 for x in integers(1, 30, length)]
            trajectories.append(
                Trajectory(prompt, integers(1, 11, length), logprobs, mask, 0.0, group, version=0, finish_reason="stop")
            )
    return trajectories


def tiny_model():
    """Log-probs of each token given the one before it; padding is scored like anything else."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11)).double()


def forward(model, batch):
    logits = model(batch.tokens[:, :-1]).log_softmax(-1)
    logprobs = logits.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    entropy = -(logits.exp() * logits).sum(-1)
    return PolicyOutput(*(torch.nn.functional.pad(x, (1, 0)) for x in (logprobs, entropy)))


def advantage_of(trajectory):
    """Any number that belongs to the trajectory wherever it ends up."""
    return sum(trajectory.response_ids) / 10 - 2


def loss_gradient_and_metrics(trajectories, plans, configured):
    model, loss_fn = tiny_model(), make_policy_loss(configured)
    loss, sums = 0.0, {}
    for plan in plans:
        mine = [trajectories[row] for row in plan.rows]
        share = collate(mine)
        share.advantages = torch.tensor([advantage_of(t) for t in mine])[:, None] * share.mask
        share.old_logprobs, share.ref_logprobs = share.rollout_logprobs, share.rollout_logprobs * 1.1
        [minibatch] = plan.minibatches
        for rows in minibatch.micro_batches:
            batch = share.select(rows)
            part, metrics = loss_fn(forward(model, batch), batch, minibatch.totals)
            part.backward()
            loss += part.item()
            sums = added([sums, {name: (total.item(), count.item()) for name, (total, count) in metrics.items()}])
    return torch.tensor(loss, dtype=torch.float64), [p.grad for p in model.parameters()], sums


@pytest.mark.parametrize("mode", [*loss_aggregations])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), num_ranks=st.integers(1, 4), cut=cuts)
def test_loss_gradient_and_metrics_do_not_depend_on_ranks_or_micro_batches_or_order(mode, seed, num_ranks, cut):
    generator = torch.Generator().manual_seed(seed)
    trajectories = random_trajectories(generator)
    configured = ActorConfig(
        clip_ratio_low=0.2, clip_ratio_high=0.3, loss_agg_mode=mode, entropy_coeff=0.1, use_kl_loss=True
    )

    def result(order, num_ranks, cut):
        ordered = [trajectories[i] for i in order]
        plans = plan_step(
            [t.num_tokens for t in ordered],
            [sum(t.loss_mask) for t in ordered],
            [t.group_id for t in ordered],
            num_ranks=num_ranks,
            groups_per_minibatch=6,
            ppo_epochs=1,
            train_cut=cut,
            score_cut=cut,
        )
        return loss_gradient_and_metrics(ordered, plans, configured)

    whole = result(range(18), 1, Cut(max_sequences=18))
    shuffled = torch.randperm(18, generator=generator).tolist()
    # rewards and log-probs are float32, so the parts add up to its precision
    torch.testing.assert_close(result(shuffled, num_ranks, cut), whole, rtol=1e-5, atol=1e-6)
    assert whole[2]["loss"] == pytest.approx((whole[0].item(), 1.0))  # shares of a mini-batch add up to one
