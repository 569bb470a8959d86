"""The table of memory levers: what each row turns on, and what it is compared with."""

from benchmarks.memory_levers import BASE, CUMULATIVE, LEVERS, cases, table
from rlhf_mp.config.load import config_from_dict


def test_every_lever_has_a_row_by_itself_and_the_sum_grows_by_one_at_a_time():
    found = cases()
    assert [*found][: 1 + len(LEVERS)] == ["none", *LEVERS]
    for name, lever in LEVERS.items():
        assert found[name] == BASE | lever
    summed = [BASE | LEVERS[CUMULATIVE[0]], *(found[f"+ {name}"] for name in CUMULATIVE[1:])]
    for before, after, name in zip(summed, summed[1:], CUMULATIVE[1:], strict=False):
        assert after == before | LEVERS[name] != before


def test_every_row_is_a_config_that_loads():
    for overrides in cases().values():
        words = [f"{key}={value}" for key, value in overrides.items()]
        config_from_dict({}, ["data.train_files=x.jsonl", "actor_rollout_ref.model.path=x", "trainer.n_gpus_per_node=1",
                              "actor_rollout_ref.actor.strategy=torch", "data.max_prompt_length=16",
                              "data.max_response_length=240", *words])  # fmt: skip


def test_shares_are_of_the_first_row():
    row = {"lever": "none", "peak_bytes": 200e6, "rss_bytes": 1e6, "seconds": 2.0, "padding": 0.5}
    rows = [row | {"max_loss_difference": 0.0}]
    rows.append(rows[0] | {"lever": "x", "peak_bytes": 50e6, "seconds": 3.0, "max_loss_difference": 1e-7})
    assert table(rows).splitlines()[2].split() == ["x", "50", "25%", "1", "3.00", "150%", "50%", "1.0e-07"]
