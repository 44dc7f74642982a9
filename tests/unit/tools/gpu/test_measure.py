"""tools/gpu/measure.py: real probes that succeed, fail, crash and hang, within budgets, and again where it left off."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[4] / "tools" / "gpu"))

from measure import PHASES, PROBES, Probe, Rows, program, read_rows, wanted

REPO = Path(__file__).parents[4]
TOOLS = REPO / "tools" / "gpu"
LONG_S = 3600.0


def probe(name: str, code: str, *, limit_s: float = LONG_S, expected_s: float = 0.0, device: bool = False) -> Probe:
    return Probe("check", name, program(code), expected_s, limit_s, "a test", device)


FIGURE = """import json; print("words"); print(json.dumps({"figure": "f", "value": 7}))"""
CRASH = "import os, signal; print('before', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
# It ignores SIGTERM, and so does a grandchild in a session of its own, whose pid is told.
HANG = """trap '' TERM; setsid sh -c 'trap "" TERM; echo $$ > "$0"; sleep 3600' "$0" & sleep 3600"""
# Adopting orphans changes a process for good: the tool runs in one of its own, with probes of the test.
DRIVER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from measure import Probe, Rows, own_descendants, measure
own_descendants()
given = json.loads(sys.argv[2])
probes = [Probe(**{**one, "command": tuple(one["command"])}) for one in given["probes"]]
rows = Rows(Path(given["folder"]))
found = measure("check", given["budget_s"], rows, again=given["again"], probes=probes)
print("SUMMARY" + json.dumps(found))
"""


def given_to(folder: Path, probes: list[Probe], *, budget_s: float = LONG_S, again: str = "") -> list[str]:
    """The driver's command line."""
    fields = ("phase", "name", "command", "expected_s", "limit_s", "gives", "device")
    given = {
        "probes": [{name: getattr(one, name) for name in fields} for one in probes],
        "folder": str(folder),
        "budget_s": budget_s,
        "again": again,
    }
    return [sys.executable, "-c", DRIVER, str(TOOLS), json.dumps(given)]


def measured(folder: Path, probes: list[Probe], **options: Any) -> dict[str, Any]:
    """Run them all, and return the summary."""
    done = subprocess.run(given_to(folder, probes, **options), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    *_, last = (line for line in done.stdout.splitlines() if line.startswith("SUMMARY"))
    return dict(json.loads(last.removeprefix("SUMMARY")))


def outcomes(folder: Path) -> list[tuple[str, str]]:
    return [(row["probe"], row["outcome"]) for row in read_rows(folder / "measure.jsonl") if "outcome" in row]


def ran(folder: Path) -> list[str]:
    return [name for name, outcome in outcomes(folder) if outcome == "started"]


def result(folder: Path, name: str) -> dict[str, Any]:
    return [row for row in read_rows(folder / "measure.jsonl") if row["probe"] == name][-1]


def test_what_fails_crashes_or_hangs_ends_nothing_and_leaves_nothing_running(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    hang = Probe("check", "hang", ("sh", "-c", HANG, str(told)), 0, 5.0, "a test", False)
    probes = [
        hang,
        probe("crash", CRASH),
        probe("fail", "import sys; print('said'); sys.exit('why')"),
        Probe("check", "absent", ("/no/such/program",), 0, LONG_S, "a test", False),
        probe("good", FIGURE),
    ]
    found = measured(tmp_path / "out", probes)
    out = tmp_path / "out"
    assert found["ok"] == ["good"] and found["timed_out"] == ["hang: killed after 5 s"]
    assert found["crashed"] == ["crash: SIGSEGV"] and found["failed"] == ["fail", "absent"]
    assert result(out, "good")["figures"] == [{"figure": "f", "value": 7}]
    assert result(out, "fail")["tail"] == "said\nwhy\n"
    assert "before" in (out / "measure.log").read_text() and "words" in (out / "measure.log").read_text()
    pid = int(told.read_text())
    assert not psutil.pid_exists(pid), "a process in a session of its own has ended, too"


def test_processes_that_a_finished_probe_left_are_ended_and_counted(tmp_path: Path) -> None:
    code = "import subprocess, sys; p = subprocess.Popen(['sleep', '3600'], start_new_session=True); print(p.pid)"
    measured(tmp_path, [probe("leaves", code)])
    row = result(tmp_path, "leaves")
    assert row["outcome"] == "ok" and row["left_running"] == 1
    pid = int((tmp_path / "measure.log").read_text().splitlines()[-2])
    assert not psutil.pid_exists(pid)


def test_a_second_call_runs_only_what_has_no_result(tmp_path: Path) -> None:
    probes = [probe("good", "pass"), probe("bad", "raise SystemExit(1)"), probe("large", "pass", expected_s=500.0)]
    found = measured(tmp_path, probes, budget_s=300.0)
    assert ran(tmp_path) == ["good", "bad"]
    (why,) = found["skipped"]
    assert re.fullmatch(r"large: takes about 500 s, \d+ s are left", why)
    found = measured(tmp_path, probes)
    assert ran(tmp_path) == ["good", "bad", "large"] and found["ok"] == ["good", "large"] and "skipped" not in found
    measured(tmp_path, probes, again="failed")
    assert ran(tmp_path)[3:] == ["bad"]
    measured(tmp_path, probes, again="good,large")
    assert ran(tmp_path)[4:] == ["good", "large"]


def test_a_smaller_probe_fits_into_what_a_larger_one_left(tmp_path: Path) -> None:
    measured(tmp_path, [probe("large", "pass", expected_s=500.0), probe("small", "pass")], budget_s=300.0)
    assert outcomes(tmp_path) == [("large", "skipped"), ("small", "started"), ("small", "ok")]


def test_the_budget_ends_a_probe_whose_own_limit_is_longer(tmp_path: Path) -> None:
    measured(tmp_path, [probe("slow", "import time; time.sleep(3600)")], budget_s=13.0)
    assert result(tmp_path, "slow")["why"].endswith("(all of the budget)")


def test_without_a_device_its_probes_are_skipped_with_the_reason(tmp_path: Path) -> None:
    measured(tmp_path, [probe("needs", "raise SystemExit(1)", device=True), probe("other", "pass")])
    assert result(tmp_path, "needs") == {
        "probe": "needs",
        "phase": "check",
        "outcome": "skipped",
        "why": "torch sees no CUDA device",
    }
    assert result(tmp_path, "other")["outcome"] == "ok"


def test_rows_that_were_cut_off_and_interrupted_probes_are_survived(tmp_path: Path) -> None:
    """The machine was taken away while a probe ran: its row was half written."""
    file = tmp_path / "measure.jsonl"
    file.write_text(
        '{"probe": "done", "outcome": "ok"}\n{"probe": "cut", "outcome": "started"}\nnoise\n[1]\n{"probe": "cut", "ou'
    )
    rows = Rows(tmp_path)
    rows.add({"probe": "next", "outcome": "ok"})
    assert [row["probe"] for row in read_rows(file)] == ["done", "cut", "next"]
    probes = [probe("cut", "pass"), probe("done", "pass"), probe("new", "pass")]
    assert [p.name for p in wanted("check", rows.last, "", probes)] == ["new", "cut"], "what was interrupted comes last"
    with pytest.raises(SystemExit, match="neww: no such probe"):
        wanted("check", rows.last, "neww", probes)


def test_rows_of_an_earlier_machine_count(tmp_path: Path) -> None:
    (tmp_path / "old.jsonl").write_text('{"probe": "a", "outcome": "ok"}\n{"probe": "b", "outcome": "failed"}\n')
    rows = Rows(tmp_path / "new", [tmp_path / "old.jsonl"])
    assert [p.name for p in wanted("check", rows.last, "", [probe(n, "pass") for n in "abc"])] == ["c"]


def test_each_test_has_a_row_of_its_own_before_a_later_one_hangs(tmp_path: Path) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(
        "import os, signal, pytest\n"
        "def test_one(): pass\n"
        "def test_two(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_three(): pass\n"
        "def test_four(): os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "measure_rows", "-c", os.devnull, str(file)]
    measured(tmp_path / "out", [Probe("check", "some", tuple(command), 0, LONG_S, "a test", False)])
    rows = [row for row in read_rows(tmp_path / "out/measure.jsonl") if "test" in row]
    assert [(row["test"].split("::")[1], row["result"]) for row in rows] == [
        ("test_one", "passed"),
        ("test_two", "failed"),
        ("test_three", "skipped"),
    ]
    assert "assert 1 == 2" in rows[1]["why"] and rows[2]["why"] == "Skipped: not here"
    row = result(tmp_path / "out", "some")
    assert (row["outcome"], row["why"], row["passed"], row["failed"]) == ("crashed", "SIGKILL", 1, 1)


def test_probes_whose_tests_are_all_skipped_are_not_called_ok(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("import pytest\n@pytest.mark.skip(reason='no GPU')\ndef test_it(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "measure_rows", "-c", os.devnull, str(tmp_path / "test_some.py")]
    figure = "import json; print(json.dumps({'figure': 'f', 'skipped': 'NCCL is too old'}))"
    tests = Probe("check", "some", tuple(command), 0, LONG_S, "a test", False)
    found = measured(tmp_path / "out", [tests, probe("figure", figure)])
    assert found["skipped"] == ["some: Skipped: no GPU", "figure: NCCL is too old"]


def test_ending_the_tool_ends_its_probe(tmp_path: Path) -> None:
    """A call's time limit ends the tool by SIGTERM; nothing may go on using the device."""
    told = tmp_path / "pid"
    code = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    given = given_to(tmp_path / "out", [probe("slow", code)])
    tool = subprocess.Popen(given, stderr=subprocess.DEVNULL)
    try:
        while not told.exists() or not told.read_text():
            assert tool.poll() is None
            time.sleep(0.02)
        tool.send_signal(signal.SIGTERM)
        tool.wait(60)
        assert not psutil.pid_exists(int(told.read_text()))
    finally:
        tool.kill()
        tool.wait()


def test_a_reader_of_stdout_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    command = given_to(tmp_path, [probe("one", "pass"), probe("two", "pass")])
    tool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert tool.stdout is not None
    tool.stdout.close()
    tool.wait(120)
    assert outcomes(tmp_path) == [("one", "started"), ("one", "ok"), ("two", "started"), ("two", "ok")]


def test_every_test_and_figure_of_a_device_is_in_a_probe() -> None:
    words = [" ".join(one.command) for one in PROBES]
    for file in (REPO / "tests/gpu").glob("test_*.py"):
        of_file = [one.command for one in PROBES if f"tests/gpu/{file.name}" in one.command]
        assert of_file, f"no probe runs {file.name}"
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.M):
            chosen = [c for c in of_file if "-k" not in c or any(w in name for w in c[-1].split(" or "))]
            assert len(chosen) == 1, f"{len(chosen)} probes run {name}"
    figures = re.search(r"^FIGURES = \{(.*?)\}", (TOOLS / "figures.py").read_text(), re.M | re.S)
    assert figures is not None
    for name in re.findall(r'"(\w+)":', figures[1]):
        assert any(text.endswith(f"--only {name}") for text in words), f"no probe measures {name}"
    assert len({one.name for one in PROBES}) == len(PROBES)
    assert {one.phase for one in PROBES} == set(PHASES["all"])
    assert all(one.expected_s < one.limit_s for one in PROBES)


def test_the_command_line_refuses_before_it_starts(tmp_path: Path) -> None:
    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOLS / "measure.py"), *arguments, "--out", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300)

    assert "invalid choice: 'alll'" in call("alll").stderr
    assert "no such file" in call("check", "--resume", str(tmp_path / "none")).stderr
    assert "engine rate" in call("figures", "--list").stdout and not list(tmp_path.iterdir())
