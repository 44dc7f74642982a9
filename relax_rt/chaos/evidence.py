"""Reads what a run has recorded, from its run directory."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.chaos.findings import Checkpoint, Evidence, Write
from relax_rt.events import read_events, segments
from relax_rt.metrics import read_metrics
from relax_rt.supervision import procfs
from relax_rt.supervision.control import find_run
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RUNNING, RunPaths, read_json
from relax_rt.transport.errors import RelaxError
from relax_rt.transport.journal import Journal
from relax_rt.transport.ledger import Entry

FIRST_SEGMENT = 1
STATE_FILE = "relax_rt.json"


def gather(run_dir: Path) -> Evidence:
    """Everything that is recorded of a run, alive or ended.

    Raises:
        NoRun: the directory holds no run.
    """
    run = find_run(run_dir)
    status = str(run.record.get("status", ""))
    ended = not run.alive and status not in RUNNING
    records: dict[str, list[dict[str, Any]]] = {"step": [], "made": [], "evaluation": []}
    for record in read_metrics(run_dir):
        if record.get("kind") in records:
            records[record["kind"]].append(record)
    closed = segments(run_dir / "events")
    return Evidence(
        events=list(read_events(run_dir)),
        complete=not closed or int(closed[0].stem.rpartition("-")[2]) == FIRST_SEGMENT,
        steps=records["step"],
        made=records["made"],
        evaluations=records["evaluation"],
        writes=queue_writes(run_dir / "queue" / "journal"),
        checkpoints=checkpoints(run_dir / "checkpoints"),
        ended=ended,
        status=status,
        leftovers=leftovers(run.paths) if ended else [],
        **job(read_json(run_dir / RESOLVED_CONFIG) or {}),
    )


def job(config: dict[str, Any]) -> dict[str, Any]:
    """Target, batch and staleness bound of a resolved config, as far as its job has them."""
    table = config.get("algorithm")
    if not isinstance(table, dict):
        return {}
    found: dict[str, Any] = {"target": table.get("steps")}
    bound = table.get("max_staleness")
    # JSON has no infinity: it was written as a string or null.
    found["max_staleness"] = float(bound) if bound is not None else None
    if table.get("group_size") and table.get("prompts_per_step"):
        found["batch"] = int(table["group_size"]) * int(table["prompts_per_step"])
    return found


def checkpoints(folder: Path) -> list[Checkpoint]:
    """The checkpoint folders whose state can be read."""
    found = []
    for path in sorted(folder.glob("step-*")):
        state = read_json(path / STATE_FILE)
        if state is not None:
            try:
                found.append(msgspec.convert({"folder": path.name, **state}, Checkpoint))
            except msgspec.ValidationError:
                continue
    return found


def queue_writes(folder: Path) -> list[Write]:
    """What the queue accepted, as far as its journal still has it. The journal is copied: reading it would mend it."""
    if not folder.is_dir():
        return []
    decode = msgspec.msgpack.Decoder(Entry).decode
    with tempfile.TemporaryDirectory(prefix="relax-chaos-journal-") as copy:
        try:
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            journal = Journal(Path(copy))
            records = journal.recover().records
            journal.close()
        except (OSError, RelaxError):
            # A living queue may just have replaced a segment.
            return []
        return [_write(decode(data)) for _, data in records]


def _write(entry: Entry) -> Write:
    tag = type(entry.event).__struct_config__.tag
    about = getattr(entry.event, "who", None)
    who = str(entry.who) if entry.who is not None else ""
    return Write(entry.n, who, str(tag), str(about) if about is not None else "")


def leftovers(paths: RunPaths) -> list[str]:
    """Processes, sockets and shared memory that still carry the run's id."""
    found = [str(path) for path in (paths.socket_dir, paths.shm_dir) if path.exists()]
    return found + [f"process {pid}" for pid in sorted(procfs.members_of_run(paths.run_id))]
