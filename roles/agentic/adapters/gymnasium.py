"""Environments of gymnasium with a few actions and a text to show, as FrozenLake, Taxi and CliffWalking.

What the policy sees is the environment's own drawing (`render_mode = "ansi"`), the place it stands at in brackets; what
it says is the name of an action.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from typing import Any

from relax_rt.roles.agentic.interface import Message, Observation, Reply, Step, Task
from relax_rt.transport.errors import RelaxError

ACTIONS = {
    "FrozenLake": ["left", "down", "right", "up"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Blackjack": ["stick", "hit"],
}
"""Names of the actions of environments that are known here, by their number."""
COLOURED = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m", re.DOTALL)
OWN = ("actions", "system", "introduction", "invalid_reward")
"""Options of the adapter; all others are the environment's."""


class TextGame:
    """One episode. A reply that names no action changes nothing and costs a turn.

    Args:
        make: the environment. actions: their names, by number.
        introduction: put before the first drawing. invalid_reward: of a turn whose reply names no action.
    """

    def __init__(
        self, make: Callable[[], Any], actions: list[str], system: str | None, introduction: str, invalid_reward: float
    ) -> None:
        self._env = make()
        self._actions, self._system, self._introduction = actions, system, introduction
        self._invalid_reward = invalid_reward
        self._invalid = 0
        longest_first = sorted(actions, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)

    def reset(self, task: Task) -> Observation:
        """Begin, with the task's seed."""
        seen, _ = self._env.reset(seed=task.seed)
        shown = self._shown(seen)
        asked: list[Message] = [{"role": "user", "content": f"{self._introduction}\n{shown}".strip()}]
        messages = [{"role": "system", "content": self._system}, *asked] if self._system else asked
        return Observation(messages=messages, state=shown)

    def step(self, reply: Reply) -> Step:
        """Do what the first action's name in the reply says."""
        found = self._pattern.search(reply.text)
        if found is None:
            self._invalid += 1
            text = f"That is none of: {', '.join(self._actions)}.\n{self._shown(None)}"
            return Step(messages=text, reward=self._invalid_reward, state=self._shown(None), info=self._info())
        number = [action.lower() for action in self._actions].index(found.group(1).lower())
        seen, reward, terminated, truncated, _ = self._env.step(number)
        shown = self._shown(seen)
        done = bool(terminated or truncated)
        return Step(messages=shown, reward=float(reward), done=done, state=shown, info=self._info())

    def close(self) -> None:
        """Close it."""
        self._env.close()

    def _info(self) -> dict[str, float]:
        return {"invalid": float(self._invalid)}

    def _shown(self, seen: Any) -> str:
        if self._env.render_mode == "ansi":
            self._drawing = COLOURED.sub(lambda m: f"[{m.group(1)}]", str(self._env.render())).strip()
        elif seen is not None:
            self._drawing = str(seen)
        return self._drawing


def factory(name: str, options: dict[str, Any]) -> Callable[[], TextGame]:
    """Makes games of an environment's id.

    Raises:
        RelaxError: there is no such environment or option, or its actions are not a few numbered ones.
    """
    import gymnasium
    from gymnasium import error as errors

    own = {key: options.pop(key) for key in OWN if key in options}
    target = f"gymnasium:{name}"
    try:
        spec = gymnasium.spec(name)
    except errors.Error as error:
        close = difflib.get_close_matches(name, list(gymnasium.registry), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {len(gymnasium.registry)}, as FrozenLake-v1"
        raise RelaxError(f"roles.env.environment = {target!r}", why=str(error), hint=hint) from error
    if _draws(spec):
        options = {**options, "render_mode": "ansi"}

    def make() -> Any:
        return gymnasium.make(name, **options)

    try:
        tried = make()
    except (errors.Error, TypeError, ValueError, AssertionError, ImportError) as error:
        raise RelaxError(f"roles.env.options of {target}", why=f"{type(error).__name__}: {error}") from error
    count = getattr(tried.action_space, "n", None)
    tried.close()
    if count is None:
        why = f"its actions are {tried.action_space}, not a few numbered ones"
        raise RelaxError(f"roles.env.environment = {target!r}", why=why, hint="write an Environment around it")
    actions = own.get("actions") or ACTIONS.get(name.partition("-")[0]) or [str(n) for n in range(count)]
    if len(actions) != count:
        raise RelaxError("roles.env.options.actions", why=f"{len(actions)} names for {count} actions of {target}")
    introduction = own.get("introduction", f"Answer with one of: {', '.join(actions)}.")
    invalid = float(own.get("invalid_reward", 0.0))
    return lambda: TextGame(make, list(actions), own.get("system"), str(introduction), invalid)


def _draws(spec: Any) -> bool:
    from gymnasium.envs.registration import load_env_creator

    entry = spec.entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    return "ansi" in (getattr(creator, "metadata", None) or {}).get("render_modes", [])
