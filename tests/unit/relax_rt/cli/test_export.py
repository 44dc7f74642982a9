"""What other tools are given of a run, and the rates of `top`."""

from __future__ import annotations

import csv
import io
import json
import math
import tarfile
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from relax_rt.cli.display import print_table
from relax_rt.cli.export import prometheus_text, write_archive
from relax_rt.cli.main import main
from relax_rt.cli.ps import SlotFigures
from relax_rt.cli.time_left import Estimate
from relax_rt.cli.top import ProcessUsage, ProgressRates, UsageSample, rows, show_top, take_sample
from relax_rt.cli.top import _table as table_of
from relax_rt.cli.why import explain
from relax_rt.config.version import RUN_FORMAT
from relax_rt.interfaces.agent import Diagnosis, RunStatus, SlotStatus
from relax_rt.observe.events import read_events
from relax_rt.supervision.control import NoRun
from relax_rt.supervision.rundir import write_json
from relax_rt.transport.rpc.errors import RelaxError

STATUS = RunStatus(
    run_id="ab",
    name='t"wo',
    run_dir="/runs/two",
    status="running",
    agent_pid=1,
    slots=[
        SlotStatus(slot="rollout/0", kind="rollout", tier=1, state="ready", pid=5, epoch=8, progress=100, restarts=2),
        SlotStatus(slot="rollout/1", kind="rollout", tier=1, state="backoff", epoch=9, progress=7),
    ],
)


def a_run(run_dir: Path) -> None:
    (run_dir / "events").mkdir(parents=True)
    (run_dir / "logs").mkdir()
    write_json(run_dir / "run.json", {"format": RUN_FORMAT, "run_id": "ab", "name": "two", "status": "finished"})
    died = msgspec.to_builtins(Diagnosis(slot="rollout/0", epoch=1, kind="oom", cause="too, big", at=5.0))
    for n, name in enumerate(("events-000001.jsonl", "current.jsonl")):
        line = json.dumps({"t": 5.0 + n, "kind": "slot_exited", "slot": "rollout/0", "diagnosis": died})
        (run_dir / "events" / name).write_text(f"{line}\n" * 3)
    records = [
        {"kind": "step", "t": 1.0, "step": 1, "loss": 0.5, "keys": ["1.0"]},
        {"kind": "step", "t": 2.0, "step": 2, "loss": None, "skipped": 'not, "finite"'},
        {"kind": "../evil", "t": 2.0},
    ]
    (run_dir / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n{torn")
    (run_dir / "logs/rollout-0.log").write_text("hello\n")


def members(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        return {m.name: tar.extractfile(m).read().decode() for m in tar.getmembers()}  # type: ignore[union-attr]


def test_archive_of_json_lines_and_tables(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    a_run(run_dir)
    names = write_archive(run_dir, tmp_path / "out.tar.gz", explain(read_events(run_dir), STATUS), most_mib=1)
    found = members(tmp_path / "out.tar.gz")
    assert list(found) == names
    assert [json.loads(line)["t"] for line in found["events.jsonl"].splitlines()] == [5.0] * 3 + [6.0] * 3
    table = list(csv.DictReader(io.StringIO(found["metrics-step.csv"])))
    assert [row["loss"] for row in table] == ["0.5", ""]
    assert [row["skipped"] for row in table] == ["", 'not, "finite"']
    assert "keys" not in table[0]
    assert next(csv.DictReader(io.StringIO(found["failures.csv"])))["cause"] == "too, big"
    assert not any("evil" in name for name in names)
    assert found["logs/rollout-0.log"] == "hello\n"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    with pytest.raises(RelaxError, match="cannot be written"):
        write_archive(run_dir, tmp_path / "no/out.tar.gz", explain([], STATUS), most_mib=1)


def test_of_much_the_newest_whole_lines_are_taken(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    a_run(run_dir)
    with (run_dir / "metrics.jsonl").open("w") as file:
        for n in range(30_000):
            file.write(json.dumps({"kind": "x", "n": n, "filler": "y" * 50}) + "\n")
    write_archive(run_dir, tmp_path / "out.tar.gz", explain([], STATUS), most_mib=1)
    numbers = [json.loads(line)["n"] for line in members(tmp_path / "out.tar.gz")["metrics.jsonl"].splitlines()]
    assert numbers == list(range(numbers[0], 30_000)) and numbers[0] > 0


def test_prometheus_text() -> None:
    text = prometheus_text(STATUS, {"rollout/0": SlotFigures(version=3, lag=1, depth=4)})
    lines = text.splitlines()
    assert 'relax_run_up{run="t\\"wo"} 1' in lines
    labels = '{run="t\\"wo",slot="rollout/0",role="rollout",node=""}'
    assert {
        f"relax_slot_restarts_total{labels} 2",
        f"relax_slot_policy_version{labels} 3",
        f"relax_slot_lag{labels} 1",
    } <= set(lines)
    assert not any("policy_version" in line and "rollout/1" in line for line in lines)
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    # All samples of a name stand together, under its head.
    order = [line.split("{")[0] for line in lines if not line.startswith("#")]
    assert order == sorted(order, key=names.index)


def test_prometheus_reports_the_time_left() -> None:
    lines = prometheus_text(STATUS, {}, Estimate(3, 20, step_s=2.5, left_s=42.5, measured=3)).splitlines()
    labels = '{run="t\\"wo"}'
    total_s = STATUS.uptime_s + 42.5
    assert {
        f"relax_run_step{labels} 3",
        f"relax_run_steps{labels} 20",
        f"relax_run_step_seconds{labels} 2.5",
        f"relax_run_left_seconds{labels} 42.5",
        f"relax_run_total_seconds{labels} {total_s:g}",
    } <= set(lines)
    unknown = prometheus_text(STATUS, {}, Estimate(0, 20))
    assert "relax_run_steps" in unknown and "left_seconds" not in unknown


def test_rates_between_two_looks() -> None:
    def use(cpu_s: float, pid: int = 5) -> ProcessUsage:
        return ProcessUsage(pid, cpu_s, rss=100, own=60, threads=3, files=9, processes=2)

    later = msgspec.structs.replace(
        STATUS, slots=[msgspec.structs.replace(STATUS.slots[0], progress=150), STATUS.slots[1]]
    )
    before = UsageSample(10.0, STATUS, {"rollout/0": use(1.0), "agent": use(0.0, 1)})
    after = UsageSample(12.0, later, {"rollout/0": use(4.0), "agent": use(0.5, 1)})
    rates = ProgressRates()
    rates.update(before)
    rates.update(after)
    first, second, agent = rows(before, after, rates)
    assert (first.cpu, first.rate, first.own, first.processes) == (1.5, 25.0, 60, 2)
    assert (second.cpu, second.rate, second.rss) == (None, None, None)
    assert agent.cpu is not None and math.isclose(agent.cpu, 0.25)
    # Another process in the slot: what it counts began anew.
    anew = msgspec.structs.replace(STATUS.slots[0], pid=6, epoch=10, progress=3)
    after = UsageSample(12.0, msgspec.structs.replace(STATUS, slots=[anew]), {"rollout/0": use(0.1, 6)})
    rates.update(after)
    (first, *_) = rows(before, after, rates)
    assert (first.cpu, first.rate) == (None, None)


def test_a_look_at_a_run_that_has_ended(tmp_path: Path) -> None:
    a_run(tmp_path)
    assert take_sample(tmp_path).uses == {}


def test_a_counter_that_stands_between_batches_has_the_rate_of_its_changes() -> None:
    rates = ProgressRates()

    def at(t: float, progress: int) -> UsageSample:
        slot = msgspec.structs.replace(STATUS.slots[0], progress=progress)
        seen = UsageSample(t, msgspec.structs.replace(STATUS, slots=[slot]), {})
        rates.update(seen)
        return seen

    name = STATUS.slots[0].slot
    assert rates.unknown(at(0.0, 100)) and rates.rate(name, 0.0) is None
    assert rates.unknown(at(1.0, 100))
    assert not rates.unknown(at(4.0, 164))
    for t in range(5, 8):
        at(float(t), 164)
        assert rates.rate(name, float(t)) == 16.0
    at(8.0, 228)
    assert rates.rate(name, 8.0) == 16.0
    # It has stopped.
    assert rates.rate(name, 72.0) == 1.0


@pytest.mark.parametrize("width", [60, 80, 120])
def test_top_fits_the_terminal(width: int) -> None:
    out = io.StringIO()
    seen = UsageSample(1.0, STATUS, {})
    print_table(Console(file=out, width=width), table_of(STATUS, rows(seen, seen, ProgressRates()), width))
    said = out.getvalue().splitlines()
    assert all(len(line) <= width and line == line.rstrip() for line in said)
    assert "…" not in said[1] and {"slot", "state", "cpu", "progress", "now"} <= set(said[1].split())


def test_top_of_a_run_that_is_over_says_so(tmp_path: Path) -> None:
    a_run(tmp_path)
    with pytest.raises(NoRun, match="it is over: "):
        show_top(tmp_path, every_s=0.05, once=True, as_json=False)


def test_an_archive_is_not_overwritten_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    a_run(Path("two"))
    assert [main(["export", "two", *more]) for more in ([], [], ["--force"])] == [0, 2, 0]
