"""A hidden number: each guess is answered by "<" (it is smaller), ">" (it is larger), or the end of the game."""

from rlhf_mp.data.prompts import Prompt
from rlhf_mp.environments.base import Turn, environments


@environments.register("guess")
class Guess:
    """Pays 1 for the number itself, and ``penalty`` less for what is none. The reference answer is the number."""

    def __init__(self, penalty: float = 0.1):
        self._penalty = penalty

    async def reset(self, prompt: Prompt) -> str:
        self._hidden = int(prompt.answer)
        return ""

    async def step(self, response: str) -> Turn:
        said = response.strip()
        if not (said.isascii() and said.isdigit()):
            return Turn("!", reward=-self._penalty)
        if int(said) == self._hidden:
            return Turn(reward=1.0, done=True)
        return Turn("<" if self._hidden < int(said) else ">")
