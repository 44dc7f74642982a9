"""A test's server in a process of its own, and the words by which such a process and the test understand each other."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

from relax_rt.transport.rpc.identity import CurveKeys


def environment(keys: CurveKeys) -> dict[str, str]:
    """For child processes: the keys, and where the kits of tests lie."""
    paths = os.pathsep.join([str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "TEST_KEYS": f"{keys.public.decode()} {keys.secret.decode()}"}


def given_keys() -> CurveKeys:
    """In a child process: the keys it was given."""
    return CurveKeys(*os.environ["TEST_KEYS"].encode().split())


def tell(line: str) -> None:
    """To the test."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def told(process: subprocess.Popen[str]) -> str:
    """The next line that a process says."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


class ServerProcess:
    """Can be killed and started anew.

    Args:
        command: what to run. It is given the address to listen at, and tells the one it has.
        keys: for the process.
        host: where it listens.
        keeps_port: when it starts anew, it listens where it did.
    """

    def __init__(self, command: list[str], keys: CurveKeys, host: str, *, keeps_port: bool) -> None:
        self.command, self.keys, self.keeps_port = command, keys, keeps_port
        self._listen = self.address = f"tcp://{host}:0"
        self.process: subprocess.Popen[str] | None = None

    def locate(self) -> str:
        """Where it is, if it is."""
        return self.address if self.process is not None else ""

    def start(self) -> None:
        process = subprocess.Popen(
            [*self.command, self.address if self.keeps_port else self._listen],
            env=environment(self.keys),
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = told(process)
        self.process = process

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self.process.pid, os.WSTOPPED)

    def kill(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
