"""From the facts of an exit to its cause."""

from __future__ import annotations

import re
import signal
import sysconfig
from pathlib import Path

import pytest

from relax_rt.config.problems import BadInput
from relax_rt.interfaces.agent import Diagnosis, Kind
from relax_rt.supervision import diagnosis
from relax_rt.supervision.diagnosis import (
    ExitFacts,
    FailureReport,
    KernelLog,
    classify_exception,
    diagnose,
)
from relax_rt.transport.rpc.errors import GivenUp, Refused

TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'


def judge(**facts: object) -> Diagnosis:
    return diagnose("rollout/0", 7, 42, ExitFacts(**{"exit_code": None, **facts}), at=5.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "kind", "cause"),
    [
        ({"exit_code": 0}, "clean", "finished"),
        ({"signal": signal.SIGKILL}, "killed", "SIGKILL from outside the run"),
        ({"signal": signal.SIGKILL, "kill": ("hang", "no progress")}, "hang", "no progress"),
        ({"signal": signal.SIGSEGV, "kill": ("hang", "no progress")}, "killed", "segmentation fault"),
        (
            {"signal": signal.SIGKILL, "oom": "Out of memory: Killed process 42"},
            "oom",
            "Out of memory: Killed process 42",
        ),
        (
            {"signal": signal.SIGABRT, "log": "what(): CUDA error: device-side assert"},
            "cuda",
            "CUDA error: device-side",
        ),
        ({"signal": signal.SIGBUS}, "killed", "shared memory"),
        (
            {"exit_code": 1, "report": FailureReport(kind="exception", cause="ValueError: no")},
            "exception",
            "ValueError: no",
        ),
        ({"exit_code": 1, "log": TRACE + "ModuleNotFoundError: No module named 'x'"}, "import_error", "No module"),
        ({"exit_code": 1, "log": TRACE + "torch.OutOfMemoryError: CUDA out of memory."}, "cuda", "CUDA out of memory"),
        ({"exit_code": 1, "log": TRACE + "MemoryError"}, "oom", "MemoryError"),
        ({"exit_code": 1, "log": TRACE + "pkg.CustomError: bad luck\n"}, "exception", "pkg.CustomError: bad luck"),
        ({"exit_code": 1, "log": "ValueError: only talked about, not raised"}, "unknown", "exit code 1"),
        ({"exit_code": 2, "log": "no such key\n"}, "config", "no such key"),
        ({"exit_code": 70}, "unknown", "exit code 70"),
    ],
)
def test_kind_and_cause(facts: dict[str, object], kind: Kind, cause: str) -> None:
    found = judge(**facts)
    assert found.kind == kind and cause in found.cause
    assert found.failed == (kind != "clean")


def test_diagnosis_names_process_and_time_and_keeps_the_end_of_the_log() -> None:
    found = judge(signal=signal.SIGTERM, log="\n".join(f"line {n}" for n in range(100)))
    assert (found.slot, found.epoch, found.pid, found.at, found.signal) == ("rollout/0", 7, 42, 5.0, "SIGTERM")
    assert found.exit_code is None and found.last_lines[-1] == "line 99" and len(found.last_lines) == 20


def test_traceback_comes_from_the_report_else_from_the_log() -> None:
    assert judge(exit_code=1, report=FailureReport(kind="exception", cause="c", trace="reported")).trace == "reported"
    log = "before\n" + TRACE + "first\n" + TRACE + "KeyError: 'k'"
    assert judge(exit_code=1, log=log).trace == TRACE + "KeyError: 'k'"


def test_classifies_exceptions_where_they_are_raised() -> None:
    assert classify_exception(ModuleNotFoundError("x")) == "import_error"
    assert classify_exception(MemoryError()) == "oom"
    assert classify_exception(RuntimeError("CUDA error: an illegal memory access")) == "cuda"
    assert classify_exception(ValueError("x")) == "exception"
    assert classify_exception(BadInput("a folder")) == "config"
    # Also where its words are those of another kind.
    assert classify_exception(GivenUp("a micro-batch", why="CUDA out of memory")) == "given_up"
    assert classify_exception(Refused("a call")) == "exception", (
        "trying again may get another answer from another start"
    )


def test_evidence_does_not_repeat_the_cause() -> None:
    cause = "a call of x: " + "y " * 100
    chained = f"{TRACE}m.RelaxError: {cause}\n\nThe above exception\n{TRACE}m.RelaxError: {cause}\n"
    said = diagnose(
        "a/0", 1, 2, ExitFacts(exit_code=1, report=FailureReport(kind="exception", cause=cause, trace=chained)), at=1.0
    )
    assert not any("y y" in line for line in said.evidence()) and TRACE.splitlines()[1] in said.evidence()
    assert said.evidence(trace_lines=1) == ['  File "x.py", line 1, in <module>']
    plain = FailureReport(kind="exception", cause="KeyError: 'k'", trace=f"{TRACE}KeyError: 'k'")
    assert diagnose("a/0", 1, 2, ExitFacts(exit_code=1, report=plain), at=1.0).evidence() == TRACE.splitlines()
    assert judge(signal=9, log="one\ntwo").evidence(log_lines=1) == ["two"]


def test_kernel_log_reports_no_kill_of_a_process_that_it_does_not_name() -> None:
    kernel = KernelLog()
    assert kernel.killed(2**22 + 1) == ""
    kernel.close()
    assert kernel.killed(2**22 + 1) == ""


CHAINED = """Traceback (most recent call last):
  File "uvloop/loop.pyx", line 1515, in uvloop.loop.Loop.run_until_complete
  File "{runtime}/host.py", line 300, in live
    await _first(role.run(), *watches)
  File "/home/me/game.py", line 12, in reset
    board = BOARDS[seed]
            ~~~~~~^^^^^^
  File "{packages}/numpy/core.py", line 5, in pick
    raise IndexError
  File "{stdlib}/json/decoder.py", line 7, in decode
    raise ValueError
IndexError: list index out of range

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "{runtime}/roles/trainer.py", line 426, in _look_at_losses
    raise ending(self.config, report)
relax_rt.roles.base.progress.NoProgress: 64 groups failed
"""


def test_evidence_of_a_final_failure_is_the_frames_of_user_code() -> None:
    paths = {"packages": sysconfig.get_path("purelib"), "stdlib": sysconfig.get_path("stdlib")}
    trace = CHAINED.format(runtime=Path(diagnosis.__file__).parents[1], **paths)

    def ended(kind: Kind, trace: str) -> Diagnosis:
        report = FailureReport(kind=kind, cause="c", trace=trace)
        return diagnose("trainer/0", 6, 1, ExitFacts(exit_code=1, report=report, log="one\ntwo\n"), 1.0)

    assert ended("given_up", trace).evidence() == [
        '  File "/home/me/game.py", line 12, in reset',
        "    board = BOARDS[seed]",
        "            ~~~~~~^^^^^^",
    ]
    # A folder like one of a library, but of no library of this interpreter.
    mine = trace.replace("/home/me/", "/home/me/lib/python/")
    assert ended("config", mine).evidence()[0] == '  File "/home/me/lib/python/game.py", line 12, in reset'
    # The user's own code may be installed.
    installed = trace.replace("/home/me/game.py", f"{paths['packages']}/mine/game.py")
    assert [line for line in ended("config", installed).evidence() if "File" in line] == [
        f'  File "{paths["packages"]}/mine/game.py", line 12, in reset',
        f'  File "{paths["packages"]}/numpy/core.py", line 5, in pick',
    ]
    runtime = re.sub(rf'  File "(/home|{paths["packages"]}).*\n    .*\n( +~.*\n)?', "", trace)
    assert ended("config", runtime).evidence() == ["one", "two"]
    # Who failed unexpectedly shows all of it.
    assert "_look_at_losses" in "\n".join(ended("exception", trace).evidence())
