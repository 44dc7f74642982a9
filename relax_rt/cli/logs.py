"""`relax-rt logs`: the last lines of the roles' logs, and new ones as they are written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from relax_rt.cli.app import OK, Json, Run
from relax_rt.cli.runs import split_run
from relax_rt.config.problems import did_you_mean
from relax_rt.supervision.control import NoRun, find_run, status

POLL_S = 0.2
END_BYTES = 4 << 20
READ_BYTES = 1 << 20
MAX_FILES = 4096


def logs(
    patterns: Annotated[
        list[str] | None,
        Parameter(
            help="Slots, roles, or patterns as 'roll*'; a run before them as with --run. Default: all logs.",
            negative_iterable=(),
        ),
    ] = None,
    *,
    run: Run = None,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"], help="Keep printing new lines.")] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], help="Lines from the end of each log.")] = 40,
    json: Json = False,
) -> int:
    """Print the logs of the roles."""
    first, *others = patterns or [""]
    run_dir, first = split_run(first, run, log_names)
    show_logs(run_dir, [*([first] if first else []), *others], lines=lines, follow=follow, as_json=json)
    return OK


class LogFile:
    """One log that others append to; when it is full it is copied to ``.1`` (``.1`` to ``.2``) and truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._at = 0
        self._rest = b""

    def last_lines(self, count: int) -> list[str]:
        """The last lines, from rotated files too if needed; `new_lines` continues after them."""
        self._at, shown, self._rest = _last_lines(self.path)
        if self._rest and count:
            # A process that died while it wrote leaves a last line without its newline: print it too.
            shown, self._rest = [*shown, self._rest], b""
        older = 1
        while len(shown) < count and (path := self._rotated(older)).exists():
            _, lines, rest = _last_lines(path)
            shown = [*lines, *([rest] if rest else []), *shown]
            older += 1
        return [line.decode(errors="replace") for line in (shown[-count:] if count else [])]

    def new_lines(self) -> Iterator[str]:
        """Complete lines written since the last call, also when the file was rotated in between."""
        data = b""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    data = self._unread_before_rotation()
                    self._at = 0
                file.seek(self._at)
                new = file.read(READ_BYTES)
        except FileNotFoundError:
            return
        self._at += len(new)
        *lines, self._rest = (self._rest + data + new).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")

    def _unread_before_rotation(self) -> bytes:
        """What was appended after the last read and before the file was copied and truncated."""
        try:
            with self._rotated(1).open("rb") as file:
                if file.seek(0, os.SEEK_END) >= self._at:
                    file.seek(self._at)
                    return file.read(END_BYTES)
        except FileNotFoundError:
            pass
        # Truncated by somebody else: the rest of a line that was begun is lost.
        self._rest = b""
        return b""

    def _rotated(self, n: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{n}")


def _last_lines(path: Path) -> tuple[int, list[bytes], bytes]:
    """Size of a file, complete lines at its end, and the text after the last newline."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - END_BYTES)
            file.seek(start)
            *lines, rest = file.read(size - start).split(b"\n")
    except FileNotFoundError:
        return 0, [], b""
    return size, lines[1:] if start else lines, rest


def show_logs(run_dir: Path, patterns: Sequence[str], *, lines: int, follow: bool, as_json: bool) -> None:
    """Print the ends of the selected logs; with follow, continue with new lines until the run has ended.

    Raises:
        NoRun: the run has no such log.
    """
    files = {path: LogFile(path) for path in select_logs(run_dir, patterns)}
    several = len(files) > 1 or any("*" in pattern for pattern in patterns)

    def show(file: LogFile, line: str) -> None:
        if as_json:
            sys.stdout.write(msgspec.json.encode({"log": file.name, "line": line}).decode() + "\n")
        else:
            width = max(len(file.name) for file in files.values())
            sys.stdout.write(f"{file.name:{width}} | {line}\n" if several else f"{line}\n")

    for file in files.values():
        for line in file.last_lines(lines):
            show(file, line)
    sys.stdout.flush()
    for line in () if as_json else logs_on_other_nodes(run_dir, patterns):
        sys.stderr.write(f"{line}\n")
    while follow:
        # Checked before the logs are read, so that the last lines of an ending run are printed.
        alive = find_run(run_dir).alive
        for path in _matching(run_dir, patterns):
            files.setdefault(path, LogFile(path))
        for file in files.values():
            for line in file.new_lines():
                show(file, line)
        sys.stdout.flush()
        if not alive:
            return
        time.sleep(POLL_S)


def log_names(run_dir: Path) -> set[str]:
    """The slots and roles that have logs, under all names that select them."""
    stems = [path.stem for path in (run_dir / "logs").glob("*.log")]
    parts = [stem.rpartition("-") for stem in stems]
    return {*stems, *(role for role, _, _ in parts), *(f"{role}/{index}" for role, _, index in parts)}


def select_logs(run_dir: Path, patterns: Sequence[str]) -> list[Path]:
    """The logs of slots, roles, or patterns of either; all logs of the run without any.

    Raises:
        NoRun: there is none, or one of the names selects none.
    """
    for pattern in patterns or [""]:
        if not _matching(run_dir, [pattern] if pattern else []):
            names = sorted(path.stem for path in (run_dir / "logs").glob("*.log"))
            hint = did_you_mean(pattern.replace("/", "-"), names) or (f"there is {', '.join(names)}" if names else "")
            remote = logs_on_other_nodes(run_dir, [pattern] if pattern else [])
            raise NoRun(
                f"no log of {pattern or 'any role'} in {run_dir}", why="; ".join(remote), hint="" if remote else hint
            )
    return _matching(run_dir, patterns)


def logs_on_other_nodes(run_dir: Path, patterns: Sequence[str]) -> list[str]:
    """Where the logs of slots on other nodes lie, as a sentence."""
    if not (run := find_run(run_dir)).alive or not run.record.get("listen"):
        return []
    return [
        f"{slot.slot} runs on node {slot.node}: its log is {slot.log.partition(':')[2]} there"
        for slot in status(run_dir).slots
        if slot.log.startswith(f"{slot.node}:")
        and (not patterns or any(_selects(pattern, slot.slot.replace("/", "-")) for pattern in patterns))
    ]


def _matching(run_dir: Path, patterns: Sequence[str]) -> list[Path]:
    known = sorted((run_dir / "logs").glob("*.log"))[:MAX_FILES]
    return [path for path in known if not patterns or any(_selects(pattern, path.stem) for pattern in patterns)]


def _selects(pattern: str, name: str) -> bool:
    """rollout, rollout/0, rollout-0 and 'roll*' all select the log ``rollout-0``."""
    role, _, index = name.rpartition("-")
    return any(fnmatchcase(known, pattern) for known in (name, role, f"{role}/{index}"))
