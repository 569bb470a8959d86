import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_mp.config.schema import DataConfig
from rlhf_mp.data.prompts import Prompt, PromptOrder, load_prompts
from rlhf_mp.errors import CheckpointError, ConfigError

WORDS = ["<pad>", "<s>", "<user>", "<system>", "<assistant>", "?", "one", "two", "three", "be", "brief"]
ID = {word: i for i, word in enumerate(WORDS)}
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """A real tokenizer of eleven words that puts <s> before raw text, as Llama's does."""
    words = Tokenizer(models.WordLevel(ID, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", ID["<s>"])])
    special = ["<s>", "<user>", "<system>", "<assistant>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", additional_special_tokens=special)
    fast.chat_template = TEMPLATE
    return fast


@pytest.fixture
def write(tmp_path):
    def write_rows(*rows):
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write_rows


def ids(*words):
    return [ID[word] for word in words]


def test_a_text_prompt_becomes_a_user_message_after_the_system_prompt(tokenizer, write):
    files = write({"prompt": "one two ?", "answer": 3})
    loaded = load_prompts(files, tokenizer, DataConfig(system_prompt="be brief"))
    expected = ids("<s>", "<system>", "be", "brief", "<user>", "one", "two", "?", "<assistant>")
    assert loaded.prompts == [Prompt(0, expected, "<s><system>be brief<user>one two ?<assistant>", "3")]
    assert loaded.num_dropped == 0


def test_ids_are_those_of_the_tokenizers_own_chat_template_call(tokenizer, write):
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    messages.append({"role": "user", "content": "three ?"})
    [prompt] = load_prompts(write({"prompt": messages, "answer": "x"}), tokenizer, DataConfig()).prompts
    own = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert prompt.ids == own
    assert all(type(token) is int for token in prompt.ids)


def test_messages_are_left_as_they_are_even_with_a_system_prompt_configured(tokenizer, write):
    files = write({"prompt": [{"role": "user", "content": "one"}], "answer": "x"})
    [prompt] = load_prompts(files, tokenizer, DataConfig(system_prompt="be brief")).prompts
    assert prompt.ids == ids("<s>", "<user>", "one", "<assistant>")


def test_without_the_template_the_raw_text_gets_what_the_tokenizer_adds_itself(tokenizer, write):
    files = write({"prompt": "one two", "answer": "x"})
    [prompt] = load_prompts(files, tokenizer, DataConfig(apply_chat_template=False)).prompts
    assert (prompt.text, prompt.ids) == ("one two", ids("<s>", "one", "two"))


def test_other_column_names_can_be_configured(tokenizer, write):
    files = write({"question": "one", "solution": "two"})
    data = DataConfig(prompt_key="question", answer_key="solution", apply_chat_template=False)
    assert load_prompts(files, tokenizer, data).prompts[0].answer == "two"


ROWS = [{"prompt": text, "answer": text[0]} for text in ("one", "one two three", "two", "one two three ?")]


def test_too_long_prompts_are_dropped_counted_and_leave_no_gap_in_the_indices(tokenizer, write):
    data = DataConfig(apply_chat_template=False, max_prompt_length=2)  # <s> counts too
    loaded = load_prompts(write(*ROWS), tokenizer, data)
    assert [(p.index, p.text, p.answer) for p in loaded.prompts] == [(0, "one", "o"), (1, "two", "t")]
    assert loaded.num_dropped == 2


def test_too_long_prompts_are_an_error_if_they_may_not_be_dropped(tokenizer, write):
    data = DataConfig(apply_chat_template=False, max_prompt_length=2, filter_overlong_prompts=False)
    with pytest.raises(ConfigError, match="2 of 4 prompts are longer, up to 5 tokens"):
        load_prompts(write(*ROWS), tokenizer, data)


def test_nothing_left_is_an_error_with_numbers(tokenizer, write):
    data = DataConfig(apply_chat_template=False, max_prompt_length=1)
    with pytest.raises(ConfigError, match="max_prompt_length = 1: drops all 4 prompts; the shortest has 2 tokens"):
        load_prompts(write(*ROWS), tokenizer, data)
    with pytest.raises(ConfigError, match="no rows in it"):
        load_prompts(write(), tokenizer, data)


def test_a_tokenizer_without_a_chat_template_is_an_error_with_a_way_out(tokenizer, write):
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="no chat template\n    fix: data.apply_chat_template=false"):
        load_prompts(write(*ROWS), plain, DataConfig())
    assert len(load_prompts(write(*ROWS), plain, DataConfig(apply_chat_template=False)).prompts) == 4


@pytest.mark.parametrize(
    "row, message",
    [
        ({"question": "one", "answer": "1"}, "['answer', 'question']: has no column 'prompt'"),
        ({"prompt": "one"}, "has no column 'answer'\n    fix: data.answer_key=<one of these>"),
        ({"prompt": "one", "answer": None}, "None: 'answer' must be a text or a number"),
        ({"prompt": 7, "answer": "1"}, "7: 'prompt' must be a text or a list of messages"),
        ({"prompt": [], "answer": "1"}, "[]: 'prompt' must be a text or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "'prompt' must be a text or a list of messages"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tokenizer, write, row, message):
    files = write({"prompt": "one", "answer": "1"}, row)
    with pytest.raises(ConfigError) as caught:
        load_prompts(files, tokenizer, DataConfig())
    assert f"{files}:2 = " in str(caught.value)
    assert message in str(caught.value)


def test_messages_without_a_chat_template_are_refused(tokenizer, write):
    files = write({"prompt": [{"role": "user", "content": "one"}], "answer": "1"})
    with pytest.raises(ConfigError, match="chat messages need a chat template"):
        load_prompts(files, tokenizer, DataConfig(apply_chat_template=False))


def test_many_bad_rows_are_counted_not_all_printed(tokenizer, write):
    with pytest.raises(ConfigError) as caught:
        load_prompts(write(*[{"prompt": "one"}] * 25), tokenizer, DataConfig())
    assert len(caught.value.problems) == 11
    assert "15 more like these" in str(caught.value)


def test_gsm8k_loads_as_it_is_published(tokenizer):
    path = Path(__file__).parents[2].parent / "shared" / "data" / "gsm8k" / "test.jsonl"
    if not path.exists():
        pytest.skip(f"needs GSM8K's test set at {path}")
    loaded = load_prompts(str(path), tokenizer, DataConfig(prompt_key="question", max_prompt_length=10_000))
    assert len(loaded.prompts) == 1319
    assert loaded.prompts[0].answer.endswith("#### 18")


def batches(order, count):
    return [order.next() for _ in range(count)]


def test_every_epoch_visits_each_prompt_at_most_once_and_drops_only_the_incomplete_batch():
    order = PromptOrder(num_prompts=11, batch_size=3, seed=1, shuffle=True)
    visited = batches(order, 3 * order.batches_per_epoch)
    assert [epoch for epoch, _ in visited] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    epochs = [[i for e, indices in visited if e == epoch for i in indices] for epoch in range(3)]
    assert all(len(seen) == len(set(seen)) == 9 and set(seen) <= set(range(11)) for seen in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert set(epochs[0]) != set(epochs[1])  # not always the same ones are dropped


def test_the_order_depends_on_the_seed_alone():
    def visited(seed):
        return batches(PromptOrder(20, 4, seed, shuffle=True), 10)

    assert visited(1) == visited(1) != visited(2)


def test_without_shuffling_prompts_come_as_they_are_in_the_file_every_epoch():
    order = PromptOrder(num_prompts=5, batch_size=2, seed=1, shuffle=False)
    assert batches(order, 3) == [(0, [0, 1]), (0, [2, 3]), (1, [0, 1])]


@pytest.mark.parametrize("done", range(8))
def test_a_resumed_order_continues_exactly_where_it_stopped(done):
    order = PromptOrder(num_prompts=10, batch_size=3, seed=5, shuffle=True)
    batches(order, done)
    state = json.loads(json.dumps(order.state_dict()))
    resumed = PromptOrder(num_prompts=10, batch_size=3, seed=5, shuffle=True)
    resumed.load_state_dict(state)
    assert batches(resumed, 7) == batches(order, 7)


@pytest.mark.parametrize("change", [{"num_prompts": 11}, {"batch_size": 2}, {"seed": 6}, {"shuffle": False}])
def test_resuming_with_other_data_is_refused(change):
    settings = {"num_prompts": 10, "batch_size": 3, "seed": 5, "shuffle": True}
    state = PromptOrder(**settings).state_dict()
    with pytest.raises(CheckpointError, match=f"{[*change][0]}.*now it is"):
        PromptOrder(**settings | change).load_state_dict(state)


def test_fewer_prompts_than_a_batch_are_an_error_with_numbers():
    with pytest.raises(ConfigError, match="train_batch_size = 8: there are only 7 prompts"):
        PromptOrder(num_prompts=7, batch_size=8, seed=1, shuffle=True)
    assert PromptOrder(num_prompts=7, batch_size=7, seed=1, shuffle=True).batches_per_epoch == 1
