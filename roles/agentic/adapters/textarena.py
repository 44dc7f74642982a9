"""Games of textarena: for one player, or for several of which the policy is each (self-play)."""

from __future__ import annotations

import difflib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from relax_rt.roles.agentic.interface import Message, Observation, Reply, Step, Task, refuse_unknown_option
from relax_rt.transport.rpc.errors import RelaxError

OWN = ("system", "brackets", "players")
"""Options of the adapter; all others are the game's."""
MAX_PLAYERS = 16
RAW = "-raw"
"""Versions of games without wrappers: what a wrapper would put together here, the conversation already is."""


class TextArenaGame:
    """One game. The rewards are the game's own, at its end, for each player his.

    Each player has a conversation, which begins at his first turn; what the others said is told in it.

    Games draw from Python's global generator: each has a state of it to itself, so that it depends on its seed alone
    whatever else is played in the process.

    Args:
        brackets: put a reply without brackets in brackets, which the games look for.
        players: all of them the policy.
    """

    def __init__(self, make: Callable[[], Any], system: str | None, *, brackets: bool, players: int = 1) -> None:
        self._make, self._system, self._brackets, self._players = make, system, brackets, players
        self._begun: set[int] = set()
        self._player = 0
        self._env: Any = None
        self._generator: Any = None

    def reset(self, task: Task) -> Observation:
        """Begin, with the task's seed."""
        self._generator = random.Random(task.seed).getstate()
        with self._own_generator():
            self._env = self._make()
            self._env.reset(num_players=self._players, seed=task.seed)
            player, messages = self._seen()
        return Observation(messages=messages, seat=player)

    def step(self, reply: Reply) -> Step:
        """Make the move."""
        text = reply.text.strip()
        if self._brackets and "[" not in text:
            text = f"[{text}]"
        with self._own_generator():
            done, _ = self._env.step(action=text)
            if not done:
                player, messages = self._seen()
                return Step(messages=messages if len(messages) > 1 else messages[0]["content"], seat=player)
            rewards, info = self._env.close()
        turns = float(info.get(0, {}).get("turn_count", 0))
        others = {int(player): float(value) for player, value in (rewards or {}).items()}
        return Step(reward=others.pop(self._player, 0.0), rewards=others, done=True, info={"game_turns": turns})

    def _seen(self) -> tuple[int, list[Message]]:
        """Whose turn it is, and what the game has said to him since his last one, but for his own words."""
        import textarena

        player, said = self._env.get_observation()
        action, lines = textarena.ObservationType.PLAYER_ACTION, []
        for sender, text, kind in said:
            if kind is not action:
                lines.append(str(text))
            elif sender != player:
                lines.append(f"[Player {sender}] {text}")
        messages: list[Message] = [{"role": "user", "content": "\n".join(lines).strip()}]
        if self._system and player not in self._begun:
            messages.insert(0, {"role": "system", "content": self._system})
        self._begun.add(player)
        self._player = player
        return player, messages

    @contextmanager
    def _own_generator(self) -> Iterator[None]:
        theirs = random.getstate()
        random.setstate(self._generator)
        try:
            yield
        finally:
            self._generator = random.getstate()
            random.setstate(theirs)


def factory(name: str, options: dict[str, Any]) -> Callable[[], TextArenaGame]:
    """Makes games by the id that textarena gives them.

    Raises:
        RelaxError: there is no such game or option, it lacks its word lists, or wants other numbers of players.
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
        refuse_unknown_option(target, option, _parameters(ENV_REGISTRY[raw].entry_point))

    def make() -> Any:
        return textarena.make(raw, **options)

    players = seats(own)
    _try(make, target, players)
    system, brackets = own.get("system"), bool(own.get("brackets", True))
    return lambda: TextArenaGame(make, system, brackets=brackets, players=players)


def seats(options: Mapping[str, Any]) -> int:
    """Players of a game, each of them the policy.

    Raises:
        RelaxError: the option is no such number.
    """
    players = options.get("players", 1)
    if not isinstance(players, int) or not 1 <= players <= MAX_PLAYERS:
        why = f"players = {players!r:.40}"
        raise RelaxError("roles.env.options.players", why=why, hint=f"a number from 1 to {MAX_PLAYERS}")
    return players


def _parameters(entry: Any) -> list[str]:
    if isinstance(entry, str):
        module, _, name = entry.partition(":")
        entry = getattr(import_module(module), name)
    return [name for name in inspect.signature(entry.__init__).parameters if name != "self"]


def _try(make: Callable[[], Any], target: str, players: int) -> None:
    """Raises: RelaxError, if no game for as many players can be begun."""
    kept = random.getstate()
    try:
        make().reset(num_players=players, seed=0)
    except AssertionError as error:
        why = str(error) or f"it is not for {players} players"
        hint = "options = { players = 2 } has the policy play both seats of a game of two"
        raise RelaxError(f"roles.env.environment = {target!r}", why=why, hint=hint) from error
    except Exception as error:
        # Games load word lists and more when they begin, each in its own way.
        raise RelaxError(f"roles.env.environment = {target!r}", why=f"{type(error).__name__}: {error}") from error
    finally:
        random.setstate(kept)
