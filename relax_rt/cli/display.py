"""Output of commands: text and tables for people, JSON for programs."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from relax_rt.config.schema import Chosen

PIPE_WIDTH = 240
LABEL_WIDTH = 12
CAUSE_WIDTH, REASON_WIDTH = 80, 160
"""Characters of a cause that is printed in full elsewhere, and of the reason in a headline."""
STATE_STYLE = {
    "ready": "green",
    "alive": "green",
    "draining": "yellow",
    "drained": "yellow",
    "lost": "red",
    "fenced": "red",
    "starting": "yellow",
    "requested": "yellow",
    "backoff": "red",
    "hung": "bold red",
}
TONE_STYLE = {"good": "green", "warning": "yellow", "error": "red"}


def console_for_output() -> Console:
    """Standard output; wide when it is not a terminal, so that nothing is cut for a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=PIPE_WIDTH)


def say(text: str) -> None:
    """Print plain text and flush: it may precede long work."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_json(value: Any) -> None:
    """Print structs and plain data as indented JSON; infinite numbers become null."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def as_dict(value: Any) -> dict[str, Any]:
    """A struct as plain data."""
    return dict(msgspec.to_builtins(value))


def print_table(console: Console, table: Table) -> None:
    """Print a table; to a file or pipe without trailing blanks."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    console.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def clock(t: float) -> str:
    """Wall-clock seconds as local time of day."""
    return time.strftime("%H:%M:%S", time.localtime(t))


def choices(chosen: Mapping[str, Chosen]) -> list[str]:
    """Settings that were chosen for the user, a line for each value and reason: ``dtype float32 (rollout): why``."""
    roles: dict[tuple[str, str, str], list[str]] = {}
    for key, one in chosen.items():
        role, _, setting = key.removeprefix("roles.").rpartition(".")
        roles.setdefault((setting, one.value, one.why), []).append(role)
    return [f"  {setting:<7} {value} ({', '.join(who)}): {why}" for (setting, value, why), who in roles.items()]
