"""The process between a role and its inference server: nothing of the server outlives the role, its log is bounded.

``python -m relax_rt.roles.engines.sglang.guard --lifeline FD --log FILE --log-mib N -- <server's command>`` starts the
command in a session of its own and pumps its output into the log. The lifeline is the reading end of a pipe whose other
end only the role has: when that is closed, by the role or by its death, the server and all its descendants are killed
(the guard is a subreaper). It ends with the server's exit status.

Standard library only: it starts in a fraction of a second and is small beside the server.
"""

from __future__ import annotations

import argparse
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

from relax_rt.supervision import procfs

GRACE_S = 3.0
PIECE = 1 << 16


class RotatingLog:
    """A file and its predecessor, each of `limit` bytes at most."""

    def __init__(self, path: Path, limit: int) -> None:
        self._path, self._limit = path, limit
        self._file: BinaryIO = path.open("ab", buffering=0)

    def write(self, data: bytes) -> None:
        """Append; a disk that is full must not end the server."""
        try:
            if self._file.tell() + len(data) > self._limit:
                self._file.close()
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                self._file = self._path.open("ab", buffering=0)
            self._file.write(data)
        except OSError:
            pass


def main(argv: list[str] | None = None) -> int:
    """Entry point; answers with the exit status to leave with."""
    parser = argparse.ArgumentParser(prog="relax_rt.roles.engines.sglang.guard")
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--log-mib", type=int, required=True)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE of the server's environment")
    parser.add_argument("--unset", action="append", default=[], help="name that the server's environment lacks")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    procfs.become_subreaper()
    # Ctrl-C goes to the whole terminal: it is the role that says when the server ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(options.lifeline, False)
    environment = {name: value for name, value in os.environ.items() if name not in options.unset}
    environment |= dict(pair.split("=", 1) for pair in options.set)
    server = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        start_new_session=True,
        preexec_fn=_die_with_guard,
    )
    try:
        return watch(server, options.lifeline, RotatingLog(options.log, options.log_mib << 20))
    finally:
        procfs.kill_until_none(lambda: procfs.descendants(os.getpid()), reap=True, limit_s=GRACE_S)


def _die_with_guard() -> None:
    procfs.prctl(procfs.PR_SET_PDEATHSIG, signal.SIGKILL)


def watch(server: subprocess.Popen[bytes], lifeline: int, log: RotatingLog) -> int:
    """Pump the log until the server has ended or the role wants it to; the exit status."""
    assert server.stdout is not None
    output = server.stdout.fileno()
    ended = os.pidfd_open(server.pid)
    with selectors.DefaultSelector() as selector:
        for descriptor in (output, ended, lifeline):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, selectors.EVENT_READ)
        while True:
            ready = {key.fd for key, _ in selector.select()}
            if output in ready and not _pump(output, log):
                selector.unregister(output)
            if ended in ready:
                while _pump(output, log):
                    pass
                return _status(server.wait())
            if lifeline in ready:
                # Weights and cache are the role's to write again: there is nothing that the server could save.
                return 0


def _pump(output: int, log: RotatingLog) -> bool:
    """Move what is there into the log; False when there is nothing, or nothing more to come."""
    try:
        data = os.read(output, PIECE)
    except BlockingIOError:
        return False
    log.write(data)
    return bool(data)


def _status(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
