"""The commands against living runs of toys: started without a terminal, watched, scaled, drained, restarted."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_run import WAIT_S, environment, until

from relax_rt.process import procfs
from relax_rt.supervision.rundir import RunPaths, members_of_run, read_run

pytestmark = pytest.mark.integration
RELAX = [sys.executable, "-m", "relax_rt.cli.main"]


class Toys:
    """A run of toys in a folder, and the commands as they are called there."""

    def __init__(self, folder: Path, roles: str) -> None:
        self.folder = folder
        self.run_dir = folder / "runs/toy"
        (folder / "roles.toml").write_text(f'[run]\nname = "toy"\njob = "toy"\n{roles}\n')

    def call(self, *argv: str, code: int = 0) -> str:
        done = self.run(*argv)
        assert done.returncode == code, f"{argv} gave {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def run(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*RELAX, *argv],
            cwd=self.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=2 * WAIT_S,
            check=False,
        )

    def popen(self, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*RELAX, *argv],
            cwd=self.folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def slots(self) -> dict[str, dict[str, Any]]:
        return {slot["slot"]: slot for slot in json.loads(self.call("ps", "--json"))["slots"]}

    def states(self, role: str) -> dict[str, str]:
        return {name: slot["state"] for name, slot in self.slots().items() if slot["kind"] == role}

    def clean(self) -> None:
        record = read_run(self.run_dir)
        if record is None or "run_id" not in record:
            return
        paths = RunPaths(record["run_id"], self.run_dir)
        agent = int((record.get("agent") or {}).get("pid", 0))
        if agent and paths.socket_dir.exists() and procfs.start_time(agent):
            os.kill(agent, signal.SIGKILL)
        procfs.kill_until_none(lambda: members_of_run(paths.run_id), reap=False)
        paths.remove_private()


@pytest.fixture
def toys(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Toys]:
    made = Toys(tmp_path, request.param)
    yield made
    made.clean()


def of(roles: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("toys", [roles], indirect=True, ids=["toys"])


@of("[roles.worker]\ncount = 2\n[roles.aide]")
def test_a_detached_run_goes_on_until_it_is_ended(toys: Toys) -> None:
    out = toys.call("up", "--detach")
    for slot in ("registry/0", "queue/0", "worker/0", "worker/1", "aide/0"):
        assert f"{slot} ready in " in out
    assert str(toys.run_dir) in out
    # The terminal's process is gone, and all is ready.
    assert set(toys.states("worker").values()) == {"ready"}
    assert "worker/0 ready in" in (toys.run_dir / "logs/up.log").read_text()
    again = toys.run("up", "--detach")
    assert again.returncode == 2 and "is alive" in again.stderr
    assert json.loads(toys.call("down", "--json"))["did"] == "ended"
    assert read_run(toys.run_dir)["status"] == "stopped"  # type: ignore[index]
    resumed = json.loads(toys.call("up", "--detach", "--json"))
    assert resumed["ready"] is True and resumed["exit_code"] is None
    toys.call("down", "--kill")


@of("[roles.crasher]\n[supervision.restart]\nmax_restarts = 0\nrole_restarts = 0\n[roles.aide]")
def test_a_detached_run_that_fails_says_why(toys: Toys) -> None:
    done = toys.run("up", "--detach", "--set", "roles.crasher.after_s=0.0")
    if done.returncode == 0:
        # It was ready for a moment; then its end is told by `why`.
        until("the run has ended", lambda: (read_run(toys.run_dir) or {}).get("exit_code") is not None)
        assert "the toy broke" in toys.call("why")
    else:
        assert done.returncode == 1
        assert "the toy broke" in done.stderr and "relax-rt why" in done.stderr


@of("[roles.broken]\ntarget = 'broken.py:Broken'")
def test_a_detached_run_that_cannot_start_has_its_diagnosis_and_exit_code(toys: Toys) -> None:
    (toys.folder / "broken.py").write_text(
        "from relax_rt.interfaces.role import Role\n\n\nclass Broken(Role):\n    kind = 'broken'\n\n"
        "    async def setup(self):\n        raise OSError('no such device')\n\n    async def run(self): ...\n"
    )
    tables = ["max_restarts=0", "role_restarts=0"]
    sets = [word for table in tables for word in ("--set", f"supervision.restart.{table}")]
    done = toys.run("up", "--detach", *sets)
    assert done.returncode == 1
    assert "no such device" in done.stderr and "exit code 1" in done.stderr


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, toys: Toys, *argv: str) -> None:
        self._fd, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        own = (
            "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execv(sys.argv[1], sys.argv[1:])"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", own, *RELAX, *argv],
            cwd=toys.folder,
            env={**environment(), "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"},
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self.text = ""

    def shows(self, words: str) -> None:
        try:
            until(f"the terminal shows {words!r}", lambda: self._read() and words in self.text, self._ended)
        except AssertionError as error:
            raise AssertionError(f"{error}; it shows\n{self.text[-4000:]}") from None

    def press(self, key: bytes) -> None:
        os.write(self._fd, key)

    def ends(self) -> int:
        until("the command ends", lambda: (self._read(), self._ended())[1])
        os.close(self._fd)
        return self.process.wait(WAIT_S)

    def _ended(self) -> bool:
        return self.process.poll() is not None

    def _read(self) -> bool:
        while select.select([self._fd], [], [], 0)[0]:
            try:
                data = os.read(self._fd, 1 << 16)
            except OSError:
                break
            self.text += data.decode(errors="replace")
        return True


@of("[roles.worker]\ncount = 2\n[roles.stubborn]")
def test_up_on_a_terminal(toys: Toys) -> None:
    terminal = Terminal(toys, "up")
    terminal.shows("registry, queue, worker x2, stubborn")
    for slot in ("registry/0", "queue/0", "worker/0", "worker/1", "stubborn/0"):
        terminal.shows(f"{slot} ready in ")
    terminal.press(b"\x03")
    terminal.shows("Ctrl-C again ends them at once")
    terminal.press(b"\x03")
    assert terminal.ends() == 130
    assert read_run(toys.run_dir)["status"] == "killed"  # type: ignore[index]


@of("[roles.worker]")
def test_leaving_the_live_screen_of_attach(toys: Toys) -> None:
    toys.call("up", "--detach")
    terminal = Terminal(toys, "attach")
    terminal.shows("worker/0")
    terminal.press(b"\x03")
    assert terminal.ends() == 130
    assert "the run continues" in terminal.text
    assert toys.states("worker") == {"worker/0": "ready"}
    toys.call("down")


@of("[roles.worker]")
def test_attach_follows_and_leaves_the_run_alone(toys: Toys) -> None:
    toys.call("up", "--detach")
    watching = toys.popen("attach", "--plain")
    assert watching.stdout is not None
    with watching.stdout:
        assert "toy is running" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert "the run continues" in watching.stdout.read()
        assert watching.wait(WAIT_S) == 130
    assert toys.states("worker") == {"worker/0": "ready"}
    watching = toys.popen("attach", "--plain")
    assert watching.stdout is not None
    with watching.stdout:
        assert "toy is running" in watching.stdout.readline()
        toys.call("down")
        told = watching.stdout.read()
        assert watching.wait(WAIT_S) == 0
    assert "toy is stopped: relax-rt down" in told
    assert "no live run" in toys.run("attach").stderr


@of("[roles.worker]\ncount = 2\n[roles.aide]")
def test_scale_drain_and_restart_of_a_living_run(toys: Toys) -> None:
    toys.call("up", "--detach")
    assert "worker: 2 -> 4 slots" in toys.call("scale", "worker", "4")
    assert toys.states("worker") == {f"worker/{n}": "ready" for n in range(4)}
    found = json.loads(toys.call("scale", "worker", "1", "--json"))
    assert found["slots"] == ["worker/0"]
    pids = {name: slot["pid"] for name, slot in toys.slots().items()}
    assert "did you mean 'worker'" in toys.run("scale", "wroker", "2").stderr
    toys.call("restart", "worker")
    until("the worker is another process", lambda: toys.slots()["worker/0"]["pid"] not in (0, pids["worker/0"]))
    assert toys.slots()["aide/0"]["pid"] == pids["aide/0"]
    assert "drained" in toys.call("drain", "aide")
    assert toys.states("aide") == {"aide/0": "ended"}
    time.sleep(0.5)
    assert toys.states("aide") == {"aide/0": "ended"}, "what was drained stays down"
    toys.call("restart", "aide/0")
    until("the aide is back", lambda: toys.states("aide") == {"aide/0": "ready"})
    assert toys.run("drain", "elsewhere").returncode == 2
    toys.call("scale", "aide", "0")
    assert toys.states("aide") == {} and "role aide  0 slots" in toys.call("ps")
    assert "has no slots" in toys.run("restart", "aide").stderr
    toys.call("scale", "aide", "1")
    assert toys.states("aide") == {"aide/0": "ready"}
    toys.call("down")


@of("[roles.worker]")
def test_what_a_run_refuses_is_bad_input_and_changes_nothing(toys: Toys) -> None:
    toys.call("up", "--detach")
    before = toys.slots()
    for argv in (("scale", "registry", "2"), ("scale", "worker", "4000"), ("scale", "worker", "5000")):
        toys.call(*argv, code=2)
    toys.call("drain", "registry", code=2)
    assert {name: slot["pid"] for name, slot in toys.slots().items()} == {n: s["pid"] for n, s in before.items()}
    toys.call("down")


@of("[roles.worker]")
def test_commands_that_look_do_so_at_a_run_that_was_harmed(toys: Toys) -> None:
    toys.call("up", "--detach")
    pid = toys.slots()["worker/0"]["pid"]
    os.kill(pid, signal.SIGKILL)
    until("the worker is back", lambda: toys.slots()["worker/0"]["pid"] not in (0, pid))
    until("and ready", lambda: toys.states("worker") == {"worker/0": "ready"})
    slot = toys.slots()["worker/0"]
    assert slot["restarts"] == 1 and slot["epoch"] > 0
    (incident,) = json.loads(toys.call("why", "worker", "--json"))["incidents"]
    assert incident["diagnosis"]["kind"] == "killed" and incident["away_s"] > 0
    assert "worker-0" in toys.call("logs", "work*", "-n", "5")
    frame = until("progress between two looks", lambda: frame_of(toys))
    assert frame["worker/0"]["rss"] > frame["worker/0"]["own"] > 0
    assert frame["agent"]["threads"] > 0
    assert "worker/0" in toys.call("top", "--once", "--every", "0.1")
    text = toys.call("export", "--prometheus")
    assert 'relax_slot_restarts_total{run="toy",slot="worker/0",role="worker",node=""} 1' in text
    toys.call("trace", "--out", "trace.json")
    names = {record["name"] for record in json.loads((toys.folder / "trace.json").read_text())["traceEvents"]}
    assert {"starting", "ready", "back-off", "died (killed)"} <= names
    files = json.loads(toys.call("export", "--json"))["files"]
    assert {"run.json", "events.jsonl", "failures.csv", "logs/worker-0.log"} <= set(files)
    toys.call("down")


def frame_of(toys: Toys) -> dict[str, Any]:
    """What `top` says by slot, once the worker has moved while it looked."""
    frame = {row["slot"]: row for row in json.loads(toys.call("top", "--json", "--every", "0.3"))}
    return frame if frame["worker/0"]["rate"] > 0 else {}


@of("[roles.worker]")
def test_why_tells_of_an_agent_that_was_killed(toys: Toys) -> None:
    toys.call("up", "--detach")
    os.kill(int(read_run(toys.run_dir)["agent"]["pid"]), signal.SIGKILL)  # type: ignore[index]
    until("its keeper has told", lambda: (read_run(toys.run_dir) or {}).get("status") == "agent died")
    out = toys.call("why")
    assert "The node agent died" in out and "SIGKILL" in out and "resumes" in out
    assert "agent died" in toys.call("ps")


@of("[roles.stubborn]\n[roles.worker]\n[supervision]\nstop_timeout_s = 300\ndrain_timeout_s = 300")
def test_down_says_what_it_waits_for_and_is_overruled_by_now(toys: Toys) -> None:
    """The stubborn one would hold the run for five minutes."""
    toys.call("up", "--detach")
    late = toys.run("down", "--wait", "1")
    assert late.returncode == 1 and "has not ended within 1 s" in late.stderr
    assert "stubborn/0 stopping" in late.stderr and "relax-rt down runs/toy --now" in late.stderr
    waiting = toys.popen("down")
    assert waiting.stdout is not None
    first, second = waiting.stdout.readline(), waiting.stdout.readline()
    assert "6m 00s at most" in first and "--now" in first
    assert "stubborn/0 stopping" in second and "at the latest" in second
    waiting.send_signal(signal.SIGINT)
    rest, _ = waiting.communicate(timeout=WAIT_S)
    assert waiting.returncode == 130 and "keeps ending" in rest
    assert toys.states("stubborn") == {"stubborn/0": "stopping"}
    waiting = toys.popen("down")
    assert waiting.stdout is not None and "at most" in waiting.stdout.readline()
    assert "ended" in toys.call("down", "--now")
    rest, _ = waiting.communicate(timeout=WAIT_S)
    assert waiting.returncode == 0 and rest.endswith("runs/toy: ended\n")
    assert read_run(toys.run_dir)["status"] == "killed"  # type: ignore[index]
