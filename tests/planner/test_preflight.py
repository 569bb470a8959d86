"""A run's config becomes a plan; a run that cannot fit is refused with what would help."""

from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_mp.config.load import config_from_dict, load_config
from rlhf_mp.config.model_folder import count_parameters
from rlhf_mp.phase import Phase
from rlhf_mp.planner.amount import GIB
from rlhf_mp.planner.engine_share import safe_shares
from rlhf_mp.planner.hardware import CONTEXT, find_gpu
from rlhf_mp.planner.hf_config import read_shape
from rlhf_mp.planner.nearest_fit import nearest_fit
from rlhf_mp.planner.plan import make_plan
from rlhf_mp.planner.preflight import Machine, job_of, plan_of, plan_problems, this_machine
from rlhf_mp.planner.report import describe
from rlhf_mp.planner.term import Component, Role

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
H100 = Machine(find_gpu("h100"), 1000 * GIB)
LAPTOP = Machine(None, 16 * GIB)


def run(folder, **knobs):
    """A config of 8 ranks; knobs as dotted words."""
    words = {
        "trainer.n_gpus_per_node": 8,
        "data.train_files": "x.jsonl",
        "actor_rollout_ref.model.path": folder,
    } | knobs
    return config_from_dict({}, [f"{key}={value}" for key, value in words.items()])


def knobs(text):
    """The overrides in a fix, e.g. "a.b=1 c=2 (then ...)"."""
    return dict(word.split("=") for word in text.split(" (")[0].split())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_in_the_repository_is_planned(path, folder):
    overrides = [] if "7b" in path.stem else [f"actor_rollout_ref.model.path={folder}"]
    if load_config(path).reward_model.enable:
        overrides.append(f"reward_model.model.path={folder}")
    config = load_config(path, overrides)
    if config.reward_model.enable:
        config.reward_model.model.path = str(folder)
    plan = plan_of(config, H100)
    phases = {"rl": set(Phase), "dpo": {Phase.score, Phase.train}, "sft": {Phase.train}, "reward_model": {Phase.train}}
    assert {moment.phase for moment in plan.moments} == phases[config.trainer.task]
    assert plan.peak > 0


def test_tasks_without_sampling_hold_what_they_train_and_no_more():
    configs = {task: load_config(ROOT / "configs" / f"{task}_qwen2.5_7b_deepspeed.yaml") for task in ("sft", "dpo")}
    configs["reward_model"] = load_config(ROOT / "configs" / "rm_qwen2.5_7b_megatron.yaml")
    jobs = {task: job_of(config, H100) for task, config in configs.items()}
    assert {task: (job.algorithm, job.engine, job.reference) for task, job in jobs.items()} == {
        "sft": ("sft", None, False), "dpo": ("dpo", None, True), "reward_model": ("reward_model", None, False),
    }  # fmt: skip
    # Qwen2.5-7B without its output matrix of 152,064 x 3,584, with one row of 3,584 in its place
    assert jobs["reward_model"].num_actor_params == 7_615_616_512 - 152_064 * 3_584 + 3_584
    assert jobs["sft"].num_actor_params == 7_615_616_512
    assert jobs["dpo"].workload.num_sequences == 2 * 128


def test_a_known_model_is_planned_before_it_is_downloaded():
    config = load_config(ROOT / "configs" / "grpo_qwen2.5_7b_deepspeed.yaml")
    assert job_of(config, H100).model.num_params == 7_615_616_512


def test_the_shape_counts_what_a_checkpoint_holds(tiny_checkpoint):
    assert read_shape(tiny_checkpoint).num_params == count_parameters(tiny_checkpoint)


def test_the_run_is_read_as_it_is_written(folder):
    job = job_of(
        run(
            folder,
            **{
                "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "true",
                "actor_rollout_ref.actor.use_kl_loss": "true",
                "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 8192,
                "actor_rollout_ref.model.enable_gradient_checkpointing": "false",
                "actor_rollout_ref.rollout.tensor_model_parallel_size": 4,
                "data.max_prompt_length": 1000,
                "data.max_response_length": 500,
            },
        ),
        H100,
    )
    assert str(job.layout) == "ZeRO-3 over 8 +optimizer offload"
    assert (job.batch.tokens, job.batch.sequence, job.batch.recompute) == (8192, 1500, "none")
    assert (job.engine.tp, job.engine.num_engines, job.reference) == (4, 2, True)


def test_micro_batches_counted_in_sequences_are_planned_at_full_length(folder):
    config = run(
        folder,
        **{
            "actor_rollout_ref.actor.use_dynamic_bsz": "false",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 3,
            "data.max_prompt_length": 100,
            "data.max_response_length": 60,
        },
    )
    assert job_of(config, H100).batch.tokens == 3 * 160


def test_a_micro_batch_is_never_planned_larger_than_a_ranks_share_of_a_mini_batch(folder):
    config = run(folder, **{"actor_rollout_ref.actor.ppo_mini_batch_size": 8, "actor_rollout_ref.rollout.n": 2})
    # 8 prompts over 8 ranks, 2 responses each, 512 + 512 tokens
    assert job_of(config, H100).batch.tokens == 2 * 1024


@pytest.mark.parametrize("knob", ["reference", "old policy"])
def test_only_what_the_algorithm_scores_is_planned(folder, knob):
    one_update = {"actor_rollout_ref.actor.ppo_mini_batch_size": 1024}
    names = [m.name for m in plan_of(run(folder, **one_update), H100).moments]
    assert "old log-probs" not in names and "reference log-probs" not in names
    names = [m.name for m in plan_of(run(folder, **{"actor_rollout_ref.actor.use_kl_loss": "true"}), H100).moments]
    assert {"reference": "reference log-probs", "old policy": "old log-probs"}[knob] in names


def test_a_run_that_cannot_fit_says_by_how_much_and_what_would_help(folder):
    """All logits at once are the largest thing there is: in chunks the same run fits."""
    too_much = {"actor_rollout_ref.rollout.gpu_memory_utilization": 0.6, "actor_rollout_ref.model.logits_chunk_mb": 0}
    too_much["actor_rollout_ref.rollout.free_cache_engine"] = False
    (problem,) = plan_problems(run(folder, **too_much), H100)
    assert "too much; largest: actor logits" in problem.reason
    assert "trainer.skip_plan=true" in problem.fix
    fix = knobs(problem.fix.split(";")[0])
    assert fix == {"actor_rollout_ref.model.logits_chunk_mb": "512"}
    assert list(plan_problems(run(folder, **too_much | fix), H100)) == []


@pytest.mark.parametrize(("chunk_mb", "expected"), [(512, 841), (1000, 1644), (0, None)])
def test_logits_are_planned_a_chunk_at_a_time(folder, chunk_mb, expected):
    job = job_of(run(folder, **{"actor_rollout_ref.model.logits_chunk_mb": chunk_mb}), H100)
    assert job.batch.logit_tokens == expected  # e.g. 512e6 / (4 x 152,064)


def test_what_fits_has_no_problems(folder):
    config = run(folder, **{"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096})
    assert list(plan_problems(config, Machine(find_gpu("b200"), None))) == []


def test_where_nothing_helps_it_says_so(folder):
    (problem, *_) = plan_problems(run(folder), Machine(replace(find_gpu("rtx4090"), memory=4 * GIB), None))
    assert "no knob alone makes it fit" in problem.fix


def test_a_fix_is_the_first_in_order_of_cost(folder):
    job = job_of(run(folder, **{"actor_rollout_ref.model.enable_gradient_checkpointing": "false"}), H100)
    fix = nearest_fit(job)
    assert fix.startswith("actor_rollout_ref.model.enable_gradient_checkpointing=true")
    assert make_plan(job).fits is False


def test_a_7b_model_on_a_laptop_is_refused_for_its_host_memory(folder):
    problems = list(plan_problems(run(folder), LAPTOP))
    assert "host memory" in problems[0].reason and "16.00 GiB" in problems[0].reason


def test_a_small_model_on_a_laptop_is_planned_in_host_memory(tiny_checkpoint):
    config = load_config(ROOT / "configs" / "quickstart.yaml", [f"actor_rollout_ref.model.path={tiny_checkpoint}"])
    plan = plan_of(config, LAPTOP)
    assert plan.fits and plan.limit is None
    assert plan.host_per_node < 16 * GIB
    assert list(plan_problems(config, LAPTOP)) == []


def test_an_unknown_architecture_can_still_be_run_without_a_plan(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    (problem,) = plan_problems(run(tmp_path), H100)
    assert "mamba" in str(problem) and "trainer.skip_plan=true" in problem.fix


def test_this_machine_has_memory_and_a_cpu_run_has_no_gpu(folder):
    machine = this_machine(run(folder, **{"trainer.device": "cpu"}))
    assert machine.gpu is None
    assert machine.host_memory > GIB


def test_a_critic_is_planned_as_its_own_section_says(folder):
    words = {
        "algorithm.adv_estimator": "gae",
        "critic.fsdp_config.optimizer_offload": "true",
        "critic.ppo_max_token_len_per_gpu": 2048,
        "critic.model.dtype": "float32",
    }
    job = job_of(run(folder, **words), H100)
    assert (job.algorithm, str(job.critic_layout)) == ("ppo", "ZeRO-3 over 8 +optimizer offload")
    assert str(job.layout) == "ZeRO-3 over 8" and job.critic_batch.tokens == 2048 < job.batch.tokens
    assert (job.of_critic.precision.name, job.precision.name) == ("float32", "bfloat16")
    critic = {term.component: term for term in make_plan(job).moments[0].terms if term.role is Role.critic}
    # 28 layers of a 7B model and one output, 8 bytes of moments in float32, over 8 ranks
    assert critic[Component.optimizer].on_host and not critic[Component.weights].on_host
    assert critic[Component.optimizer].bytes == pytest.approx(8 * job.critic.num_params_scalar_head / 8)
    assert {"values", "critic backward"} <= {moment.name for moment in make_plan(job).moments}


def test_what_would_help_names_the_critics_knobs_too(folder):
    small = Machine(replace(find_gpu("h100"), memory=56 * GIB), 2000 * GIB)
    (problem,) = plan_problems(run(folder, **{"algorithm.adv_estimator": "gae"}), small)
    overrides = knobs(problem.fix.split(";")[0])
    assert "critic.ppo_max_token_len_per_gpu" in overrides
    assert list(plan_problems(run(folder, **{"algorithm.adv_estimator": "gae"} | overrides), small)) == []


def test_a_megatron_run_is_planned_with_its_own_layout(folder):
    actor = "actor_rollout_ref.actor"
    words = {
        f"{actor}.strategy": "megatron",
        f"{actor}.megatron.tensor_model_parallel_size": 4,
        f"{actor}.megatron.pipeline_model_parallel_size": 2,
        f"{actor}.megatron.recompute": "selective",
    }
    job = job_of(run(folder, **words), H100)
    assert (job.layout.tp, job.layout.pp, job.layout.cp, job.layout.dp) == (4, 2, 1, 1)
    assert job.layout.sequence_parallel
    assert job.batch.recompute == "selective"


@pytest.mark.parametrize(("chosen", "width"), [("fp8_e5m2", 1), ("bfloat16", 2), ("auto", 2), (None, 2)])
def test_the_cache_is_as_wide_as_the_engine_is_told(folder, chosen, width):
    words = {"actor_rollout_ref.rollout.engine_args": f"{{kv_cache_dtype: {chosen}}}"} if chosen else {}
    plan = plan_of(run(folder, **words), H100)
    assert plan.job.engine.cache_bytes == width
    # 28 layers, 4 KV heads of 128, keys and values
    pool = next(t.bytes for t in plan.moments[0].terms if t.label == "engine KV cache")
    assert plan.cache_tokens == pytest.approx(pool / (2 * 28 * 4 * 128 * width))


def test_a_cache_type_of_unknown_size_is_a_problem(folder):
    words = {"actor_rollout_ref.rollout.engine_args": "{kv_cache_dtype: int3}"}
    (problem,) = plan_problems(run(folder, **words), H100)
    assert "int3" in str(problem) and "fp8_e4m3" in problem.fix


def test_sampling_concurrency_and_the_training_batch_are_apart(folder):
    def sizes(plan):
        return {term.label: term.bytes for moment in plan.moments for term in moment.terms}

    few, many = (sizes(plan_of(run(folder, **{"actor_rollout_ref.rollout.max_num_seqs": n}), H100)) for n in (64, 512))
    changed = {label for label in few if few[label] != many[label]}
    assert changed == {"engine graphs and workspace"}
    whole = {"actor_rollout_ref.model.logits_chunk_mb": 0}  # otherwise logits are as large as a chunk
    tokens = {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096}
    longer, base = sizes(plan_of(run(folder, **whole, **tokens), H100)), sizes(plan_of(run(folder, **whole), H100))
    assert {"actor logits", "actor activations"} <= {label for label in base if base[label] != longer[label]}
    assert base["engine graphs and workspace"] == longer["engine graphs and workspace"]


def test_megatron_in_float32_keeps_no_second_copy_of_the_weights(folder):
    words = {"actor_rollout_ref.actor.strategy": "megatron", "actor_rollout_ref.model.dtype": "float32"}
    words |= {"actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 8}
    labels = {term.label for term in plan_of(run(folder, **words), H100).moments[0].terms}
    assert "actor master weights" not in labels and "actor optimizer moments" in labels


HEADLINE = {
    "grpo_qwen2.5_3b_deepspeed": (4, "Qwen2.5-3B"),
    "grpo_llama3.1_8b_deepspeed": (8, "Llama-3.1-8B"),
    "grpo_qwen2.5_32b_deepspeed": (16, "Qwen2.5-32B"),
    "grpo_llama3.1_70b_deepspeed": (32, "Llama-3.1-70B"),
}


@pytest.mark.parametrize("name", HEADLINE)
def test_the_headline_configs_fit_cards_of_80_gb(name):
    config = load_config(ROOT / "configs" / f"{name}.yaml", [])
    plan = plan_of(config, H100)
    assert (plan.job.layout.num_ranks, plan.job.model.name) == HEADLINE[name]
    assert plan.fits, plan.problems


def test_the_engines_share_is_bounded_on_both_sides(folder):
    job = plan_of(run(folder, **{"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 4096}), H100).job
    low, high = safe_shares(job)

    def fits(share):
        return make_plan(replace(job, engine=replace(job.engine, memory_fraction=share))).fits

    assert fits(low) and fits(high) and not fits(low - 0.01) and not fits(high + 0.01)
    assert f"{low:.2f} to {high:.2f} fit" in describe(make_plan(job))
    assert safe_shares(replace(job, gpu=find_gpu("rtx4090"))) is None


def test_the_cache_that_is_wanted_grows_with_the_responses_per_prompt(folder):
    def wanted(n):
        words = {"actor_rollout_ref.rollout.n": n, "data.train_batch_size": 8, "trainer.n_gpus_per_node": 1}
        words |= {"actor_rollout_ref.actor.ppo_mini_batch_size": 8, "actor_rollout_ref.rollout.max_num_seqs": 1024}
        words |= {"actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1024}
        card = Machine(replace(find_gpu("b200"), memory=10 * find_gpu("b200").memory), None)
        (line,) = [s for s in describe(plan_of(run(folder, **words), card)).splitlines() if "cache wanted" in s]
        return float(line.split()[2])

    # 8 prompts x n responses of 1,024 tokens, 57,344 bytes each
    assert wanted(4) == pytest.approx(8 * 4 * 1024 * 57_344 / GIB, abs=0.01)
    assert wanted(16) == pytest.approx(4 * wanted(4), abs=0.02)


def test_a_forward_pass_is_planned_with_its_own_cut(folder):
    small = {"actor_rollout_ref.actor.ppo_mini_batch_size": 8, "actor_rollout_ref.rollout.n": 2}
    batch = job_of(run(folder, **small), H100).batch
    # 16,384 tokens fit a micro-batch; a mini-batch has 2 responses a rank, a step 1,024 x 2 / 8
    assert (batch.tokens, batch.score_tokens) == (2 * 1024, 16_384)
    own = small | {"actor_rollout_ref.actor.log_prob_max_token_len_per_gpu": 4096}
    assert job_of(run(folder, **own), H100).batch.score_tokens == 4096


LORA = {"actor_rollout_ref.model.lora_rank": 16, "actor_rollout_ref.actor.use_kl_loss": "true"}
SIDES = {"q": 3584 + 3584, "k": 3584 + 512, "v": 3584 + 512, "o": 3584 + 3584, "up": 3584 + 18944}


def terms(config, role, component):
    return [t for t in plan_of(config, H100).peak_of(Phase.train).terms if (t.role, t.component) == (role, component)]


def test_an_adapter_is_planned_from_the_runs_config_and_its_reference_takes_nothing(folder):
    config = run(folder, **LORA)
    trained = 28 * 16 * (SIDES["q"] + SIDES["k"] + SIDES["v"] + SIDES["o"] + 3 * SIDES["up"])  # gate, up, down
    assert sum(t.bytes for t in terms(config, Role.actor, Component.optimizer)) == pytest.approx(8 * trained / 8)
    assert terms(config, Role.reference, Component.weights) == []
    assert terms(run(folder, **LORA | {"actor_rollout_ref.model.lora_rank": 0}), Role.reference, Component.weights)
    base = sum(t.bytes for t in terms(config, Role.actor, Component.weights))
    assert base == pytest.approx(2 * (plan_of(config, H100).job.model.num_params + trained) / 8)
    assert f"LoRA rank 16 ({trained:,} trained, 0.53%)" in describe(plan_of(config, H100))


def test_chosen_matrices_are_counted_and_unknown_ones_are_told(folder):
    few = run(folder, **LORA | {"actor_rollout_ref.model.target_modules": "[q_proj,v_proj]"})
    found = sum(t.bytes for t in terms(few, Role.actor, Component.optimizer))
    assert found == pytest.approx(28 * 16 * (SIDES["q"] + SIDES["v"]))
    odd = run(folder, **LORA | {"actor_rollout_ref.model.target_modules": "[wide]"})
    (problem,) = plan_problems(odd, H100)
    assert problem.key == "actor_rollout_ref.model.target_modules" and "'wide'" in problem.reason


@pytest.mark.parametrize(("stage", "shards"), [(0, 1), (1, 1), (2, 1), (3, 8)])
def test_a_frozen_base_is_whole_wherever_weights_are(folder, stage, shards):
    config = run(folder, **LORA | {"actor_rollout_ref.actor.deepspeed.zero_stage": stage})
    found = sum(t.bytes for t in terms(config, Role.actor, Component.weights))
    assert found > 2 * plan_of(config, H100).job.model.num_params / shards
    assert found < 2.1 * plan_of(config, H100).job.model.num_params / shards


def test_a_critics_adapter_is_its_own(folder):
    own = {"algorithm.adv_estimator": "gae", "critic.model.lora_rank": 8}
    config = run(folder, **own)
    actors, critics = (sum(t.bytes for t in terms(config, r, Component.optimizer)) for r in (Role.actor, Role.critic))
    assert critics == pytest.approx(actors * 0.0027, rel=0.02)


def test_a_reference_that_is_the_base_is_not_told_to_leave_the_gpu(folder):
    small = Machine(replace(find_gpu("h100"), memory=20 * GIB), 1000 * GIB)
    problems = list(plan_problems(run(folder, **LORA), small))
    assert problems and not any("ref.fsdp_config" in problem.fix for problem in problems)


def test_ranks_that_hand_their_memory_over_can_make_a_run_fit():
    """PPO of 70B by Megatron on cards of 65 GiB: less for the engine would leave no room for its own weights."""
    config = load_config(ROOT / "configs" / "ppo_llama3.1_70b_megatron.yaml")
    smaller = Machine(replace(find_gpu("h100"), memory=65 * GIB), 1000 * GIB)
    assert not plan_of(config, smaller).fits
    assert "trainer.offload_during_rollout=true (then" in nearest_fit(job_of(config, smaller))
    config.trainer.offload_during_rollout = True
    assert plan_of(config, smaller).fits


def test_engines_that_share_gpus_sleep_while_the_trainer_works_unless_told_otherwise(folder):
    key = "actor_rollout_ref.rollout.free_cache_engine"
    asleep, awake = (plan_of(run(folder, **words), H100) for words in ({}, {key: False}))
    engine = sum(term.bytes for term in awake.peak_of(Phase.train).terms if term.role is Role.engine)
    assert engine > 30 * GIB  # half of a card
    assert awake.peak_of(Phase.train).gpu_bytes - asleep.peak_of(Phase.train).gpu_bytes == pytest.approx(engine)
    assert asleep.peak_of(Phase.rollout).gpu_bytes == awake.peak_of(Phase.rollout).gpu_bytes
    assert not job_of(run(folder), LAPTOP).engine.sleeps  # on a CPU there is nothing to give back


def test_disjoint_engines_leave_the_ranks_gpus_to_the_trainer_and_share_the_memory_of_a_laptop(folder):
    knob = "trainer.placement"
    awake = {"actor_rollout_ref.rollout.free_cache_engine": False}
    together, apart = (run(folder, **{knob: value}, **awake) for value in ("colocated", "disjoint"))
    training = {m.name: m for m in plan_of(apart, H100).moments if m.phase is Phase.train}
    assert all(term.role is not Role.engine for moment in training.values() for term in moment.terms)
    before = plan_of(together, H100).peak_of(Phase.train)
    engine = sum(term.bytes for term in before.terms if term.role is Role.engine)
    assert engine > 30 * GIB  # half of a card
    after = plan_of(apart, H100).peak_of(Phase.train)
    assert before.gpu_bytes - after.gpu_bytes == pytest.approx(engine + CONTEXT)
    taking_in = next(m for m in plan_of(apart, H100).moments if m.name == "an engine takes in weights")
    assert {term.role for term in taking_in.terms} == {Role.engine, Role.process}
    assert plan_of(together, LAPTOP).host_per_node == plan_of(apart, LAPTOP).host_per_node
