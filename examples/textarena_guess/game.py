"""Guess the number, of textarena: a few guesses, and after each a hint whether to go higher or lower."""

from __future__ import annotations

import re

import textarena

from relax_rt.roles.agentic import Observation, Reply, Step, Task

SHOWN = [
    {"role": "system", "content": "You are a calculator. Reply with only a number."},
    {"role": "user", "content": "Between 2 and 9."},
    {"role": "assistant", "content": "5"},
]
"""A round that was never played, so that the answer's form is seen; no token of it is trained."""
BARE = re.compile(r"(\d{1,4})\.?")


class Guess:
    """One game. Finding the number is worth 1, and a guess that the hints allow 0.1 until then.

    The methods are not async, so that games are played in a worker process.
    """

    def __init__(self, high: int = 15, guesses: int = 4) -> None:
        # Our own count of guesses ends the game before textarena's does.
        self.game = textarena.make("GuessTheNumber-v0-raw", min_number=1, max_number=high, max_turns=guesses + 2)
        self.low, self.high, self.left, self.earned = 1, high, guesses, 0.0

    def reset(self, task: Task) -> Observation:
        """Think of a number."""
        self.game.reset(num_players=1, seed=task.seed)
        asked = {"role": "user", "content": f"Right! Now {self._between()}."}
        return Observation(messages=[*SHOWN, asked], state=self._state())

    def step(self, reply: Reply) -> Step:
        """Take a guess."""
        self.left -= 1
        found = BARE.fullmatch(reply.text.strip())
        number = int(found.group(1)) if found else 0
        if not self.low <= number <= self.high:
            # No number, or one that the hints rule out.
            return Step(messages=f"No, {self._between()}.", reward=0.0, done=not self.left, state=self._state())
        done, _ = self.game.step(action=f"[{number}]")
        if done:
            rewards, _ = self.game.close()
            return Step(reward=float(rewards[0]) - self.earned, done=True, info={"guesses_left": self.left})
        _, said = self.game.get_observation()
        higher = "higher" in said[-1][1]
        self.low, self.high = (number + 1, self.high) if higher else (self.low, number - 1)
        self.earned += 0.1
        hint = f"{'Higher' if higher else 'Lower'}, {self._between()}."
        return Step(messages=hint, reward=0.1, done=not self.left, state=self._state())

    def _between(self) -> str:
        return f"between {self.low} and {self.high}"

    def _state(self) -> str:
        return f"{self.low}-{self.high}, {self.left} left"
