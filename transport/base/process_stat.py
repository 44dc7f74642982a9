"""A process as /proc/<pid>/stat shows it. Standard library only."""

from __future__ import annotations

from pathlib import Path


def stat_fields(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on: [0] state, [1] ppid, [19] start in clock ticks, [48] env_end."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The command may hold spaces and parentheses: the last closing one ends it.
    return text[text.rindex(")") + 2 :].split()


def start_time(pid: int) -> int:
    """Start of a living process in clock ticks since boot; 0 when it is gone or a zombie. With the pid it is unique."""
    fields = stat_fields(pid)
    return 0 if fields is None or fields[0] in "ZX" else int(fields[19])
