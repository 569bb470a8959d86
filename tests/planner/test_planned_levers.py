"""What single keys of a config add to its plan or take from it, by hand."""

from pathlib import Path

import pytest

from rlhf_mp.config.load import config_from_dict, load_config
from rlhf_mp.config.schema import RunConfig
from rlhf_mp.phase import Phase
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.hardware import find_gpu
from rlhf_mp.planner.preflight import Machine, job_of, plan_of, plan_problems
from rlhf_mp.planner.term import Component

ROOT = Path(__file__).parents[2]
H100 = Machine(find_gpu("h100"), 1000 * GIB)
MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"


def run(folder, *words: str) -> RunConfig:
    """A config of 8 ranks."""
    given = ["trainer.n_gpus_per_node=8", "data.train_files=x.jsonl", f"{MODEL}.path={folder}"]
    return config_from_dict({}, [*given, *words])


def kept(config: RunConfig) -> float:
    """Bytes of activations that the fullest moment of training keeps on a rank."""
    moment = plan_of(config, H100).peak_of(Phase.train)
    return next(term.bytes for term in moment.terms if term.component is Component.activations)


def test_eager_attention_is_planned_with_its_matrix_of_scores(folder):
    whole = f"{MODEL}.enable_gradient_checkpointing=false"
    config = run(folder, whole)
    tokens, sequence = job_of(config, H100).batch.tokens, config.data.max_length
    more = kept(run(folder, whole, f"{MODEL}.attn_implementation=eager")) - kept(config)
    # 28 heads x 6 bytes a score; keys and values of 28 heads in place of 4; no logsumexp of 4 bytes a head
    assert more == tokens * 28 * (28 * sequence * 6 + 2 * 2 * (3584 - 512) - 28 * 4)


def test_a_rank_that_needs_more_than_its_share_of_the_card_is_refused(folder):
    def problems(share: float) -> list[str]:
        return plan_of(run(folder, f"trainer.per_process_memory_fraction={share}"), H100).problems

    (reason,) = problems(0.2)
    assert "trainer.per_process_memory_fraction=0.2 leaves it 15.93 GiB" in reason  # 0.2 x 81,559 MiB
    assert problems(0.95) == []


def test_selective_checkpointing_is_planned_with_what_products_and_attention_give(folder):
    config = run(folder)
    tokens = job_of(config, H100).batch.tokens
    more = kept(run(folder, f"{MODEL}.recompute=selective")) - kept(config)
    # bfloat16: q and o 3584 wide, k and v 512 each, attention 3584, gate and up 18944 each, down 3584; a logsumexp
    assert more == tokens * 28 * (2 * (4 * 3584 + 2 * 512 + 2 * 18944) + 4 * 28)


@pytest.mark.parametrize(
    ("words", "moments"),
    [([], 8), (["optimizer=sgd"], 4), (["optimizer=sgd", "momentum=0"], 0)],
    ids=["adamw", "sgd with momentum", "sgd"],
)
def test_an_optimizer_is_planned_with_what_it_remembers(folder, words, moments):
    config = run(folder, *(f"{ACTOR}.optim.{word}" for word in words))
    terms = plan_of(config, H100).peak_of(Phase.train).terms
    kept = sum(term.bytes for term in terms if term.component is Component.optimizer)
    assert kept == pytest.approx(moments * job_of(config, H100).model.num_params / 8)


def copies(config: RunConfig) -> dict[Phase, float]:
    """Bytes of host memory that checkpoints on their way to disk take on a rank, in every moment."""
    moments = plan_of(config, H100).moments
    return {
        m.phase: sum(t.bytes for t in m.terms if t.on_host and t.component is Component.checkpoint) for m in moments
    }


@pytest.mark.parametrize(
    ("words", "each"),
    [
        ((), (4 + 8) / 8),  # ZeRO-3: a rank's master weights and moments
        (("zero_stage=2",), 2 + (4 + 8) / 8),  # and the weights, whole
    ],
)
def test_a_checkpoint_that_is_written_in_the_background_is_planned_in_host_memory(folder, words, each):
    config = run(folder, "trainer.async_save=true", *(f"{ACTOR}.deepspeed.{word}" for word in words))
    expected = pytest.approx(each * job_of(config, H100).model.num_params)
    assert copies(config) == dict.fromkeys(Phase, expected)
    assert set(copies(run(folder)).values()) == {0}
    needed = plan_of(config, H100).host_per_node - plan_of(run(folder), H100).host_per_node
    assert words or needed == pytest.approx(8 * copies(config)[Phase.train])


def test_the_copy_of_an_adapters_checkpoint_is_the_adapters(folder):
    found = copies(run(folder, "trainer.async_save=true", f"{MODEL}.lora_rank=16"))
    assert 0 < found[Phase.train] < 12 * 0.01 * 7.6e9 / 8


def test_a_megatron_run_that_does_not_fit_is_told_to_step_on_the_host():
    pipeline = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"
    words = ["trainer.nnodes=4", f"{pipeline}=4"]  # half of the machines that the config is written for
    path = ROOT / "configs/ppo_llama3.1_70b_megatron.yaml"
    (problem,) = plan_problems(load_config(path, words), H100)
    changes = problem.fix.split(" (then")[0].split()
    assert "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true" in changes
    assert list(plan_problems(load_config(path, [*words, *changes]), H100)) == []
