"""Defaults people know from the source documents, and those that differ here for a reason (docs/requirements.md)."""

from functools import reduce

import pytest

from rlhf_mp.config.schema import RunConfig

AS_DOCUMENTED = {
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.model.dtype": "bfloat16",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.ppo_epochs": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.kl_loss_coef": 0.001,
    "actor_rollout_ref.actor.grad_clip": 1.0,
    "actor_rollout_ref.actor.fsdp_config.reshard_after_forward": True,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.enable_chunked_prefill": True,
    "trainer.total_epochs": 1,
}
OUR_OWN = {
    "actor_rollout_ref.model.enable_activation_offload": False,  # costs time: only where memory is short
    "actor_rollout_ref.rollout.name": "sglang",
    "actor_rollout_ref.rollout.n": 8,  # GRPO compares the responses to a prompt: one teaches nothing
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.5,  # 0.9 leaves no room for a trainer on the same GPU
    "actor_rollout_ref.rollout.max_num_seqs": 256,  # the documents say both 128 and 256
    "actor_rollout_ref.rollout.temperature": 1.0,  # the policy itself is sampled and trained
    "actor_rollout_ref.rollout.top_p": 1.0,  # a cut tail biases importance ratios
    "actor_rollout_ref.rollout.cudagraph_capture_sizes": None,  # with only 1, 2, 4, 8 larger batches have no graph
}


@pytest.mark.parametrize(("key", "default"), (AS_DOCUMENTED | OUR_OWN).items())
def test_a_default_is_what_the_documentation_says(key, default):
    assert reduce(getattr, key.split("."), RunConfig()) == default
