"""The commands of `relax-rt`, and what they share: exit codes and the parameters that several of them take.

A command's module is imported when the command runs, not before: `relax-rt --help` needs none of them. That is why
the help of a command stands here and not in its docstring.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Group, Parameter, Token

from relax_rt import __version__
from relax_rt.config.problems import BadInput
from relax_rt.observe.text import parse_duration
from relax_rt.transport.rpc.errors import RelaxError

DEFAULT_CONFIG = Path("roles.toml")
OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

Config = Annotated[Path, Parameter(help="The roles.toml of the run.")]
Overrides = Annotated[
    list[str] | None,
    Parameter(name="--set", help="Override a key, as algorithm.steps=20. Repeatable.", negative_iterable=()),
]
Run = Annotated[
    Path | None,
    Parameter(help="Run directory, or a name under ./runs. Default: the live run under ./runs, else the newest."),
]
Json = Annotated[bool, Parameter(name="--json", help="Print JSON.")]


def duration_of(_: Any, tokens: Sequence[Token]) -> float:
    """Convert a parameter to seconds: a number, or 500ms, 5s, 30m, 1h."""
    return parse_duration(tokens[0].value)


@contextmanager
def errors_are_bad_input() -> Iterator[None]:
    """Raise every RelaxError as BadInput: it came before anything was started, so the exit code is 2."""
    try:
        yield
    except BadInput:
        raise
    except RelaxError as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error


app = App(
    name="relax-rt",
    help="Asynchronous RL post-training on bare-metal nodes, as restartable processes.\n\n"
    "Exit codes: 0 success, 1 the run failed or does not answer, 2 invalid input and nothing was started, 130 Ctrl-C.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative=()),
    result_action="return_value",
)
_options = Group("Options", sort_key=5)
for _flag in ("--help", "--version"):
    app[_flag].group = _options

COMMANDS: dict[str, dict[str, str]] = {
    "Before a run": {
        "prepare:init": (
            "Write a commented roles.toml and a reward function to start from. Existing files are never overwritten."
        ),
        "prepare:validate": (
            "Check a config and report every problem with its line.\n\n"
            "Model, data and reward are read only if the quick checks find nothing. Exit code: 0 the config is "
            "valid, 2 it is not."
        ),
        "sample:sample": (
            "Sample a few completions without training: show rendered prompt, tokens, loss mask, completion and reward."
        ),
        "prepare:plan": (
            "Show the memory, placement and traffic of a run before it starts, on this machine or on the machines "
            "of an inventory."
        ),
        "doctor:doctor": (
            "Check this machine, and whether a run fits on it: ok, warn or fail, with advice. Exit code 1 if a "
            "check fails."
        ),
    },
    "A run": {
        "run:up": (
            "Start or resume a run, and stay until it ends. Ctrl-C drains it; a second Ctrl-C kills it.\n\n"
            "Exit code: 0 it finished, or `down` ended it; 1 it failed; 2 the config or the run directory is "
            "invalid and nothing was started, or a role refused its settings; 130 Ctrl-C."
        ),
        "run:attach": "Show the live screen of a run that was started elsewhere. Ctrl-C leaves it running.",
        "run:down": (
            "Stop a run in order: every role finishes its work in progress. `up` resumes it later.\n\n"
            "Prints which slots it waits for and for how long at most. Ctrl-C stops only the waiting. Exit code: "
            "0 the run has ended, 1 it has not within --wait, 2 there is no such run."
        ),
    },
    "Look at it": {
        "ps:ps": "Show the slots of a run and what each does, the progress of the run and the time left.",
        "logs:logs": "Print the logs of the roles, including rotated files.",
        "why:why": (
            "Explain the state of a run or a role: what each slot waits for; cause, handling and effects of each "
            "failure."
        ),
        "losses:retired": (
            "List the data items that a run retired because whole groups of them timed out. `reinstate` undoes it."
        ),
        "top:top": "Show CPU, memory and rate of progress of each slot, live. Ctrl-C leaves it.",
        "export:trace": (
            "Write the event log as a trace for ui.perfetto.dev: one track a slot, with starts, steps, deaths and "
            "faults."
        ),
        "export:export": (
            "Write events, metrics, failures, config and the ends of the logs as one archive of JSON lines and "
            "CSV tables."
        ),
    },
    "Change it while it runs": {
        "operate:restart": "Restart slots. This does not count as a failure. A drained node takes slots again.",
        "operate:scale": (
            "Change the number of slots of a role, within what the config allows. The config file is not changed: "
            "a resumed run starts with the number in it."
        ),
        "operate:drain": (
            "Stop slots in order; they stay down until they are restarted or their role is scaled. A drained node "
            "takes no slots until it is restarted."
        ),
        "losses:reinstate": (
            "Sample retired items again in a live run. progress.kept_items names items that are never retired."
        ),
        "chaos:chaos": "Inject faults into a live run by a schedule, and check whether it kept its guarantees.",
    },
}
"""Commands by section of the help: `module:function` in this package, and the help."""

for _order, (_section, _commands) in enumerate(COMMANDS.items(), 1):
    _group = Group(_section, sort_key=_order)
    for _path, _help in _commands.items():
        app.command(f"relax_rt.cli.{_path}", group=_group, help=_help)
