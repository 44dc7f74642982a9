"""Adapter for reasoning-gym tasks: episodes of one turn, scored by the task's own verifier."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from relax_rt.roles.agentic.interface import Message, Observation, Reply, Step, Task
from relax_rt.roles.data.gym import GymTask
from relax_rt.transport.rpc.errors import RelaxError

OWN = {"system": None, "template": "{question}"}
"""Options of the adapter; all others are the task's."""


class Question:
    """One question, generated from the seed of the episode's task."""

    def __init__(self, name: str, options: Mapping[str, Any], system: str | None, template: str) -> None:
        self._name, self._options, self._system, self._template = name, dict(options), system, template
        self._gym: GymTask
        self._metadata: dict[str, Any] = {}

    def reset(self, task: Task) -> Observation:
        """Generate the question."""
        self._gym = GymTask(self._name, {**self._options, "seed": task.seed}, 1)
        (item,) = self._gym.items()
        self._metadata = item.metadata
        asked: list[Message] = [{"role": "user", "content": self._template.replace("{question}", item.question)}]
        return Observation(messages=[{"role": "system", "content": self._system}, *asked] if self._system else asked)

    def step(self, reply: Reply) -> Step:
        """Score the whole reply as the answer."""
        return Step(reward=self._gym.score(reply.text.strip(), self._metadata), done=True)


def factory(name: str, options: dict[str, Any]) -> Callable[[], Question]:
    """Return what creates questions of a task.

    Raises:
        RelaxError: there is no such task or option.
    """
    own = {key: options.pop(key, value) for key, value in OWN.items()}
    if "seed" in options:
        why = "the questions of an episode are drawn by its task's seed"
        raise RelaxError("roles.env.options.seed", why=why, hint="leave it out")
    if "{question}" not in str(own["template"]):
        why = "it has no {question}, so that all prompts would be the same"
        raise RelaxError("roles.env.options.template", why=why)
    try:
        GymTask(name, options, 1)
    except RelaxError as error:
        what = error.what.replace("data.task = ", "roles.env.environment = reasoning_gym:")
        raise RelaxError(what.replace("data.", "roles.env."), why=error.why, hint=error.hint) from error
    return lambda: Question(name, options, own["system"], str(own["template"]))
