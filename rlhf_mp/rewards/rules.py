"""Rules that look at the text alone and take no time: exact, format, length; and what an environment paid."""

import re

from rlhf_mp.config.reward import EnvironmentTerm, ExactTerm, FormatTerm, LengthTerm
from rlhf_mp.data.prompts import Prompt
from rlhf_mp.rewards.base import Failure, Response, Setting, TextRule, rewards


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
    """DAPO's soft punishment of overlong responses: 0, then falling linearly, then -1.

    Source: arXiv:2503.14476 eq. 13, with L_max = max_tokens and L_cache = buffer_tokens.
    """

    term: LengthTerm

    def worth(self, prompt: Prompt, response: Response) -> float:
        longest = self.term.max_tokens or self.setting.max_response_length
        free = longest - self.term.buffer_tokens
        return -min(1.0, max(0.0, (response.num_tokens - free) / self.term.buffer_tokens))
