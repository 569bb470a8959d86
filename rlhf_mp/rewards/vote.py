"""The answer a response gives, for counting votes."""

import re

from rlhf_mp.rewards.math import final_answer

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


def vote(response: str) -> str:
    """What is in its last ``\\boxed{}`` or after ``####``, else its last number, else all of it.

    Thousands separators, spaces and a dollar sign make no difference; "1/2" and "0.5" are two answers.
    """
    marked = final_answer(response)
    text = marked.text if marked else (NUMBER.findall(response) or [response])[-1]
    return re.sub(r"(?<=\d),(?=\d{3})|[\s$]", "", text)
