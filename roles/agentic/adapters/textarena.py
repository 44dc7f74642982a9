"""Games of textarena for one player."""

from __future__ import annotations

import difflib
import inspect
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from relax_rt.roles.agentic.interface import Message, Observation, Reply, Step, Task
from relax_rt.roles.agentic.loading import refuse_unknown
from relax_rt.transport.errors import RelaxError

OWN = ("system", "brackets")
"""Options of the adapter; all others are the game's."""
RAW = "-raw"
"""Versions of games without wrappers: what a wrapper would put together here, the conversation already is."""


class Game:
    """One game. The reward is the game's own, at its end.

    Games draw from Python's global generator: each has a state of it to itself, so that it depends on its seed alone
    whatever else is played in the process.

    Args:
        brackets: put a reply without brackets in brackets, which the games look for.
    """

    def __init__(self, make: Callable[[], Any], system: str | None, *, brackets: bool) -> None:
        self._make, self._system, self._brackets = make, system, brackets
        self._env: Any = None
        self._generator: Any = None

    def reset(self, task: Task) -> Observation:
        """Begin, with the task's seed."""
        self._generator = random.Random(task.seed).getstate()
        with self._own_generator():
            self._env = self._make()
            self._env.reset(num_players=1, seed=task.seed)
            seen = self._seen()
        asked: list[Message] = [{"role": "user", "content": seen}]
        return Observation(messages=[{"role": "system", "content": self._system}, *asked] if self._system else asked)

    def step(self, reply: Reply) -> Step:
        """Make the move."""
        text = reply.text.strip()
        if self._brackets and "[" not in text:
            text = f"[{text}]"
        with self._own_generator():
            done, _ = self._env.step(action=text)
            if not done:
                return Step(messages=self._seen())
            rewards, info = self._env.close()
        turns = float(info.get(0, {}).get("turn_count", 0))
        return Step(reward=float((rewards or {}).get(0, 0.0)), done=True, info={"game_turns": turns})

    def _seen(self) -> str:
        """What the game has said since the last time; the player's own words are in the conversation."""
        import textarena

        _, said = self._env.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(str(text) for _, text, kind in said if kind is not own).strip()

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        theirs = random.getstate()
        random.setstate(self._generator)
        try:
            yield
        finally:
            self._generator = random.getstate()
            random.setstate(theirs)


def factory(name: str, options: dict[str, Any]) -> Callable[[], Game]:
    """Makes games by the id that textarena gives them.

    Raises:
        RelaxError: there is no such game or option, it lacks its word lists, or wants more players.
    """
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    own = {key: options.pop(key) for key in OWN if key in options}
    target = f"textarena:{name}"
    raw = name if name.endswith(RAW) else f"{name}{RAW}"
    if raw not in ENV_REGISTRY:
        names = [known.removesuffix(RAW) for known in ENV_REGISTRY if known.endswith(RAW)]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {len(names)}, as GuessTheNumber-v0"
        raise RelaxError(f"roles.env.environment = {target!r}", why="textarena has no such game", hint=hint)
    for option in options:
        refuse_unknown(target, option, _parameters(ENV_REGISTRY[raw].entry_point))

    def make() -> Any:
        return textarena.make(raw, **options)

    _try(make, target)
    system, brackets = own.get("system"), bool(own.get("brackets", True))
    return lambda: Game(make, system, brackets=brackets)


def _parameters(entry: Any) -> list[str]:
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        entry = getattr(import_module(module), name)
    return [name for name in inspect.signature(entry.__init__).parameters if name != "self"]


def _try(make: Callable[[], Any], target: str) -> None:
    """Raises: RelaxError, if no game for one player can be begun."""
    kept = random.getstate()
    try:
        make().reset(num_players=1, seed=0)
    except AssertionError as error:
        why = str(error) or "it is not for one player"
        raise RelaxError(
            f"roles.env.environment = {target!r}", why=why, hint="games of one player are adapted"
        ) from error
    except Exception as error:
        # Games load word lists and more when they begin, each in its own way.
        raise RelaxError(f"roles.env.environment = {target!r}", why=f"{type(error).__name__}: {error}") from error
    finally:
        random.setstate(kept)
