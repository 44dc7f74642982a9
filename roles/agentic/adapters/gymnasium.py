"""Environments of gymnasium with a few actions and a text or an image to show, as FrozenLake, Taxi and CliffWalking.

What the policy sees is the environment's own drawing (`render_mode = "ansi"`), the place it stands at in brackets; what
it says is the name of an action. With `pixels` it sees images: the observation where that is one, else what the
environment draws (`rgb_array`).
"""

from __future__ import annotations

import base64
import difflib
import io
import re
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import xxhash

from relax_rt.roles.agentic.interface import Message, Observation, Reply, Step, Task
from relax_rt.transport.rpc.errors import RelaxError

ACTIONS = {
    "FrozenLake": ["left", "down", "right", "up"],
    "Taxi": ["south", "north", "east", "west", "pickup", "dropoff"],
    "CliffWalking": ["up", "right", "down", "left"],
    "Blackjack": ["stick", "hit"],
}
"""Names of the actions of environments that are known here, by their number."""
COLOURED = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m", re.DOTALL)
OWN = ("actions", "system", "introduction", "invalid_reward", "pixels")
"""Options of the adapter; all others are the environment's."""


class GymnasiumGame:
    """One episode. A reply that names no action changes nothing and costs a turn.

    Args:
        make: the environment. actions: their names, by number.
        introduction: put before the first drawing. invalid_reward: of a turn whose reply names no action.
        pixels: show images.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        actions: list[str],
        system: str | None,
        introduction: str,
        invalid_reward: float,
        *,
        pixels: bool = False,
    ) -> None:
        self._env, self._pixels = make(), pixels
        self._actions, self._system, self._introduction = actions, system, introduction
        self._invalid_reward = invalid_reward
        self._invalid = 0
        longest_first = sorted(actions, key=len, reverse=True)
        self._pattern = re.compile(rf"(?<!\w)({'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)

    def reset(self, task: Task) -> Observation:
        """Begin, with the task's seed."""
        seen, _ = self._env.reset(seed=task.seed)
        content, state = self._shown(seen, self._introduction)
        asked: list[Message] = [{"role": "user", "content": content}]
        messages = [{"role": "system", "content": self._system}, *asked] if self._system else asked
        return Observation(messages=messages, state=state)

    def step(self, reply: Reply) -> Step:
        """Do what the first action's name in the reply says."""
        found = self._pattern.search(reply.text)
        if found is None:
            self._invalid += 1
            content, state = self._shown(None, f"That is none of: {', '.join(self._actions)}.")
            return Step(messages=_told(content), reward=self._invalid_reward, state=state, info=self._info())
        number = [action.lower() for action in self._actions].index(found.group(1).lower())
        seen, reward, terminated, truncated, _ = self._env.step(number)
        content, state = self._shown(seen)
        return Step(
            messages=_told(content),
            reward=float(reward),
            done=bool(terminated),
            truncated=bool(truncated and not terminated),
            state=state,
            info=self._info(),
        )

    def close(self) -> None:
        """Close it."""
        self._env.close()

    def _info(self) -> dict[str, float]:
        return {"invalid": float(self._invalid)}

    def _shown(self, seen: Any, words: str = "") -> tuple[str | list[dict[str, Any]], str]:
        """What the policy sees, behind some words; and what names the state. None: it has not changed."""
        if self._pixels:
            if seen is not None:
                pixels = seen if _is_pixels(seen) else self._env.render()
                self._drawing, self._state = image_url(pixels), xxhash.xxh3_128_hexdigest(pixels.tobytes())
            image = {"type": "image_url", "image_url": {"url": self._drawing}}
            return [{"type": "text", "text": words}, image] if words else [image], self._state
        if self._env.render_mode == "ansi":
            self._drawing = COLOURED.sub(lambda m: f"[{m.group(1)}]", str(self._env.render())).strip()
        elif seen is not None:
            self._drawing = str(seen)
        return f"{words}\n{self._drawing}".strip(), self._drawing


def _told(content: str | list[dict[str, Any]]) -> str | list[Message]:
    return content if isinstance(content, str) else [{"role": "user", "content": content}]


def image_url(pixels: Any) -> str:
    """uint8 [height, width, 3] as a PNG, in a data URL.

    Raises:
        TypeError: it is no such array.
    """
    from PIL import Image

    if not _is_pixels(pixels):
        raise TypeError(f"a {type(pixels).__name__} is no image: uint8 [height, width, 3] is wanted")
    held = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def _is_pixels(seen: Any) -> bool:
    return isinstance(seen, np.ndarray) and seen.dtype == np.uint8 and seen.ndim == 3 and seen.shape[2] == 3


def factory(name: str, options: dict[str, Any]) -> Callable[[], GymnasiumGame]:
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
    if pixels := own.get("pixels", False) is True:
        options = _drawn(spec, options, target)
    elif "ansi" in _modes(spec):
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
    return lambda: GymnasiumGame(make, list(actions), own.get("system"), str(introduction), invalid, pixels=pixels)


def _modes(spec: Any) -> list[str]:
    """How an environment can draw itself."""
    from gymnasium.envs.registration import load_env_creator

    entry = spec.entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    return list((getattr(creator, "metadata", None) or {}).get("render_modes", []))


def _drawn(spec: Any, options: dict[str, Any], target: str) -> dict[str, Any]:
    """Options with which there is an image to see.

    Raises:
        RelaxError: there is none.
    """
    if find_spec("PIL") is None:
        raise RelaxError("roles.env.options.pixels", why="Pillow is not installed", hint="pip install pillow")
    if "rgb_array" in _modes(spec):
        return {**options, "render_mode": "rgb_array"}
    space = getattr(spec.make(**options), "observation_space", None)
    shape: tuple[int, ...] = getattr(space, "shape", None) or ()
    if len(shape) != 3 or shape[2] != 3 or getattr(space, "dtype", None) != np.uint8:
        why = f"{target} draws no images, and its observations are {space}"
        raise RelaxError("roles.env.options.pixels", why=why, hint="leave it out: what it sees is told as text")
    return options
