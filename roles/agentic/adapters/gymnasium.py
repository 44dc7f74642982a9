"""Adapter for gymnasium environments with a few actions, as FrozenLake, Taxi and CliffWalking.

Observations are the environment's text rendering (`render_mode = "ansi"`), the agent's position in brackets; a reply
names an action. With `pixels` they are images: the observation itself if it is one, else the `rgb_array` rendering.
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
"""Action names of known environments, by number."""
COLOURED = re.compile(r"\x1b\[\d+m(.*?)\x1b\[0m", re.DOTALL)
OWN = ("actions", "system", "introduction", "invalid_reward", "pixels")
"""Options of the adapter; all others are the environment's."""


class GymnasiumGame:
    """One episode. A reply that names no action changes nothing and costs a turn.

    Args:
        actions: their names, by number.
        introduction: put before the first observation. invalid_reward: of a reply that names no action.
        pixels: observations are images.
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
        """Reset the environment with the task's seed."""
        observation, _ = self._env.reset(seed=task.seed)
        content, state = self._render(observation, self._introduction)
        asked: list[Message] = [{"role": "user", "content": content}]
        messages = [{"role": "system", "content": self._system}, *asked] if self._system else asked
        return Observation(messages=messages, state=state)

    def step(self, reply: Reply) -> Step:
        """Take the first action that the reply names."""
        found = self._pattern.search(reply.text)
        if found is None:
            self._invalid += 1
            content, state = self._render(None, f"That is none of: {', '.join(self._actions)}.")
            info = {"invalid": float(self._invalid)}
            return Step(messages=_as_messages(content), reward=self._invalid_reward, state=state, info=info)
        number = [action.lower() for action in self._actions].index(found.group(1).lower())
        observation, reward, terminated, truncated, _ = self._env.step(number)
        content, state = self._render(observation)
        return Step(
            messages=_as_messages(content),
            reward=float(reward),
            done=bool(terminated),
            truncated=bool(truncated and not terminated),
            state=state,
            info={"invalid": float(self._invalid)},
        )

    def close(self) -> None:
        """Close it."""
        self._env.close()

    def _render(self, observation: Any, words: str = "") -> tuple[str | list[dict[str, Any]], str]:
        """Return the content of a message, `words` before the observation (None: unchanged), and the state's name."""
        if self._pixels:
            if observation is not None:
                pixels = observation if _is_pixels(observation) else self._env.render()
                self._drawing, self._state = image_url(pixels), xxhash.xxh3_128_hexdigest(pixels.tobytes())
            image = {"type": "image_url", "image_url": {"url": self._drawing}}
            return [{"type": "text", "text": words}, image] if words else [image], self._state
        if self._env.render_mode == "ansi":
            self._drawing = COLOURED.sub(lambda m: f"[{m.group(1)}]", str(self._env.render())).strip()
        elif observation is not None:
            self._drawing = str(observation)
        return f"{words}\n{self._drawing}".strip(), self._drawing


def _as_messages(content: str | list[dict[str, Any]]) -> str | list[Message]:
    return content if isinstance(content, str) else [{"role": "user", "content": content}]


def image_url(pixels: Any) -> str:
    """Return uint8 [height, width, 3] as a PNG in a data URL.

    Raises:
        TypeError: it is no such array.
    """
    from PIL import Image

    if not _is_pixels(pixels):
        raise TypeError(f"a {type(pixels).__name__} is no image: uint8 [height, width, 3] is wanted")
    held = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(held, "PNG")
    return "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()


def _is_pixels(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 3 and value.shape[2] == 3


def factory(name: str, options: dict[str, Any]) -> Callable[[], GymnasiumGame]:
    """Return what creates games of a gymnasium id.

    Raises:
        RelaxError: there is no such environment or option, or its actions are not a few numbered ones.
    """
    import gymnasium
    from gymnasium import error as errors
    from gymnasium.envs.registration import load_env_creator

    own = {key: options.pop(key) for key in OWN if key in options}
    target = f"gymnasium:{name}"
    try:
        spec = gymnasium.spec(name)
    except errors.Error as error:
        close = difflib.get_close_matches(name, list(gymnasium.registry), n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {len(gymnasium.registry)}, as FrozenLake-v1"
        raise RelaxError(f"roles.env.environment = {target!r}", why=str(error), hint=hint) from error
    entry = spec.entry_point
    creator = load_env_creator(entry) if isinstance(entry, str) else entry
    modes = (getattr(creator, "metadata", None) or {}).get("render_modes", [])
    pixels = own.get("pixels", False) is True
    if pixels and find_spec("PIL") is None:
        raise RelaxError("roles.env.options.pixels", why="Pillow is not installed", hint="pip install pillow")
    if pixels and "rgb_array" in modes:
        options = {**options, "render_mode": "rgb_array"}
    elif pixels:
        space = getattr(spec.make(**options), "observation_space", None)
        shape: tuple[int, ...] = getattr(space, "shape", None) or ()
        if len(shape) != 3 or shape[2] != 3 or getattr(space, "dtype", None) != np.uint8:
            why = f"{target} draws no images, and its observations are {space}"
            raise RelaxError("roles.env.options.pixels", why=why, hint="leave it out: observations are sent as text")
    elif "ansi" in modes:
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
