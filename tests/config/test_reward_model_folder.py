"""Is the reward model one, and does it speak the policy's tokens?"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlhf_mp.config.load import config_from_dict
from rlhf_mp.config.reward_model_folder import KEY, SERVED, reward_model_problems
from rlhf_mp.errors import Absent

GOOD = {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
TOKENIZER = {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2, "content": "<eos>"}]}


@pytest.fixture
def problems(tmp_path):
    """``problems(config.json of the reward model, its tokenizer.json)``."""

    def found(model=GOOD, tokenizer=TOKENIZER, enable=True, path=None, **more):
        for name, folder_tokenizer in (("policy", TOKENIZER), ("rm", tokenizer)):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / "tokenizer.json").write_text(json.dumps(folder_tokenizer))
        (tmp_path / "rm" / "config.json").write_text(model if isinstance(model, str) else json.dumps(model))
        own = {"enable": enable, "model": {"path": str(path or tmp_path / "rm")}, **more} if enable else {}
        tree = {"actor_rollout_ref": {"model": {"path": str(tmp_path / "policy")}}, "reward_model": own}
        return [*reward_model_problems(config_from_dict(tree))]

    return found


def test_a_reward_model_of_the_policys_family_is_fine(problems):
    assert problems() == []
    assert problems(enable=False) == []
    assert problems(tokenizer=TOKENIZER | {"padding": {"strategy": "Fixed"}}) == []


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "a checkpoint of Qwen2ForCausalLM: it has no head"),
        (GOOD | {"id2label": {"0": "a", "1": "b", "2": "c"}}, "tells 3 classes apart"),
        ({"architectures": GOOD["architectures"]}, "tells 2 classes apart"),
        ("{half", "config.json cannot be read"),
    ],
)
def test_something_else_is_refused(problems, model, reason):
    (problem,) = problems(model)
    assert problem.key == KEY and reason in problem.reason and "trainer.task=reward_model" in problem.fix


@pytest.mark.parametrize(
    "tokenizer",
    [
        TOKENIZER | {"model": {"vocab": {"a": 1, "b": 0}}},
        TOKENIZER | {"added_tokens": [{"id": 2, "content": "<end>"}]},
    ],
)
def test_another_tokenizer_is_refused(problems, tokenizer):
    (problem,) = problems(tokenizer=tokenizer)
    assert problem.key == KEY and "tokenizer.json is not that of the policy" in problem.reason


def test_a_folder_that_is_not_there_may_be_on_the_machine_of_the_run(problems):
    (problem,) = problems(path="nowhere")
    assert isinstance(problem, Absent)


def test_sglang_serves_some_architectures_and_splits_heads_evenly(problems):
    served = {"strategy": "sglang"}
    olmo = GOOD | {"architectures": ["OlmoForSequenceClassification"], "num_attention_heads": 12}
    assert problems(olmo) == [] and problems(GOOD | {"num_attention_heads": 12}, **served) == []
    (problem,) = problems(olmo, **served)
    assert problem.key == "reward_model.strategy" and "no score of OlmoFor" in problem.reason
    assert "Qwen3ForSequenceClassification" in problem.reason and "strategy=actor" in problem.fix
    wide = {"strategy": "sglang", "rollout": {"tensor_model_parallel_size": 8}}
    (problem,) = problems(GOOD | {"num_attention_heads": 12}, **wide)
    assert problem.fix == "reward_model.rollout.tensor_model_parallel_size=4"


def test_sglang_has_them_all_as_models_that_score():
    """In its source: importing its models takes a minute."""
    folder = Path(find_spec("sglang").origin).parent / "srt"
    models = "".join(file.read_text() for file in folder.glob("models/*.py"))
    scoring = (folder / "configs" / "model_config.py").read_text().partition("def is_generation_model")[2]
    for kind in SERVED:
        assert f"\nclass {kind}(" in models and f'"{kind}" in model_architectures' in scoring, kind
