#!/usr/bin/env bash
# PPO, critic included, with every memory lever of configs/memory_constrained.yaml on:
#   examples/run_memory_optimized_ppo.sh                            the quickstart's small model, on a CPU too
#   MODEL_PATH=models/Qwen2.5-7B-Instruct examples/run_memory_optimized_ppo.sh trainer.n_gpus_per_node=4
# Words after it are knobs, key=value.
set -euo pipefail
cd "$(dirname "$0")/.."

words=(
  algorithm.adv_estimator=gae
  critic.model.enable_gradient_checkpointing=true critic.model.use_remove_padding=true
  critic.fsdp_config.param_offload=true critic.fsdp_config.optimizer_offload=true
  trainer.experiment_name=ppo
)
if [ -n "${MODEL_PATH:-}" ]; then
  words+=("actor_rollout_ref.model.path=$MODEL_PATH")
else
  python -m rlhf_mp.quickstart
  words+=(
    actor_rollout_ref.model.path=runs/quickstart/model actor_rollout_ref.model.dtype=float32
    data.train_files=runs/quickstart/train.jsonl data.prompt_key=prompt data.answer_key=answer
    data.apply_chat_template=false data.max_prompt_length=16 data.max_response_length=8
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.optim.lr=1e-4 critic.optim.lr=3e-4
    reward.name=exact trainer.total_training_steps=20
  )
fi
ranks=1
for word in "$@"; do
  case $word in trainer.n_gpus_per_node=*) ranks=${word#*=} ;; esac
done
exec deepspeed --num_gpus "$ranks" launch/train.py --config configs/memory_constrained.yaml "${words[@]}" "$@"
