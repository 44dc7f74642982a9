"""The logs of a run's roles: their ends, and what is added to them."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from relax_rt.cli.display import show_json_line
from relax_rt.config.problems import did_you_mean
from relax_rt.supervision.control import NoRun, find_run
from relax_rt.supervision.rundir import slot_file

POLL_S = 0.2
END_BYTES = 4 << 20
READ_BYTES = 1 << 20


class LogFile:
    """One log that another process appends to and, when it is full, empties."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.stem
        self._at = 0
        self._rest = b""

    def end(self, count: int) -> list[str]:
        """The last lines; `added` goes on from there."""
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                start = max(0, size - END_BYTES)
                file.seek(start)
                data = file.read(size - start)
        except FileNotFoundError:
            return []
        self._at = size
        *lines, self._rest = data.split(b"\n")
        shown = lines[1:] if start else lines
        if self._rest and count:
            # A last line without its end may be all there ever is: a process that died in the middle of it.
            shown, self._rest = [*shown, self._rest], b""
        return [line.decode(errors="replace") for line in (shown[-count:] if count else [])]

    def added(self) -> Iterator[str]:
        """Whole lines written since the last look."""
        try:
            with self.path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._at:
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield line.decode(errors="replace")


def show_logs(run_dir: Path, slot: str, *, lines: int, follow: bool, as_json: bool) -> None:
    """Print the ends of the logs asked for, then go on with what is added until the run has ended.

    Raises:
        NoRun: the run has no such log.
    """
    files = select(run_dir, slot)
    several = len(files) > 1
    width = max(len(file.name) for file in files)

    def show(file: LogFile, line: str) -> None:
        if as_json:
            show_json_line({"log": file.name, "line": line})
        else:
            sys.stdout.write(f"{file.name:{width}} | {line}\n" if several else f"{line}\n")

    for file in files:
        for line in file.end(lines):
            show(file, line)
    sys.stdout.flush()
    while follow:
        # Looked at before the logs, so that the last lines of an ending run are seen.
        alive = find_run(run_dir).alive
        for file in files:
            for line in file.added():
                show(file, line)
        sys.stdout.flush()
        if not alive:
            return
        time.sleep(POLL_S)


def select(run_dir: Path, slot: str) -> list[LogFile]:
    """The logs of a slot, of all slots of a kind, or of the whole run.

    Raises:
        NoRun: there is none.
    """
    known = sorted((run_dir / "logs").glob("*.log"))
    if not slot:
        found = known
    else:
        exact = [path for path in known if path.name == slot_file(slot, ".log")]
        found = exact or [path for path in known if path.stem.rpartition("-")[0] == slot]
    if not found:
        names = [path.stem for path in known]
        hint = did_you_mean(slot.replace("/", "-"), names) or (f"there is {', '.join(names)}" if names else "")
        raise NoRun(f"no log of {slot or 'any role'} in {run_dir}", hint=hint)
    return [LogFile(path) for path in found]
