"""Rules that look at the text alone and take no time: exact, format, length; and what an environment paid."""

import re

from rlhf_mp.config.reward import EnvironmentTerm, ExactTerm, FormatTerm, LengthTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting, TextRule, rewards


def overlong_penalty(num_tokens: int, max_tokens: int, buffer_tokens: int) -> float:
    """0 up to the buffer before ``max_tokens``, falling linearly to -1 at its end, and -1 beyond.

    Source: DAPO, arXiv:2503.14476 eq. 13, with L_max = max_tokens and L_cache = buffer_tokens.
    """
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - buffer_tokens)) / buffer_tokens))


@rewards.register("exact")
class ExactReward(TextRule):
    """1 for the reference answer itself, apart from white space around it."""

    term: ExactTerm

    def worth(self, prompt: Prompt, response: Response) -> float:
        return float(response.text.strip() == prompt.answer.strip())


@rewards.register("environment")
class EnvironmentReward(TextRule):
    """What the environment paid."""

    term: EnvironmentTerm

    def worth(self, prompt: Prompt, response: Response) -> float | Failure:
        return response.failure or response.paid


@rewards.register("format")
class FormatReward(TextRule):
    """1 for exactly the given tags in their order, each once and with something inside. Linear in the text's length."""

    def __init__(self, term: FormatTerm, setting: Setting):
        super().__init__(term, setting)
        self._wanted = [mark for tag in term.tags for mark in (f"<{tag}>", f"</{tag}>")]
        self._mark = re.compile("|".join(map(re.escape, self._wanted)))

    def worth(self, prompt: Prompt, response: Response) -> float:
        marks = [*self._mark.finditer(response.text)]
        if [mark[0] for mark in marks] != self._wanted:
            return 0.0
        texts = [response.text[a.end() : b.start()].strip() for a, b in zip(marks, marks[1:], strict=False)]
        inside, between = texts[::2], [response.text[: marks[0].start()].strip(), *texts[1::2]]
        return float(all(inside) and not any(between))


@rewards.register("length")
class LengthReward(TextRule):
    """``overlong_penalty`` of every response."""

    term: LengthTerm

    def worth(self, prompt: Prompt, response: Response) -> float:
        longest = self.term.max_tokens or self.setting.max_response_length
        return overlong_penalty(response.num_tokens, longest, self.term.buffer_tokens)
