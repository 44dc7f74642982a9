"""The independent records of a run that a verdict is based on, read from its directory."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.chaos.timeline import Event, describe_event
from relax_rt.observe.events import read_events, segments
from relax_rt.observe.metrics import read_metrics
from relax_rt.supervision.control import FoundRun, find_run
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RUNNING, RunPaths, members_of_run, read_json
from relax_rt.transport.base.journal import Journal
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.rpc.errors import RelaxError

MAX_SHOWN = 12


class JournaledWrite(msgspec.Struct, frozen=True):
    """A change that the queue accepted, from its journal.

    Attributes:
        n: position in the journal. who: ``slot#epoch`` of the caller, empty for the queue itself.
        what: the kind of change, as ``put``. about: the process that had ended, for a change that reports an end.
    """

    n: int
    who: str
    what: str
    about: str = ""


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint folder on disk."""

    folder: str
    step: int
    version: int
    digest: str
    epoch: int


class Evidence(msgspec.Struct, kw_only=True):
    """The records of a run.

    Attributes:
        events: the event log, in order. complete: none of its segments was removed.
        steps: the trainer's records, in order. produced: the rollouts' records of the samples they produced.
        evaluations: the evaluator's records.
        writes: the changes that the queue's journal still holds.
        checkpoints: the folders on disk.
        has_journal: the queue wrote a journal. journal_error: why it cannot be read.
        ended: the run has ended. status: of run.json.
        recovered: of a live run: every slot is ready or has ended; None: not checked.
        target: steps of the job; batch: samples of a step; max_staleness: its bound; None for a job without them.
        leftovers: what an ended run left behind.
    """

    events: list[Event]
    complete: bool = True
    steps: list[Event] = []
    produced: list[Event] = []
    evaluations: list[Event] = []
    writes: list[JournaledWrite] = []
    has_journal: bool = True
    journal_error: str = ""
    checkpoints: list[Checkpoint] = []
    ended: bool = False
    status: str = ""
    recovered: bool | None = None
    target: int | None = None
    batch: int | None = None
    max_staleness: float | None = None
    leftovers: list[str] = []

    def describe(self, numbers: Iterable[int]) -> list[str]:
        """Describe the events at these positions."""
        return [describe_event(n, self.events[n]) for n in numbers]

    @property
    def reached(self) -> bool:
        """The run ended with its target reached."""
        return self.ended and self.status == "finished"

    @property
    def trains(self) -> bool:
        """The job trains: steps and their samples must be on record."""
        return bool(self.target or self.batch)

    @property
    def last_step(self) -> int:
        """The highest recorded step."""
        return max((int(record["step"]) for record in self.steps), default=0)


class Violation(msgspec.Struct, frozen=True):
    """A broken guarantee.

    Attributes:
        check: name of the check. what: description.
        events: the events and records that prove it.
    """

    check: str
    what: str
    events: list[str] = []


class CheckResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one check.

    Attributes:
        judged: number of things that were judged; unit: their kind. not_judged: why there was nothing to judge.
        unconfirmed: faults whose effect was not observed; that breaks no guarantee.
    """

    check: str
    guarantee: str
    judged: int
    unit: str
    violations: list[Violation] = []
    not_judged: str = ""
    unconfirmed: list[str] = []


FIRST_SEGMENT = 1
STATE_FILE = "relax_rt.json"
SEGMENTS, SNAPSHOTS = "segment-*.log", "snapshot-*"
JOURNAL_TRIES, JOURNAL_PAUSE_S = 20, 0.1
END_RECORDED_WITHIN_S = 10.0
UNRECORDED_END = "ended without a record"


def read_evidence(run_dir: Path) -> Evidence:
    """Read the records of a run, alive or ended.

    Raises:
        NoRun: the directory holds no run.
    """
    run, ended, status = _final_status(run_dir)
    has_journal, writes, journal_error = read_queue_writes(run_dir / "queue", retry=not ended)
    records: dict[str, list[dict[str, Any]]] = {"step": [], "produced": [], "evaluation": []}
    for record in read_metrics(run_dir):
        if record.get("kind") in records:
            records[record["kind"]].append(record)
    closed = segments(run_dir / "events")
    return Evidence(
        events=list(read_events(run_dir)),
        complete=not closed or int(closed[0].stem.rpartition("-")[2]) == FIRST_SEGMENT,
        steps=records["step"],
        produced=records["produced"],
        evaluations=records["evaluation"],
        writes=writes,
        has_journal=has_journal,
        journal_error=journal_error,
        checkpoints=read_checkpoints(run_dir / "checkpoints"),
        ended=ended,
        status=status,
        leftovers=find_leftovers(run.paths) if ended else [],
        **job_settings(read_json(run_dir / RESOLVED_CONFIG) or {}),
    )


def _final_status(run_dir: Path) -> tuple[FoundRun, bool, str]:
    """The run, whether it has ended, and its status. Waits for the keeper of a dead agent to record the end."""
    end = time.monotonic() + END_RECORDED_WITHIN_S
    while True:
        run = find_run(run_dir)
        status = str(run.record.get("status", ""))
        if run.alive or status not in RUNNING:
            return run, not run.alive, status
        if time.monotonic() > end:
            return run, True, UNRECORDED_END
        time.sleep(JOURNAL_PAUSE_S)


def job_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Target, batch and staleness bound of a resolved config, where its job has them."""
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


def read_checkpoints(folder: Path) -> list[Checkpoint]:
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


def read_queue_writes(folder: Path, *, retry: bool) -> tuple[bool, list[JournaledWrite], str]:
    """Whether there is a journal, the changes it still holds, and why it cannot be read.

    Args:
        retry: the queue may be live and replace a segment meanwhile: read again after an error.
    """
    if not any(folder.glob(SEGMENTS)):
        return False, [], ""
    why = ""
    for _ in range(JOURNAL_TRIES if retry else 1):
        try:
            return True, _read_copy(folder), ""
        except (OSError, RelaxError, msgspec.MsgspecError) as error:
            why = str(error) or type(error).__name__
            time.sleep(JOURNAL_PAUSE_S if retry else 0.0)
    return True, [], why


def _read_copy(folder: Path) -> list[JournaledWrite]:
    """Read a copy of the journal, because opening a journal repairs it."""
    decode = msgspec.msgpack.Decoder(JournalEntry).decode
    with tempfile.TemporaryDirectory(prefix="relax-chaos-journal-") as copy:
        for pattern in (SNAPSHOTS, SEGMENTS):
            for path in sorted(folder.glob(pattern)):
                shutil.copy(path, copy)
        journal = Journal(Path(copy))
        try:
            records = journal.recover().records
        finally:
            journal.close()
        return [_write(decode(data)) for _, data in records]


def _write(entry: JournalEntry) -> JournaledWrite:
    tag = type(entry.event).__struct_config__.tag
    about = getattr(entry.event, "who", None)
    who = str(entry.who) if entry.who is not None else ""
    return JournaledWrite(entry.n, who, str(tag), str(about) if about is not None else "")


def find_leftovers(paths: RunPaths) -> list[str]:
    """Processes, sockets and shared memory that still carry the run's id."""
    found = [str(path) for path in (paths.socket_dir, paths.shm_dir) if path.exists()]
    return found + [f"process {pid}" for pid in sorted(members_of_run(paths.run_id))]
