"""Commands trace and export: the records of a run for other tools."""

from __future__ import annotations

import csv
import io
import os
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from relax_rt.cli.app import OK, Json, Run
from relax_rt.cli.display import say, show_json
from relax_rt.cli.ps import SlotFigures, describe_empty_steps, slot_figures
from relax_rt.cli.runs import find_run_dir
from relax_rt.cli.time_left import Estimate, estimate_of
from relax_rt.cli.why import Account, explain
from relax_rt.config.problems import BadInput
from relax_rt.interfaces.agent import RunStatus
from relax_rt.observe.events import CURRENT, read_events, segments
from relax_rt.observe.metrics import METRICS, read_metrics
from relax_rt.observe.trace import Trace
from relax_rt.supervision import control
from relax_rt.supervision.rundir import read_run
from relax_rt.transport.rpc.errors import RelaxError

RUN_METRICS = {
    "run_up": ("gauge", "1 while the run's agent lives."),
    "run_uptime_seconds": ("gauge", "Age of this start of the run."),
    "run_step": ("gauge", "Steps done."),
    "run_steps": ("gauge", "Steps of the whole run."),
    "run_step_seconds": ("gauge", "Estimated duration of a step."),
    "run_left_seconds": ("gauge", "Estimated time until the run has ended."),
    "run_total_seconds": ("gauge", "Estimated duration of this start of the run."),
}
SLOT_METRICS = {
    "slot_ready": ("gauge", "1 while the slot is ready."),
    "slot_restarts_total": ("counter", "Restarts since the run was started."),
    "slot_progress_total": ("counter", "Units of work since the slot's process was started."),
    "slot_epoch": ("gauge", "Epoch of the newest incarnation."),
    "slot_policy_version": ("gauge", "Policy version of the slot."),
    "slot_lag": ("gauge", "Publications that the slot is behind."),
    "slot_staleness": ("gauge", "Largest staleness among the samples of the last step."),
    "slot_depth": ("gauge", "Work that waits in the slot."),
}
"""Metrics of `export --prometheus` by name without the prefix `relax_`: type and help."""
COPIED_FILES = ("run.json", "config.json", "roles.toml", "summary.json")
LOG_BYTES = 1 << 20
MAX_KINDS = 64
MAX_COLUMNS = 256
CSV_BUFFER = 8 << 20
COPY_BYTES = 1 << 20


def trace(
    run: Run = None,
    *,
    out: Annotated[Path | None, Parameter(help="Where to write. Default: trace.json in the run directory.")] = None,
) -> int:
    """Write the event log as a trace."""
    run_dir = find_run_dir(run)
    path = out or run_dir / "trace.json"
    count = write_trace(run_dir, path)
    say(f"{path}: {count:,} records; open it in https://ui.perfetto.dev")
    return OK


def export(
    run: Run = None,
    *,
    out: Annotated[
        Path | None, Parameter(help="Where to write (.tar.gz). Default: <name>.tar.gz in this folder.")
    ] = None,
    most_mib: Annotated[int, Parameter(help="Newest MiB of the events, and of the metrics, to write.")] = 256,
    force: Annotated[bool, Parameter(help="Overwrite an existing file.")] = False,
    prometheus: Annotated[bool, Parameter(help="Print the current state in Prometheus text format instead.")] = False,
    json: Json = False,
) -> int:
    """Write the records of a run as one archive."""
    if most_mib < 1:
        raise BadInput(f"--most-mib {most_mib}", why="it must be at least 1")
    run_dir = find_run_dir(run)
    status = control.status(run_dir)
    if prometheus:
        say(prometheus_text(status, slot_figures(status), estimate_of(status)).rstrip("\n"))
        return OK
    path = out or Path(f"{status.name or 'run'}.tar.gz")
    if path.exists() and not force:
        raise BadInput(f"{path} exists", hint="give another --out, or --force to overwrite it")
    found = explain(read_events(run_dir), status, empty_steps=describe_empty_steps(run_dir))
    names = write_archive(run_dir, path, found, most_mib=most_mib)
    show_json({"out": str(path), "files": names}) if json else say(f"{path}: {', '.join(names)}")
    return OK


def write_archive(run_dir: Path, out: Path, account: Account, *, most_mib: int) -> list[str]:
    """Write ``out`` (.tar.gz): events, metrics (as they are, and a CSV a kind), failures.csv, config, ends of logs.

    Args:
        most_mib: of events and of metrics each, the newest so many MiB.

    Returns:
        The names in it.

    Raises:
        RelaxError: it cannot be written.
    """
    fresh = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        with tarfile.open(fresh, "w:gz") as tar:
            names = list(_fill(tar, run_dir, account, most_mib << 20))
        fresh.replace(out)
    except OSError as error:
        raise RelaxError(f"{out} cannot be written", why=error.strerror or str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)
    return names


def _fill(tar: tarfile.TarFile, run_dir: Path, account: Account, most: int) -> Iterator[str]:
    for name in COPIED_FILES:
        if (run_dir / name).is_file():
            yield _add(tar, name, [run_dir / name], most)
    events = run_dir / "events"
    yield _add(tar, "events.jsonl", [*segments(events), events / CURRENT], most)
    yield _add(tar, METRICS, [run_dir / METRICS], most)
    for kind, table in _tables(run_dir):
        yield _add_text(tar, f"metrics-{kind}.csv", table)
    yield _add_text(tar, "failures.csv", _failures(account))
    for log in sorted((run_dir / "logs").glob("*.log")):
        yield _add(tar, f"logs/{log.name}", [log], LOG_BYTES)


def _add(tar: tarfile.TarFile, name: str, paths: Iterable[Path], most: int) -> str:
    """Add the newest `most` bytes of consecutive files, from the start of a line on."""
    with tempfile.TemporaryFile() as whole:
        sizes = [(path, path.stat().st_size) for path in paths if path.exists()]
        skip = max(0, sum(size for _, size in sizes) - most)
        cut = skip > 0
        for path, size in sizes:
            if skip >= size:
                skip -= size
                continue
            with path.open("rb") as file:
                file.seek(skip)
                if cut:
                    file.readline()
                    cut = False
                # Not past the size seen above: the file may be growing.
                remaining = size - file.tell()
                while remaining > 0 and (chunk := file.read(min(remaining, COPY_BYTES))):
                    whole.write(chunk)
                    remaining -= len(chunk)
            skip = 0
        return _put(tar, name, whole)


def _put(tar: tarfile.TarFile, name: str, file: Any) -> str:
    info = tarfile.TarInfo(name)
    info.size = file.seek(0, os.SEEK_END)
    info.mtime = int(time.time())
    file.seek(0)
    tar.addfile(info, file)
    return name


def _add_text(tar: tarfile.TarFile, name: str, lines: Iterable[str]) -> str:
    with tempfile.SpooledTemporaryFile(CSV_BUFFER) as file:
        for line in lines:
            file.write(line.encode())
        return _put(tar, name, file)


def _tables(run_dir: Path) -> Iterator[tuple[str, Iterator[str]]]:
    """A CSV table for each kind of metrics record; its columns are the fields with one number or word."""
    columns: dict[str, dict[str, None]] = {}
    for record in read_metrics(run_dir):
        kind = str(record.get("kind", ""))
        if kind not in columns and (len(columns) >= MAX_KINDS or not kind.isidentifier()):
            continue
        known = columns.setdefault(kind, {})
        for key, value in record.items():
            if not isinstance(value, list | dict) and len(known) < MAX_COLUMNS:
                known[key] = None
    for kind, names in columns.items():
        header = [name for name in names if name != "kind"]
        yield kind, _csv(header, (record for record in read_metrics(run_dir, kind)))


def _failures(account: Account) -> Iterator[str]:
    header = ["t", "slot", "epoch", "kind", "cause", "fault", "with", "policy", "affected", "away_s", "first_work_s"]
    return _csv(
        header,
        (
            {
                "t": incident.at,
                "slot": incident.slots[0],
                "epoch": incident.diagnosis.epoch,
                "kind": incident.diagnosis.kind,
                "cause": incident.diagnosis.cause,
                "fault": incident.fault.name if incident.fault else "",
                "with": " ".join(incident.slots[1:]),
                "policy": "; ".join(incident.policy),
                "affected": "; ".join(incident.affected),
                "away_s": incident.away_s,
                "first_work_s": incident.first_work_s,
            }
            for incident in account.incidents
        ),
    )


def _csv(header: list[str], records: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(header)
    for record in records:
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
        values = [record.get(name) for name in header]
        writer.writerow(["" if isinstance(v, list | dict) or v is None else v for v in values])
    yield buffer.getvalue()


def prometheus_text(status: RunStatus, figures: Mapping[str, SlotFigures], estimate: Estimate | None = None) -> str:
    """The current state of the run in Prometheus text format, as for a node exporter's textfile collector."""
    run = {"run": status.name}
    values: dict[str, float | None] = {"run_up": float(not status.ended), "run_uptime_seconds": status.uptime_s}
    if estimate is not None:
        values |= {"run_step": float(estimate.step), "run_steps": float(estimate.steps)}
        values |= {"run_step_seconds": estimate.step_s, "run_left_seconds": estimate.left_s}
        values |= {"run_total_seconds": estimate.total_s(status.uptime_s)}
    samples = {name: [(run, value)] for name, value in values.items() if value is not None}
    for slot in status.slots:
        labels = {**run, "slot": slot.slot, "role": slot.kind, "node": slot.node}
        known = figures.get(slot.slot, SlotFigures())
        values = {
            "slot_ready": float(slot.state == "ready"),
            "slot_restarts_total": slot.restarts,
            "slot_progress_total": slot.progress,
            "slot_epoch": slot.epoch,
            "slot_policy_version": known.version,
            "slot_lag": known.lag,
            "slot_staleness": known.staleness,
            "slot_depth": known.depth,
        }
        for name, value in values.items():
            if value is not None:
                samples.setdefault(name, []).append((labels, float(value)))
    lines: list[str] = []
    # The format wants all samples of a name together.
    for name, members in samples.items():
        kind, text = {**RUN_METRICS, **SLOT_METRICS}[name]
        lines += [f"# HELP relax_{name} {text}", f"# TYPE relax_{name} {kind}"]
        lines += [f"relax_{name}{{{_labels(labels)}}} {value:g}" for labels, value in members]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    # JSON escapes what the format wants escaped: quotes, backslashes and newlines.
    return ",".join(f"{name}={msgspec.json.encode(value).decode()}" for name, value in labels.items())


def write_trace(run_dir: Path, path: Path) -> int:
    """Write the trace file, whole or not at all; returns the number of its records.

    Raises:
        RelaxError: there are no events, or the file cannot be written.
    """
    first = next((t for event in read_events(run_dir) if isinstance(t := event.get("t"), int | float)), None)
    if first is None:
        raise RelaxError(f"no event in {run_dir / 'events'}", hint="the run has not started yet")
    record = read_run(run_dir) or {}
    about = {"run": record.get("name", ""), "run_id": record.get("run_id", ""), "began": first}
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    encode = msgspec.json.Encoder(enc_hook=str).encode
    count = 0
    try:
        with fresh.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[')
            for made in Trace(float(first)).records(read_events(run_dir), read_metrics(run_dir)):
                file.write((b",\n" if count else b"\n") + encode(made))
                count += 1
            file.write(b"\n]}\n")
        fresh.replace(path)
    except OSError as error:
        raise RelaxError(f"{path} cannot be written", why=error.strerror or str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)
    return count
