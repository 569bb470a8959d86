"""What the scheduler's actor puts together, without Ray."""

import pytest

from rlhf_mp.cluster.actors import make_episodes
from rlhf_mp.config.load import config_from_dict
from rlhf_mp.errors import ConfigError
from rlhf_mp.models.tiny import character_tokenizer
from rlhf_mp.rollout.episodes import Episodes

KEY = "actor_rollout_ref.rollout.multi_turn"


def episodes(**multi_turn):
    tree = {
        "data": {"train_files": "train.jsonl"},
        "actor_rollout_ref": {"model": {"path": "models/m"}, "rollout": {"multi_turn": multi_turn}},
    }
    return make_episodes(config_from_dict(tree), character_tokenizer("01"), [1])


def test_there_are_episodes_where_they_are_asked_for():
    assert episodes() is None
    assert isinstance(episodes(enable=True, environment="guess", environment_args={"penalty": 0.2}), Episodes)


@pytest.mark.parametrize(
    ("environment", "args", "reason"),
    [
        ("no_such_module:Game", {}, "No module named 'no_such_module'"),
        ("rlhf_mp.environments.guess:Chess", {}, "no attribute 'Chess'"),
        ("guess", {"fine": 1}, "unexpected keyword argument 'fine'"),
    ],
)
def test_an_environment_that_is_not_there_is_a_problem_of_its_key(environment, args, reason):
    with pytest.raises(ConfigError, match=reason) as error:
        episodes(enable=True, environment=environment, environment_args=args)
    assert error.value.problems[0].key == f"{KEY}.environment"
