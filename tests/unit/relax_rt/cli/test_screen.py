from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from relax_rt.cli.headline import Column
from relax_rt.cli.screen import DRAIN_HEARTBEAT_S, HEARTBEAT_S, Screen, render
from relax_rt.interfaces.agent import Diagnosis, RunStatus, SlotStatus

HEADLINE = [
    Column("step", "reward_mean", "reward", ".3f", spark=True),
    Column("queue", "outstanding", "queue", of="bound"),
    Column("evaluation", "exact", "held-out", ".3f", line="held-out {when}: {exact:.3f}"),
]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def slot(name: str, **fields: Any) -> SlotStatus:
    values = {"state": "ready", "pid": 77, "tier": 1, "uptime_s": 5.0, **fields}
    return SlotStatus(slot=name, kind=name.partition("/")[0], **values)


def status(*slots: SlotStatus, state: str = "running", reason: str = "") -> RunStatus:
    return RunStatus(
        run_id="abcd", name="tiny", run_dir="runs/tiny", status=state, reason=reason, uptime_s=9.0, slots=list(slots)
    )


class Run:
    """A run directory that the test writes to."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        (run_dir / "events").mkdir()

    def metric(self, kind: str, t: float, by: str = "trainer/0#4", **fields: Any) -> None:
        self._append("metrics.jsonl", {"kind": kind, "t": t, "by": by, **fields})

    def event(self, kind: str, t: float, **fields: Any) -> None:
        self._append("events/current.jsonl", {"kind": kind, "t": t, "by": "agent", **fields})

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.run_dir / name).open("a") as file:
            file.write(json.dumps(record) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def plain(run: Run, clock: Clock) -> tuple[Screen, io.StringIO]:
    out = io.StringIO()
    return Screen(run.run_dir, HEADLINE, 10, Console(file=out, width=80), clock), out


def show(screen: Screen, now: RunStatus) -> None:
    """What the screen's thread does after an update, in this thread."""
    screen._status = now
    screen.step()


def told(out: io.StringIO) -> list[str]:
    return [line.partition(" ")[2] for line in out.getvalue().splitlines()]


def kill_and_return(run: Run) -> None:
    diagnosis = {"kind": "killed", "cause": "SIGKILL from outside the run"}
    run.event("slot_exited", 1001.0, slot="rollout/0", epoch=3, finished=False, diagnosis=diagnosis)
    run.event("slot_restarting", 1001.0, slot="rollout/0", epoch=3, wait_s=0.1, restarts=1)
    run.event("slot_ready", 1003.5, slot="rollout/0", epoch=4)


def test_plain_lines_tell_steps_evaluations_and_restarts(run: Run) -> None:
    screen, out = plain(run, Clock())
    run.metric("evaluation", 1000.5, by="evaluator/0#5", when="before", exact=0.25)
    run.metric("queue", 1000.6, by="queue/0#2", outstanding=3, bound=8)
    run.metric("step", 1001.0, step=1, reward_mean=0.5)
    run.metric("step", 1002.0, step=2, reward_mean=0.625)
    kill_and_return(run)
    show(screen, status(slot("trainer/0")))
    assert told(out) == [
        "tiny is running, 1 of 1 slots ready",
        "held-out before: 0.250",
        "step 1/10  reward 0.500  queue 3/8",
        "step 2/10  reward 0.625  queue 3/8  1.0 s a step, about 8.0 s left, a first guess",
        "ERROR rollout/0 died (killed): SIGKILL from outside the run",
        "rollout/0 is back after 2.5 s",
    ]
    show(screen, status(slot("trainer/0")))
    assert len(told(out)) == 6
    screen.close(["the end"])
    assert out.getvalue().endswith("\n\nthe end\n")


def test_each_slot_is_reported_once_when_it_is_ready_for_the_first_time(run: Run) -> None:
    screen, out = plain(run, Clock())
    run.event("slot_spawned", 1000.5, slot="rollout/0", epoch=3, pid=7)
    run.event("slot_ready", 1002.3, slot="rollout/0", epoch=3)
    kill_and_return(run)
    run.event("run_draining", 1005.0, reason="Ctrl-C", exit_code=130)
    show(screen, status(slot("rollout/0")))
    assert told(out)[1:] == [
        "rollout/0 ready in 1.8 s",
        "ERROR rollout/0 died (killed): SIGKILL from outside the run",
        "rollout/0 is back after 2.5 s",
        "WARNING Ctrl-C: the roles finish their work in progress; Ctrl-C again ends them at once",
    ]


def test_a_run_that_drains_says_at_once_and_every_10_s_whom_it_waits_for(run: Run) -> None:
    clock = Clock()
    screen, out = plain(run, clock)
    run.event("run_draining", 1000.5, reason="Ctrl-C", exit_code=130, slot_most_s=600.0)
    busy = slot("trainer/0", state="stopping", state_s=0.5, detail="finishing the step", kill_latest_s=599.5)
    show(screen, status(busy, slot("queue/0"), slot("reward/0", state="ended"), state="draining", reason="Ctrl-C"))
    assert told(out) == [
        "tiny is draining, 1 of 3 slots ready: Ctrl-C",
        "draining  trainer/0 stopping for 0.5 s (finishing the step), killed in 10m 00s at the latest",
        "WARNING Ctrl-C: the roles finish their work in progress, each within 10m 00s; Ctrl-C again ends them at once",
    ]
    clock.now += DRAIN_HEARTBEAT_S
    busy = slot("trainer/0", state="stopping", state_s=10.5, detail="writing a checkpoint", kill_latest_s=589.5)
    show(screen, status(busy, slot("queue/0"), slot("reward/0", state="ended"), state="draining", reason="Ctrl-C"))
    assert told(out)[3:] == [
        "draining  trainer/0 stopping for 10 s (writing a checkpoint), killed in 9m 50s at the latest",
    ]


def test_what_an_earlier_part_of_a_resumed_run_wrote_gives_no_lines(run: Run) -> None:
    run.metric("step", 500.0, step=6, reward_mean=0.5)
    kill_and_return(run)
    clock = Clock()
    clock.now = 2000.0
    screen, out = plain(run, clock)
    show(screen, status(slot("trainer/0")))
    assert told(out) == ["tiny is running, 1 of 1 slots ready"]
    assert screen.view.headline.step == 6


def test_a_silent_run_says_what_it_waits_for(run: Run) -> None:
    clock = Clock()
    screen, out = plain(run, clock)
    now = status(slot("trainer/0", waiting="whole groups"), slot("rollout/0", state="starting", detail="loading"))
    show(screen, now)
    clock.now += HEARTBEAT_S - 1
    show(screen, now)
    assert len(told(out)) == 1
    clock.now += 2
    show(screen, now)
    assert told(out)[1:] == ["running  rollout/0 starting (loading); trainer/0 waits: whole groups"]


def test_the_end_of_a_run_is_reported_with_its_reason(run: Run) -> None:
    screen, out = plain(run, Clock())
    run.event("run_draining", 1001.0, reason="trainer/0 failed 6 times", exit_code=1)
    show(screen, status(slot("trainer/0"), state="draining", reason="trainer/0 failed 6 times"))
    assert told(out) == [
        "tiny is draining, 1 of 1 slots ready: trainer/0 failed 6 times",
        "ERROR the run ends: trainer/0 failed 6 times",
    ]


def test_close_reports_what_was_written_last_and_once(run: Run) -> None:
    screen, out = plain(run, Clock())
    screen.update(status(slot("trainer/0")))
    run.metric("step", 1001.0, step=10, reward_mean=0.5)
    screen.close(["summary"])
    screen.close()
    assert told(out).count("step 10/10  reward 0.500") == 1
    assert out.getvalue().count("summary") == 1
    assert not any(thread.name == "relax-screen" for thread in threading.enumerate())


def picture(screen: Screen, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(render(screen.view, width, height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_the_picture_fits_and_shows_everything(run: Run, width: int) -> None:
    clock = Clock()
    screen, _ = plain(run, clock)
    for n in range(1, 6):
        run.metric("step", 1000.0 + n, step=n, reward_mean=n / 10, version=n + 1)
    run.metric("queue", 1001.0, by="queue/0#2", outstanding=3, bound=8)
    run.metric("evaluation", 1001.0, by="evaluator/0#5", when="before", exact=0.25)
    kill_and_return(run)
    clock.now = 1005.0
    died = Diagnosis(slot="rollout/1", epoch=2, kind="oom", cause="killed by the kernel for memory " * 5)
    slots = [slot("trainer/0", detail="micro-batch 3 of 7 " * 20), slot("reward/0", waiting="samples")]
    slots.append(slot("rollout/1", state="backoff", pid=0, uptime_s=0.0, restarts=2, last=died))
    show(screen, status(*slots))
    lines = picture(screen, width, 24)
    text = "\n".join(lines)
    assert len(lines) <= 24 and max(map(len, lines)) <= width
    for part in ("tiny", "running", "step 5 / 10", "50%", "5.0 s left", "0.500 ▁", "3 / 8", "0.250", "waits: samples"):
        assert part in text
    row = next(line for line in lines if "rollout/1" in line)
    assert "backoff" in row and " 2 " in row and "oom: killed by" in row
    assert next(line for line in lines if "trainer/0" in line).split().count("6") == 1
    assert "rollout/0 is back after 2.5 s" in text
    screen.close()


def test_many_slots_fold_and_trouble_stays_in_sight(run: Run) -> None:
    screen, _ = plain(run, Clock())
    slots = [slot(f"rollout/{n}", detail="decoding") for n in range(50)]
    slots[31] = slot("rollout/31", state="hung")
    show(screen, status(slot("trainer/0"), *slots))
    lines = picture(screen, 100, 24)
    text = "\n".join(lines)
    assert len(lines) <= 24
    assert "rollout ×31" in text and "rollout ×18" in text and "rollout/31" in text
    several = [slot(f"{kind}/{n}", state="hung") for kind in "abcdefgh" for n in range(4)]
    show(screen, status(slot("trainer/0"), *several))
    lines = picture(screen, 100, 24)
    assert len(lines) <= 24 and any(line.strip().endswith("more") for line in lines)
    screen.close()


def test_an_empty_run_has_a_picture(run: Run) -> None:
    screen, _ = plain(run, Clock())
    assert any("step 0 / 10" in line for line in picture(screen, 80, 24))
    screen.close(["died before the first step"])


def test_a_live_screen_gives_the_cursor_back(run: Run) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"})
    screen = Screen(run.run_dir, HEADLINE, 10, console)
    assert screen.live
    screen.update(status(slot("trainer/0")))
    screen.close(["summary"])
    text = out.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert text.endswith("summary\n")


def test_a_full_pipe_does_not_hold_up_the_caller(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_rt.cli.screen.CLOSE_TIMEOUT_S", 0.05)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    try:
        while True:
            os.write(writer, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writer, True)
    with os.fdopen(writer, "w") as stuck:
        screen = Screen(run.run_dir, HEADLINE, 10, Console(file=stuck, width=80))
        screen.update(status(slot("trainer/0")))
        screen.close(["never shown"])
        assert screen._thread is not None and screen._thread.is_alive()
        os.read(reader, 1 << 20)
        screen._thread.join(30.0)
        assert not screen._thread.is_alive()
    assert b"never shown" not in os.read(reader, 1 << 20)
    os.close(reader)


CLOSED_PIPE = """
    import sys
    from pathlib import Path
    from relax_rt.cli.screen import Screen
    from relax_rt.interfaces.agent import Diagnosis, RunStatus, SlotStatus
    sys.stdin.readline()
    screen = Screen(Path(sys.argv[1]), [], 10)
    screen.update(RunStatus(run_id="a", name="tiny", run_dir="d", status="running"))
    screen.close(["summary"])
    screen.close(["summary"])
    print("went on", file=sys.stderr)
"""


def test_a_reader_that_goes_away_does_not_end_the_run(run: Run) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CLOSED_PIPE), str(run.run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate("go\n", timeout=120)
    assert process.returncode == 0, errors
    assert errors.strip() == "went on"
