"""One test for each rule between knobs: just outside it is refused with its key, just inside it is not."""

import importlib.util

import pytest

from rlhf_mp.config import checks

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ONE_RANK = "trainer.n_gpus_per_node=1"
TORCH = f"{ACTOR}.strategy=torch"

RULES = [  # words that break the rule, key of the problem, part of the reason, part of the fix, a word that mends it
    (
        ["data.train_batch_size=100", f"{ACTOR}.ppo_mini_batch_size=30"],
        f"{ACTOR}.ppo_mini_batch_size",
        "does not divide data.train_batch_size = 100",
        f"{ACTOR}.ppo_mini_batch_size=25",
        f"{ACTOR}.ppo_mini_batch_size=25",
    ),
    (
        ["data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=8", "trainer.nnodes=2"],
        f"{ACTOR}.ppo_mini_batch_size",
        "fewer prompts than the 16 ranks",
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ACTOR}.ppo_mini_batch_size=16",
    ),
    ([f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n", "grpo compares", f"{ROLLOUT}.n=8", f"{ROLLOUT}.n=2"),
    (
        [f"{ACTOR}.ppo_max_token_len_per_gpu=1023", f"{ACTOR}.log_prob_max_token_len_per_gpu=1024"],
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "data.max_prompt_length + data.max_response_length = 1024",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
        f"{ACTOR}.ppo_max_token_len_per_gpu=1024",
    ),
    (
        [f"{ACTOR}.log_prob_max_token_len_per_gpu=1023"],
        f"{ACTOR}.log_prob_max_token_len_per_gpu",
        "one sequence may be longer",
        f"{ACTOR}.log_prob_max_token_len_per_gpu=1024",
        f"{ACTOR}.use_dynamic_bsz=false",
    ),
    (
        [f"{ROLLOUT}.max_model_len=1023"],
        f"{ROLLOUT}.max_model_len",
        "one sequence may be longer",
        f"{ROLLOUT}.max_model_len=1024",
        "data.max_response_length=511",
    ),
    (
        [f"{ROLLOUT}.max_total_tokens=1023"],
        f"{ROLLOUT}.max_total_tokens",
        "less than one sequence",
        f"{ROLLOUT}.max_total_tokens=1024",
        f"{ROLLOUT}.max_total_tokens=1024",
    ),
    ([TORCH], f"{ACTOR}.strategy", "one process", "trainer.nnodes=1 trainer.n_gpus_per_node=1", ONE_RANK),
    (
        [TORCH, ONE_RANK, f"{ACTOR}.fsdp_config.param_offload=true"],
        f"{ACTOR}.fsdp_config.param_offload",
        "no effect",
        f"{ACTOR}.strategy=deepspeed",
        f"{ACTOR}.strategy=deepspeed",
    ),
    (
        [TORCH, ONE_RANK, "actor_rollout_ref.ref.fsdp_config.param_offload=true"],
        "actor_rollout_ref.ref.fsdp_config.param_offload",
        "no effect",
        "param_offload=false",
        f"{ACTOR}.strategy=deepspeed",
    ),
    (
        [TORCH, ONE_RANK, f"{ACTOR}.deepspeed.reduce_bucket_size=7"],
        f"{ACTOR}.deepspeed",
        "no effect",
        f"{ACTOR}.strategy=deepspeed",
        f"{ACTOR}.strategy=deepspeed",
    ),
    (
        [f"{ACTOR}.fsdp_config.param_offload=true", f"{ACTOR}.deepspeed.zero_stage=2"],
        f"{ACTOR}.fsdp_config.param_offload",
        "only ZeRO-3",
        f"{ACTOR}.deepspeed.zero_stage=3",
        f"{ACTOR}.deepspeed.zero_stage=3",
    ),
    (
        [f"{ACTOR}.fsdp_config.optimizer_offload=true", f"{ACTOR}.deepspeed.zero_stage=0"],
        f"{ACTOR}.fsdp_config.optimizer_offload",
        "ZeRO-0",
        f"{ACTOR}.deepspeed.zero_stage=2",
        f"{ACTOR}.deepspeed.zero_stage=1",
    ),
    (
        [f"{ACTOR}.fsdp_config.reshard_after_forward=true", f"{ACTOR}.deepspeed.zero_stage=2"],
        f"{ACTOR}.deepspeed.zero_stage",
        "says otherwise",
        "keep only one",
        f"{ACTOR}.deepspeed.zero_stage=3",
    ),
    (
        ["actor_rollout_ref.ref.fsdp_config.optimizer_offload=true"],
        "actor_rollout_ref.ref.fsdp_config.optimizer_offload",
        "frozen",
        "optimizer_offload=false",
        "actor_rollout_ref.ref.fsdp_config.optimizer_offload=false",
    ),
    (
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0"],
        f"{ACTOR}.kl_loss_coef",
        "weight 0",
        f"{ACTOR}.use_kl_loss=false",
        f"{ACTOR}.kl_loss_coef=0.001",
    ),
    (
        [f"{ACTOR}.kl_loss_coef=0.1"],
        f"{ACTOR}.kl_loss_coef",
        "no effect",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.use_kl_loss=true",
    ),
    (
        [f"{ACTOR}.optim.betas=[0.9]"],
        f"{ACTOR}.optim.betas",
        "two decay rates",
        "[0.9,0.999]",
        f"{ACTOR}.optim.betas=[0.9,0.99]",
    ),
    (
        [f"{ACTOR}.optim.betas=[0.9,1.0]"],
        f"{ACTOR}.optim.betas",
        "below 1",
        "[0.9,0.999]",
        f"{ACTOR}.optim.betas=[0.9,0.99]",
    ),
    (
        [f"{ACTOR}.optim.min_lr_ratio=0.1"],
        f"{ACTOR}.optim.min_lr_ratio",
        "no effect",
        "lr_scheduler_type=cosine",
        f"{ACTOR}.optim.lr_scheduler_type=linear",
    ),
    (
        [f"{ROLLOUT}.tensor_model_parallel_size=3"],
        f"{ROLLOUT}.tensor_model_parallel_size",
        "does not divide trainer.n_gpus_per_node = 8",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
        f"{ROLLOUT}.tensor_model_parallel_size=2",
    ),
    (
        [f"{ROLLOUT}.num_engines=3"],
        f"{ROLLOUT}.num_engines",
        "cannot share 8 GPUs",
        f"{ROLLOUT}.num_engines=8",
        "trainer.device=cpu",
    ),
    (
        ["trainer.nnodes=2", "actor_rollout_ref.weight_sync.transport=tensor"],
        "actor_rollout_ref.weight_sync.transport",
        "ends at the machine",
        "transport=distributed",
        "actor_rollout_ref.weight_sync.transport=disk",
    ),
    (
        [
            "trainer.device=cpu",
            "trainer.placement=disjoint",
            f"{ROLLOUT}.nnodes=1",
            "actor_rollout_ref.weight_sync.transport=tensor",
        ],
        "actor_rollout_ref.weight_sync.transport",
        f"{ROLLOUT}.nnodes = 1",
        "transport=distributed",
        "actor_rollout_ref.weight_sync.transport=disk",
    ),
    (
        [f"{ROLLOUT}.nnodes=1"],
        f"{ROLLOUT}.nnodes",
        "every engine on a machine of ranks",
        "trainer.placement=disjoint",
        "trainer.placement=disjoint",
    ),
    (
        ["trainer.placement=disjoint", f"{ROLLOUT}.nnodes=2", f"{ROLLOUT}.num_engines=1"],
        f"{ROLLOUT}.num_engines",
        "would have none",
        f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.nnodes=1",
    ),
    (
        [f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.cudagraph_capture_sizes=[1]"],
        f"{ROLLOUT}.cudagraph_capture_sizes",
        "nothing is captured",
        f"{ROLLOUT}.enforce_eager=false",
        f"{ROLLOUT}.enforce_eager=false",
    ),
    ([f"{ROLLOUT}.top_k=0"], f"{ROLLOUT}.top_k", "no token", f"{ROLLOUT}.top_k=-1", f"{ROLLOUT}.top_k=1"),
    (
        [f"{ROLLOUT}.val_kwargs.n=4"],
        f"{ROLLOUT}.val_kwargs.n",
        "greedy",
        f"{ROLLOUT}.val_kwargs.n=1",
        f"{ROLLOUT}.val_kwargs.temperature=0.5",
    ),
    (
        ["trainer.resume_mode=resume_path"],
        "trainer.resume_from_path",
        "needs it",
        "trainer.resume_mode=auto",
        "trainer.resume_from_path=runs/x/global_step_1",
    ),
    (
        ["trainer.resume_from_path=runs/x/global_step_1"],
        "trainer.resume_from_path",
        "no effect with trainer.resume_mode=auto",
        "trainer.resume_mode=resume_path",
        "trainer.resume_mode=resume_path",
    ),
    (["trainer.save_freq=0"], "trainer.save_freq", "-1 or at least 1", "trainer.save_freq=-1", "trainer.save_freq=1"),
    (["trainer.test_freq=0"], "trainer.test_freq", "-1 or at least 1", "trainer.test_freq=-1", "trainer.test_freq=-1"),
    (
        ["data.train_max_samples=0"],
        "data.train_max_samples",
        "-1 or at least 1",
        "data.train_max_samples=-1",
        "data.train_max_samples=1",
    ),
    (
        ["data.val_max_samples=0"],
        "data.val_max_samples",
        "-1 or at least 1",
        "data.val_max_samples=-1",
        "data.val_max_samples=1",
    ),
    (["trainer.test_freq=5"], "trainer.test_freq", "nothing to validate", "data.val_files=", "data.val_files=v.jsonl"),
    (
        ["data.system_prompt=think", "data.apply_chat_template=false"],
        "data.system_prompt",
        "no effect",
        "data.apply_chat_template=true",
        "data.apply_chat_template=true",
    ),
]


@pytest.mark.parametrize(
    ("words", "key", "reason", "fix", "cure"), RULES, ids=lambda x: x[-1] if type(x) is list else ""
)
def test_a_broken_rule_names_key_reason_and_fix_and_can_be_mended(problems_of, words, key, reason, fix, cure):
    problems = problems_of(*words)
    assert list(problems) == [key]
    assert reason in problems[key].reason
    assert fix in problems[key].fix
    assert problems_of(*words, cure) == {}


def test_the_defaults_break_no_rule(problems_of):
    assert problems_of() == {}


def test_a_logger_must_be_installed(problems_of, monkeypatch):
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "wandb" else importlib.util.find_spec(name))
    problem = problems_of("trainer.logger=[console,wandb]")["trainer.logger"]
    assert problem.reason == "the package wandb is not installed"
    assert problem.fix == "pip install wandb, or trainer.logger=[console]"
    monkeypatch.setattr(checks, "find_spec", lambda name: name)
    assert problems_of("trainer.logger=[console,wandb]") == {}


def test_any_number_of_engines_goes_on_cpu(problems_of):
    words = ["trainer.device=cpu", "trainer.n_gpus_per_node=2", f"{ROLLOUT}.num_engines=3"]
    assert problems_of(*words) == {}
    assert list(problems_of(*words, f"{ROLLOUT}.tensor_model_parallel_size=4")) == [
        f"{ROLLOUT}.tensor_model_parallel_size"
    ]


def test_an_engine_lies_on_several_machines_only_if_asked(problems_of):
    words = ["trainer.nnodes=4", "trainer.n_gpus_per_node=2", "actor_rollout_ref.weight_sync.transport=distributed"]
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    wide = [*words, f"{ROLLOUT}.allow_cross_node=true"]
    refused = problems_of(*words, f"{key}=4")[key]
    assert "so an engine would span machines" in refused.reason
    assert refused.fix == f"{key}=2, or {ROLLOUT}.allow_cross_node=true"
    for fits in (1, 2, 4, 8):
        assert problems_of(*wide, f"{key}={fits}") == {}
    for fits_not, fix in {3: 2, 6: 4, 16: 8}.items():
        problem = problems_of(*wide, f"{key}={fits_not}")[key]
        assert "all of trainer.n_gpus_per_node = 2 on each" in problem.reason
        assert problem.fix == f"{key}={fix}"


def test_a_refused_value_is_not_also_judged_by_the_rules(problems_of):
    (problem,) = problems_of(f"{ROLLOUT}.tensor_model_parallel_size=0").values()
    assert problem.reason == "must be at least 1"
