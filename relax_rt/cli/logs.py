"""The logs of a run's roles: their last lines, and new ones as they are written."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from relax_rt.cli.display import show_json_line
from relax_rt.config.problems import did_you_mean
from relax_rt.supervision.control import NoRun, find_run, status

POLL_S = 0.2
END_BYTES = 4 << 20
READ_BYTES = 1 << 20
MAX_FILES = 4096


class LogFile:
    """One log that others append to; when it is full it is copied to ``.1`` (``.1`` to ``.2``) and truncated."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._at = 0
        self._rest = b""

    def end(self, count: int) -> list[str]:
        """The last lines, from rotated files too if needed; `added` goes on after them."""
        self._at, shown, self._rest = _last_lines(self.path)
        if self._rest and count:
            # A last line without its end may be all there ever is: a process that died in the middle of it.
            shown, self._rest = [*shown, self._rest], b""
        older = 1
        while len(shown) < count and (path := self._rotated(older)).exists():
            _, lines, rest = _last_lines(path)
            shown = [*lines, *([rest] if rest else []), *shown]
            older += 1
        return [line.decode(errors="replace") for line in (shown[-count:] if count else [])]

    def added(self) -> Iterator[str]:
        """Complete lines written since the last call, also when the file was rotated in between."""
        data = b""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    data = self._before_rotation()
                    self._at = 0
                file.seek(self._at)
                new = file.read(READ_BYTES)
        except FileNotFoundError:
            return
        self._at += len(new)
        *lines, self._rest = (self._rest + data + new).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")

    def _before_rotation(self) -> bytes:
        """Lines that were added unseen before the file was copied and truncated."""
        try:
            with self._rotated(1).open("rb") as file:
                if file.seek(0, os.SEEK_END) >= self._at:
                    file.seek(self._at)
                    return file.read(END_BYTES)
        except FileNotFoundError:
            pass
        # Emptied by hand: what began there has no end.
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
    """Print the ends of the selected logs; with follow, go on with new lines until the run has ended.

    Raises:
        NoRun: the run has no such log.
    """
    files = {path: LogFile(path) for path in select(run_dir, patterns)}
    several = len(files) > 1 or any("*" in pattern for pattern in patterns)

    def show(file: LogFile, line: str) -> None:
        if as_json:
            show_json_line({"log": file.name, "line": line})
        else:
            width = max(len(file.name) for file in files.values())
            sys.stdout.write(f"{file.name:{width}} | {line}\n" if several else f"{line}\n")

    for file in files.values():
        for line in file.end(lines):
            show(file, line)
    sys.stdout.flush()
    for line in () if as_json else elsewhere(run_dir, patterns):
        sys.stderr.write(f"{line}\n")
    while follow:
        # Looked at before the logs, so that the last lines of an ending run are seen.
        alive = find_run(run_dir).alive
        for path in _matching(run_dir, patterns):
            files.setdefault(path, LogFile(path))
        for file in files.values():
            for line in file.added():
                show(file, line)
        sys.stdout.flush()
        if not alive:
            return
        time.sleep(POLL_S)


def logged(run_dir: Path) -> set[str]:
    """The slots and roles that have logs, under all names that select them."""
    stems = [path.stem for path in (run_dir / "logs").glob("*.log")]
    parts = [stem.rpartition("-") for stem in stems]
    return {*stems, *(role for role, _, _ in parts), *(f"{role}/{index}" for role, _, index in parts)}


def select(run_dir: Path, patterns: Sequence[str]) -> list[Path]:
    """The logs of slots, roles, or patterns of either; all logs of the run without any.

    Raises:
        NoRun: there is none, or one of the names selects none.
    """
    for pattern in patterns or [""]:
        if not _matching(run_dir, [pattern] if pattern else []):
            names = sorted(path.stem for path in (run_dir / "logs").glob("*.log"))
            hint = did_you_mean(pattern.replace("/", "-"), names) or (f"there is {', '.join(names)}" if names else "")
            far = elsewhere(run_dir, [pattern] if pattern else [])
            raise NoRun(f"no log of {pattern or 'any role'} in {run_dir}", why="; ".join(far), hint="" if far else hint)
    return _matching(run_dir, patterns)


def elsewhere(run_dir: Path, patterns: Sequence[str]) -> list[str]:
    """Where the logs of slots on other nodes lie, as a sentence."""
    if not (run := find_run(run_dir)).alive or not run.record.get("listen"):
        return []
    return [
        f"{slot.slot} runs on node {slot.node}: its log is {slot.log.partition(':')[2]} there"
        for slot in status(run_dir).slots
        if slot.log.startswith(f"{slot.node}:")
        and (not patterns or any(_means(pattern, slot.slot.replace("/", "-")) for pattern in patterns))
    ]


def _matching(run_dir: Path, patterns: Sequence[str]) -> list[Path]:
    known = sorted((run_dir / "logs").glob("*.log"))[:MAX_FILES]
    return [path for path in known if not patterns or any(_means(pattern, path.stem) for pattern in patterns)]


def _means(pattern: str, name: str) -> bool:
    """rollout, rollout/0, rollout-0 and 'roll*' all select the log ``rollout-0``."""
    role, _, index = name.rpartition("-")
    return any(fnmatchcase(known, pattern) for known in (name, role, f"{role}/{index}"))
