"""Environments that are programs, as `environment = "program:python agent.py"`: their command, limits and result.

A program talks to the policy through the gateway, as to any server of OpenAI's or Anthropic's API, and knows nothing of
this runtime. What it prints, or reward functions that read what it prints, determine its rewards.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec

from relax_rt.roles.agentic.interface import OPTIONS, Task, refuse_unknown_option
from relax_rt.roles.data.items import answer_text
from relax_rt.transport.rpc.errors import RelaxError

NAME = "program"
SETTING = "roles.env.environment"
PLACEHOLDERS = ("question", "prompt", "answer", "item", "seed", "split", "index")
"""Placeholders in a command, for fields of the task."""
PLACEHOLDER = re.compile(r"\{(\w+)\}")
PYTHON = ("python", "python3")


class ProgramLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a program with everything it starts.

    Attributes:
        memory_mib: private memory of all processes together; None: no limit.
        processes: at a time. open_files: of each process.
        file_mib: of the longest file that it writes. output_mib: that it prints.
    """

    memory_mib: int | None = 4096
    processes: int = 128
    open_files: int = 1024
    file_mib: int = 1024
    output_mib: int = 64


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """A program that plays an episode.

    Attributes:
        argv: its command; PLACEHOLDERS in braces are fields of the task.
        cwd: the folder of the config file.
        stdin: its standard input: the task as a line of JSON, its question, or nothing.
        env: set for it, in addition to the gateway's address and key.
        preload: modules that it finds imported: it starts in a fork of a process that has imported them.
        limits: of each episode's program.
    """

    argv: tuple[str, ...]
    cwd: str
    stdin: str = "task"
    env: dict[str, str] = {}
    preload: tuple[str, ...] = ()
    limits: ProgramLimits = ProgramLimits()

    def argv_for(self, task: Task) -> list[str]:
        """Return the command for one task. `python` is the interpreter that runs this."""
        python = [sys.executable] if self.argv[0] in PYTHON else [self.argv[0]]
        return [
            *python,
            *(PLACEHOLDER.sub(lambda found: _fill_placeholder(found, task), word) for word in self.argv[1:]),
        ]

    def stdin_for(self, task: Task) -> bytes:
        """Return the standard input for one task."""
        match self.stdin:
            case "task":
                return msgspec.json.encode(task) + b"\n"
            case "question":
                return task.question.encode()
            case _:
                return b""


def _fill_placeholder(found: re.Match[str], task: Task) -> str:
    """Return the replacement of a name in braces; one that is not a placeholder stays."""
    if found[1] == "prompt":
        return next((str(said["content"]) for said in reversed(task.messages) if said["role"] == "user"), "")
    return answer_text(getattr(task, found[1])) if found[1] in PLACEHOLDERS else found[0]


Count = Annotated[int, msgspec.Meta(ge=1)]
OPEN_FILES = 16
"""An interpreter has some to begin with."""


class ProgramOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """roles.env.options of a program; see Program and ProgramLimits. memory_mib = 0: no bound."""

    stdin: str = "task"
    env: dict[str, str] = {}
    preload: list[str] = []
    memory_mib: Annotated[int, msgspec.Meta(ge=0)] = ProgramLimits().memory_mib or 0
    processes: Count = ProgramLimits().processes
    open_files: Annotated[int, msgspec.Meta(ge=OPEN_FILES)] = ProgramLimits().open_files
    file_mib: Count = ProgramLimits().file_mib
    output_mib: Count = ProgramLimits().output_mib

    def limits(self) -> ProgramLimits:
        """Return the limits of each program."""
        return ProgramLimits(
            memory_mib=self.memory_mib or None,
            processes=self.processes,
            open_files=self.open_files,
            file_mib=self.file_mib,
            output_mib=self.output_mib,
        )


Rewards = tuple[float, ...] | dict[str, float | tuple[float, ...]]


class ProgramResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of an episode, as its program prints it.

    Attributes:
        reward: of the episode; it goes to the last answer.
        rewards: of each answer, in the order of calls and of their choices; or by the id of its response, a number for
            each choice if there are several. Empty: `reward` alone.
        info: numbers that are reported.
    """

    reward: float = 0.0
    rewards: Rewards = ()
    info: dict[str, float] = {}


def parse_result(stdout: str) -> ProgramResult | None:
    """Return the last line that is a JSON object with `reward` or `rewards`; None if there is no such line.

    Raises:
        ValueError: its values are not finite numbers.
    """
    for line in reversed(stdout.splitlines()):
        if not line.lstrip().startswith("{"):
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if not isinstance(found, dict) or not {"reward", "rewards"} & found.keys():
            continue
        known = {key: found[key] for key in ("reward", "rewards", "info") if key in found}
        try:
            result = msgspec.convert(known, ProgramResult)
        except msgspec.ValidationError as error:
            raise ValueError(f"{line:.200}: {error}") from None
        given = result.rewards.values() if isinstance(result.rewards, dict) else result.rewards
        numbers = [number for one in given for number in (one if isinstance(one, tuple) else (one,))]
        if not all(map(math.isfinite, (result.reward, *numbers, *result.info.values()))):
            raise ValueError(f"{line:.200}: not finite")
        return result
    return None


LIMIT_MESSAGES = {
    "memory": f"it took more than {{memory_mib}} MiB ({OPTIONS}.memory_mib)",
    "processes": f"it had more than {{processes}} processes ({OPTIONS}.processes)",
    "output": f"it printed more than {{output_mib}} MiB ({OPTIONS}.output_mib)",
    "file": f"it wrote a file of more than {{file_mib}} MiB ({OPTIONS}.file_mib)",
    "files": f"a process of it had more than {{open_files}} files open ({OPTIONS}.open_files)",
}
"""Limit -> the message for a program that exceeded it."""
KERNEL_MESSAGES = {
    "File too large": "file",
    "File size limit exceeded": "file",
    "Too many open files": "files",
    "Cannot allocate memory": "memory",
    "MemoryError": "memory",
}
"""Error messages of programs -> the limit, enforced by the kernel, that caused them."""


def exceeded_limit(over: str, code: int, stderr_tail: str, limits: ProgramLimits) -> str:
    """Describe the limit that a program exceeded; empty if none.

    Args:
        over: the limit that it was killed for; empty: it ended by itself.
        code: its exit code; negative: a signal. stderr_tail: the end of its standard error.
    """
    if not over and code == -signal.SIGXFSZ:
        over = "file"
    if not over and code:
        over = next((limit for words, limit in KERNEL_MESSAGES.items() if words in stderr_tail), "")
    return LIMIT_MESSAGES[over].format(**msgspec.to_builtins(limits)) if over else ""


def load_program(command: str, options: Mapping[str, Any], config_dir: Path) -> Program:
    """Read ``program:COMMAND`` and its options.

    Raises:
        RelaxError: an option is unknown, a placeholder misspelt, or the command, a file of it or a module not there.
    """
    for name in options:
        refuse_unknown_option(f"{NAME}:{command}", name, list(ProgramOptions.__struct_fields__))
    try:
        asked = msgspec.convert(dict(options), ProgramOptions)
    except msgspec.ValidationError as error:
        raise RelaxError(OPTIONS, why=str(error), hint="see docs/guides/programs.md") from error
    if asked.stdin not in ("task", "question", "none"):
        raise RelaxError(f"{OPTIONS}.stdin", why=f"{asked.stdin!r} is none of task, question and none")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise _invalid_command(command, f"{error}") from error
    if not words:
        raise _invalid_command(command, "it names no command")
    # Braces that are close to a placeholder are a typo; others stay, as in an awk script.
    for name in (name for word in words[1:] for name in PLACEHOLDER.findall(word) if name not in PLACEHOLDERS):
        if close := difflib.get_close_matches(name, PLACEHOLDERS, n=1, cutoff=0.7):
            raise _invalid_command(command, f"{{{name}}} is no placeholder", f"did you mean {{{close[0]}}}?")
    name = words[0]
    if "/" in name:
        # Do not resolve links: the python of a virtual environment is one, and finds its packages by its own path.
        words[0] = str(config_dir.absolute() / name)
    if name not in PYTHON and shutil.which(words[0]) is None:
        hint = "name one on the PATH, or ./FILE beside the config, which may be executed"
        raise _invalid_command(command, f"there is no command {name!r}", hint)
    python = Path(name).name.startswith("python")
    script = next((word for word in words[1:] if not word.startswith("-")), "") if python else ""
    if script.endswith(".py") and not (config_dir / script).is_file():
        raise _invalid_command(command, f"there is no {script} in {config_dir}")
    if asked.preload and name not in PYTHON:
        why = f"it is for the python that runs relax-rt, and {name} is another"
        raise RelaxError(f"{OPTIONS}.preload", why=why, hint="leave it out")
    for module in asked.preload:
        if find_spec(module.partition(".")[0]) is None:
            raise RelaxError(f"{OPTIONS}.preload", why=f"there is no module {module!r}", hint=f"pip install {module}")
    return Program(
        argv=tuple(words),
        cwd=str(config_dir.resolve()),
        stdin=asked.stdin,
        env=dict(asked.env),
        preload=tuple(asked.preload),
        limits=asked.limits(),
    )


def _invalid_command(command: str, why: str, hint: str = "it is started in the config's folder") -> RelaxError:
    return RelaxError(f"{SETTING} = '{NAME}:{command}'", why=why, hint=hint)
