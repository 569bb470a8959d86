"""An optimizer that a backend cannot step, and knobs of another one, are told with what to type."""

import pytest

from rlhf_mp.config.load import config_from_dict
from rlhf_mp.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
OPTIM, SGD = f"{ACTOR}.optim", f"{ACTOR}.optim.optimizer=sgd"
GIVEN = ["data.train_files=x.jsonl", "actor_rollout_ref.model.path=x"]


@pytest.mark.parametrize(
    ("words", "key", "reason", "mended"),
    [
        ([f"{OPTIM}.momentum=0.5"], f"{OPTIM}.momentum", "no effect with", [SGD]),
        ([SGD, f"{OPTIM}.eps=1e-6"], f"{OPTIM}.eps", "no effect with", [f"{OPTIM}.eps=1e-8"]),
        ([SGD, f"{OPTIM}.betas=[0.9,0.95]"], f"{OPTIM}.betas", "no effect with", [f"{OPTIM}.betas=[0.9,0.999]"]),
        (
            [SGD, f"{ACTOR}.strategy=megatron"],
            f"{OPTIM}.optimizer",
            "distributed optimizer is Adam",
            [f"{ACTOR}.megatron.use_distributed_optimizer=false"],
        ),
        (
            [
                SGD,
                f"{ACTOR}.fsdp_config.optimizer_offload=true",
                f"{ACTOR}.deepspeed.offload_device=nvme",
                f"{ACTOR}.deepspeed.nvme_path=/local",
            ],
            f"{OPTIM}.optimizer",
            "on a disk",
            [f"{ACTOR}.deepspeed.offload_device=cpu", f"{ACTOR}.deepspeed.nvme_path=null"],
        ),
        (
            ["algorithm.adv_estimator=gae", "critic.optim.momentum=0.5"],
            "critic.optim.momentum",
            "no effect with",
            ["critic.optim.optimizer=sgd"],
        ),
    ],
)
def test_what_cannot_be_is_refused_and_its_fix_mends_it(words, key, reason, mended):
    with pytest.raises(ConfigError) as caught:
        config_from_dict({}, [*GIVEN, *words])
    (problem,) = caught.value.problems
    assert problem.key == key and reason in problem.reason
    config_from_dict({}, [*GIVEN, *words, *mended])
