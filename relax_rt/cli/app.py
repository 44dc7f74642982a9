"""What all commands share: the app, exit codes, and the parameters that several of them take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Group, Parameter, Token

from relax_rt import __version__
from relax_rt.chaos.faults import seconds

DEFAULT_CONFIG = Path("roles.toml")
OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

BEFORE = Group("Before a run", sort_key=1)
RUN = Group("A run", sort_key=2)
LOOK = Group("Look at it", sort_key=3)
STEER = Group("Change it while it runs", sort_key=4)
REST = Group("Options", sort_key=5)

app = App(
    name="relax-rt",
    help="Asynchronous RL post-training on bare-metal nodes, as restartable processes.\n\nExit codes: 0 done, 1 the run"
    " failed or does not answer, 2 the input is wrong and nothing was started, 130 Ctrl-C.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)
for flag in ("--help", "--version"):
    app[flag].group = REST

Config = Annotated[Path, Parameter(help="The run's roles.toml.")]
Overrides = Annotated[
    list[str] | None,
    Parameter(name="--set", help="Override a key, as algorithm.steps=20; may be repeated.", negative_iterable=()),
]
Run = Annotated[
    Path | None,
    Parameter(help="Run directory, or a name under ./runs; the living or newest run under ./runs if left out."),
]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]


def duration_of(_: Any, tokens: Sequence[Token]) -> float:
    """A parameter's duration: seconds, or as 500ms, 5s, 30m, 1h."""
    return seconds(tokens[0].value)


def as_dict(value: Any) -> dict[str, Any]:
    """A struct as plain data."""
    return dict(msgspec.to_builtins(value))
