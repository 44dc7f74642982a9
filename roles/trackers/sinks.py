"""Sinks: a TensorBoard event file, an offline W&B run. Their packages are imported on demand."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_rt.roles.trackers.feed import Point
from relax_rt.transport.rpc.errors import RelaxError


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
