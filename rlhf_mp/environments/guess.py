"""A hidden number: each guess is answered by "<" (it is smaller), ">" (it is larger), or the end of the game."""

from rlhf_mp.data.prompts import Prompt
from rlhf_mp.environments.base import Turn, environments


@environments.register("guess")
class Guess:
    """Pays 1 for the number itself, ``penalty`` less for what is none, and for a guess that earlier answers exclude.

    The reference answer is the number.
    """

    def __init__(self, penalty: float = 0.1):
        self._penalty = penalty

    async def reset(self, prompt: Prompt) -> str:
        self._hidden = int(prompt.answer)
        self._above, self._below = -1, float("inf")  # what is still possible lies between
        return ""

    async def step(self, response: str) -> Turn:
        said = response.strip()
        if not (said.isascii() and said.isdigit()):
            return Turn("!", reward=-self._penalty)
        guess = int(said)
        if guess == self._hidden:
            return Turn(reward=1.0, done=True)
        earned = 0.0 if self._above < guess < self._below else -self._penalty
        if self._hidden < guess:
            self._below = min(self._below, guess)
            return Turn("<", reward=earned)
        self._above = max(self._above, guess)
        return Turn(">", reward=earned)
