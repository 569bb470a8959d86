"""The ``data`` section: what a run is fed, and in which order."""

from dataclasses import dataclass
from typing import Literal

from rlhf_mp.config.knob import knob


@dataclass
class DataConfig:
    """Where prompts and examples come from and how they are batched."""

    train_files: list[str] = knob([], "file or list of files: .jsonl, .parquet, or a Hugging Face dataset folder")
    train_weights: list[float] = knob(
        [], "prompts from each entry of train_files, in proportion, e.g. [3,1]; empty: all rows alike", gt=0
    )
    val_files: list[str] = knob([], "held-out prompts, each file reported by itself too; empty: no validation")
    prompt_key: str = knob("prompt", "column with the prompt: a text, or a list of chat messages")
    answer_key: str = knob("answer", "column with the reference answer, handed to the reward")
    reward_fn_key: str = knob("", "column that says where a row is from, see reward.terms.*.sources; empty: none")
    system_prompt: str = knob("", "put before every text prompt as a system message")
    apply_chat_template: bool = knob(True, "wrap prompts in the tokenizer's chat template")
    train_batch_size: int = knob(1024, "prompts per step; examples or pairs per optimizer step without rl", ge=1)
    max_prompt_length: int = knob(512, "tokens; longer prompts are dropped and counted", ge=1)
    max_response_length: int = knob(512, "tokens sampled at most", ge=1)
    filter_overlong_prompts: bool = knob(True, "drop too long prompts; false: see truncation")
    truncation: Literal["error", "left", "right", "middle"] = knob(
        "error", "too long prompts, if not dropped, are refused, or lose their beginning, end or middle"
    )
    shuffle: bool = knob(True, "a new order each epoch, from data.seed")
    seed: int = knob(1, "order of prompts", ge=0)
    curriculum_key: str | None = knob(None, "column with a number: every epoch goes through the prompts by it")
    curriculum_order: Literal["ascending", "descending"] = knob("ascending", "small numbers first, or large ones")
    train_max_samples: int = knob(-1, "use only the first so many rows of each training file; -1: all", ge=-1)
    val_max_samples: int = knob(-1, "use only the first so many rows of each validation file; -1: all", ge=-1)
    cache_dir: str | None = knob(
        None, "tokenised prompts are kept here for the next start; unset: prompts/ in the run directory"
    )
    response_key: str = knob("response", "sft: column with the text that answers the prompt")
    messages_key: str | None = knob(None, "sft: column with whole conversations, in place of prompt and response")
    chosen_key: str = knob("chosen", "dpo, reward_model: column with the better response: a text, or messages")
    rejected_key: str = knob("rejected", "dpo, reward_model: column with the worse response")
    margin_key: str | None = knob(None, "reward_model: column that says by how much it is worse; unset: by anything")
    max_length: int | None = knob(
        None, "tokens of an example at most, without rl; unset: max_prompt_length + max_response_length", ge=2
    )
