"""Why an episode has no result: its environment, its time, or nothing that it did itself."""

from __future__ import annotations

from relax_rt.transport.base.targets import did_you_mean
from relax_rt.transport.rpc.errors import RelaxError

OPTIONS = "roles.env.options"


class EnvironmentStuck(RelaxError):
    """A call of an environment did not return in time; if it ran in a worker, that was killed."""


class EnvironmentFailed(RelaxError):
    """An environment raised an error, returned something invalid, or its process ended in a call."""


class LimitExceeded(EnvironmentFailed):
    """A program was killed, or failed, because it exceeded a limit."""


class EpisodeLost(RelaxError):
    """An episode ended through no fault of its own, as when its process was killed because of another episode."""


class GenerationFailed(RelaxError):
    """The engines could not generate a reply and would not if asked again: none accepts it, too many died with it, or
    the episode's time is too short for it."""


def refuse_unknown_option(target: str, name: str, known: list[str]) -> None:
    """Raises: RelaxError, if an option of an environment is none of the known ones."""
    if name not in known:
        hint = did_you_mean(name, known) or (f"options are {', '.join(known)}" if known else "it has none")
        raise RelaxError(f"{OPTIONS}.{name}", why=f"{target} has no such option", hint=hint)
