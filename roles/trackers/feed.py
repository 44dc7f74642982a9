"""Converts metrics records to numbers, and moves them to TensorBoard or W&B.

A position file beside a sink's files lets a resumed run continue there. The packages of the sinks are imported on use.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from relax_rt.observe.metrics import METRICS, Tail
from relax_rt.transport.rpc.errors import RelaxError

MAX_NUMBERS = 256
"""Numbers of one record; a reward function may have many components."""
NAME_CHARACTERS = 200
NOT_METRICS = frozenset(
    {
        "t",
        "m",
        "by",
        "kind",
        "step",
        "slot",
        "epoch",
        "keys",
        "digests",
        "prompts",
        "versions",
        "samples",
        "set",
        "when",
    }
)
"""Identity and evidence, not measurements; `samples` is a list of names in some records."""
LISTS = frozenset({"staleness"})
"""Lists of numbers of which mean and maximum are written."""
POSITION_FILE = "relax-position.json"
READ_BYTES, LINE_BYTES = 1 << 20, 16 << 20
"""Bytes held in memory: of one poll, and of one record."""


class Point(msgspec.Struct, frozen=True):
    """Numbers of one record.

    Attributes:
        step: optimizer step that they belong to. t: wall-clock time, s since 1970.
        values: by name, `train/reward_mean`; all finite.
        redone: the trainer rolled back: earlier points of this step and later ones no longer count.
    """

    step: int
    t: float
    values: dict[str, float]
    redone: bool = False


class Scalars:
    """Turns metrics records into named numbers at a step.

    Args:
        step: the last step that was written before.
    """

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def convert(self, record: Mapping[str, Any]) -> Point | None:
        """Return the numbers of one record; None if it has none."""
        kind, own = str(record.get("kind", "")), record.get("step")
        prefix, redone = _prefix(kind, record), False
        if prefix is None:
            return None
        step = own if isinstance(own, int) and not isinstance(own, bool) else self.step
        if kind == "step":
            redone = step <= self.step
            self.step = step
        values = dict(_first(_numbers(prefix, record), MAX_NUMBERS))
        t = record.get("t")
        if not values:
            return None
        return Point(step, float(t) if isinstance(t, int | float) else 0.0, values, redone)


def _prefix(kind: str, record: Mapping[str, Any]) -> str | None:
    """Return the prefix of the record's numbers; None: it has none to show."""
    if kind in ("", "produced"):
        return None
    if kind == "step":
        return "train"
    if kind in ("evaluation", "evaluation_set"):
        return str(record.get("set") or "held_out")
    slot = record.get("slot")
    return f"{kind}/{str(slot).rpartition('/')[2]}" if slot else kind


def _first(pairs: Iterator[tuple[str, float]], most: int) -> Iterator[tuple[str, float]]:
    for _, pair in zip(range(most), pairs, strict=False):
        yield pair


def _numbers(prefix: str, record: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in record.items():
        name = f"{prefix}/{key}"[:NAME_CHARACTERS]
        if key in NOT_METRICS:
            continue
        if isinstance(value, Mapping):
            yield from _numbers(name, value)
        elif key in LISTS and isinstance(value, list):
            found = [float(one) for one in value if isinstance(one, int | float) and math.isfinite(one)]
            if found:
                yield f"{name}_mean", math.fsum(one / len(found) for one in found)
                yield f"{name}_max", max(found)
        elif isinstance(value, int | float) and math.isfinite(value):
            yield name, float(value)


class Sink(Protocol):
    """Writes points somewhere. An exception closes this sink alone."""

    name: str

    def write(self, points: Sequence[Point]) -> None:
        """Write these points; they are on disk, or in another process, when it returns."""

    def close(self) -> None:
        """Flush and close."""


class TensorBoardSink:
    """One event file, written with tensorboard's own records, without its background thread: a full disk is an error
    at once.

    Raises:
        RelaxError: tensorboard is not installed. OSError: the file cannot be made.
    """

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event, SessionLog
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError as error:
            raise RelaxError("tensorboard", why=str(error), hint="pip install relax-rt[tensorboard]") from error
        self._event, self._session, self._summary = Event, SessionLog, Summary
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9:010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._put(Event(wall_time=time.time(), file_version="brain.Event:2"))
        self._file.flush()

    def write(self, points: Sequence[Point]) -> None:
        """Write these points to the file or the run, and flush."""
        for point in points:
            if point.redone:
                # Readers then forget this step and later ones (purge of orphaned data).
                log = self._session(status=self._session.START)
                self._put(self._event(wall_time=point.t, step=point.step, session_log=log))
            values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in point.values.items()]
            self._put(self._event(wall_time=point.t, step=point.step, summary=self._summary(value=values)))
        self._file.flush()

    def _put(self, event: Any) -> None:
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        """Flush and close."""
        self._file.close()


class WandbSink:
    """An offline run: a folder in `folder` for `wandb sync`. Nothing is sent.

    Points of steps that were done again are added to the earlier ones: W&B cannot remove any.

    Args:
        folder: must be called wandb, as W&B names it. run_id: of the run; a resumed run keeps it.
        config: stored by W&B.

    Raises:
        RelaxError: wandb is not installed. Whatever wandb raises when it cannot start.
    """

    name = "wandb"

    def __init__(self, folder: Path, *, project: str, name: str, run_id: str, config: dict[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for key in ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
            # Everything that it writes lies in the run's folder.
            os.environ[key] = str(folder)
        os.environ |= {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
        try:
            import wandb
        except ImportError as error:
            raise RelaxError("wandb", why=str(error), hint="pip install relax-rt[wandb]") from error
        settings = wandb.Settings(console="off", disable_git=True, save_code=False)
        self._run: Any = wandb.init(
            mode="offline",
            dir=str(folder.parent),
            project=project,
            name=name,
            id=run_id,
            config=config,
            settings=settings,
        )
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Sequence[Point]) -> None:
        """Write these points to the file or the run, and flush."""
        for point in points:
            self._run.log({**point.values, "step": point.step})

    def close(self) -> None:
        """Flush and close."""
        self._run.finish()


class FeedPosition(msgspec.Struct, frozen=True):
    """Bytes of the metrics file that were written to the sink, and the last step among them."""

    bytes: int = 0
    step: int = 0


class Feed:
    """Moves what is new in the metrics file to a sink.

    Args:
        folder: of the sink's files. Without a position in it everything is written from the start.
    """

    def __init__(self, run_dir: Path, folder: Path, sink: Sink) -> None:
        self.sink, self._path = sink, folder / POSITION_FILE
        position = read_position(self._path)
        self._tail = Tail(run_dir / METRICS, start=position.bytes, read_bytes=READ_BYTES, line_bytes=LINE_BYTES)
        self._scalars = Scalars(position.step)
        self._written = position

    @property
    def skipped(self) -> int:
        """Records that were too long."""
        return self._tail.skipped

    def poll(self) -> int:
        """Write some of the new records; return the bytes handled, 0 if there are none.

        Raises:
            Exception: whatever the sink, or writing the position, raises.
        """
        points = [point for record in self._tail.poll() if (point := self._scalars.convert(record)) is not None]
        if points:
            self.sink.write(points)
        position = FeedPosition(self._tail.position, self._scalars.step)
        done = position.bytes - self._written.bytes
        if position != self._written:
            # A crash between the sink's write and this one writes the same points twice.
            fresh = self._path.with_name(f".{POSITION_FILE}")
            fresh.write_bytes(msgspec.json.encode(position))
            fresh.replace(self._path)
            self._written = position
        return abs(done)

    def close(self) -> None:
        """Release the files."""
        self._tail.close()
        self.sink.close()


def read_position(path: Path) -> FeedPosition:
    """Read the position; the start of the file if there is none or it cannot be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=FeedPosition)
    except (OSError, msgspec.DecodeError):
        return FeedPosition()
