"""Checkpoint folders: complete or absent. The atomic rename is the commit point of everything a checkpoint covers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from relax_rt.transport.errors import Corrupt, Refused, RelaxError, StaleEpoch

STATE_FILE = "relax_rt.json"
SAMPLING_FILE = "sampling.json"
"""What became of the prompts so far, where filters or a sampler decide by it."""
PREFIX = "step-"
PARTIAL = ".partial-"
DAMAGED = "damaged-"
"""Before the name of a checkpoint that was passed over: it counts as none, and is kept for whoever looks into it."""
KEEP_DAMAGED = 2
TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "processor_config.json",
    "preprocessor_config.json",
)
"""Of a model folder: a checkpoint has them as well."""


class CheckpointState(msgspec.Struct, frozen=True):
    """What a checkpoint says of itself, besides model and optimizer.

    Attributes:
        step: optimizer steps done. version: the policy version of its weights; digest: that version's digest.
        epoch: incarnation of the trainer that wrote it.
        ledger_step: the queue's mark: samples trained up to this step are covered.
        elapsed_s: wall-clock time that training had taken.
        objective: what the objective carries from step to step (`Objective.state`).
    """

    step: int
    version: int
    digest: str
    epoch: int
    ledger_step: int
    elapsed_s: float = 0.0
    objective: dict[str, float] = {}


class Found(NamedTuple):
    """A checkpoint folder, and what it says of itself; None: `why` that cannot be read."""

    folder: Path
    state: CheckpointState | None
    why: str


def passing(error: BaseException) -> bool:
    """Whether the file system failed, and not the checkpoint: another try may read it, and it must not be set aside."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError)


class CheckpointStore:
    """The checkpoints of a run, in one folder.

    Raises:
        StaleEpoch: a newer incarnation of the trainer writes here.
    """

    def __init__(self, folder: Path, epoch: int, keep: int) -> None:
        self.folder, self.epoch, self.keep = folder, epoch, keep
        folder.mkdir(parents=True, exist_ok=True)
        self._fence()
        for partial in folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(partial)

    def found(self) -> list[Found]:
        """All checkpoint folders, highest step first; those that were set aside are not among them.

        Raises:
            OSError: the file system refused one, see `passing`.
        """
        found = []
        for folder in self.folder.glob(f"{PREFIX}*"):
            try:
                found.append(Found(folder, read_state(folder), ""))
            except (Refused, Corrupt, OSError) as error:
                if passing(error):
                    raise
                found.append(Found(folder, None, error.why if isinstance(error, RelaxError) else str(error)))
        return sorted(found, key=lambda one: one.state.step if one.state else _step_of(one.folder), reverse=True)

    def complete(self) -> list[tuple[Path, CheckpointState]]:
        """The checkpoints whose state can be read, highest step first."""
        return [(one.folder, one.state) for one in self.found() if one.state is not None]

    def damaged(self) -> list[Path]:
        """What was set aside, lowest step first."""
        return sorted(self.folder.glob(f"{DAMAGED}*"))

    def set_aside(self, folder: Path) -> Path:
        """Rename a checkpoint that was passed over, so that it neither counts as the newest nor takes the place of a
        good one; of those set aside the last `KEEP_DAMAGED` stay. Answers with its new place.

        Raises:
            StaleEpoch: a newer incarnation of the trainer writes here.
        """
        self._fence()
        target = folder.with_name(DAMAGED + folder.name)
        if target.exists():
            self._remove(target)
        folder.rename(target)
        _sync(self.folder)
        others = sorted((one for one in self.damaged() if one != target), key=lambda one: one.stat().st_mtime)
        for old in others[: max(0, len(others) + 1 - KEEP_DAMAGED)]:
            self._remove(old)
        return target

    def newest(self) -> tuple[Path, CheckpointState] | None:
        """The complete checkpoint of the highest step, if there is one."""
        return next(iter(self.complete()), None)

    def save(self, state: CheckpointState, write: Callable[[Path], None]) -> Path:
        """Have `write` fill a new folder, force it to disk and rename it into place; then remove the oldest ones.

        Raises:
            StaleEpoch: a newer incarnation of the trainer writes here; nothing was renamed.
        """
        self._fence()
        partial = self.folder / f"{PARTIAL}{state.step:06d}-{self.epoch}"
        partial.mkdir()
        try:
            write(partial)
            (partial / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            for path in partial.rglob("*"):
                _sync(path)
            _sync(partial)
        except FileNotFoundError:
            # A newer incarnation clears away what older ones were writing: say so, if that is what happened.
            self._fence()
            raise
        target = self.folder / f"{PREFIX}{state.step:06d}"
        self._fence()
        if target.exists():
            # The same step again, by an incarnation that resumed before it.
            self._remove(target)
        partial.rename(target)
        _sync(self.folder)
        for old, _ in self.complete()[self.keep :]:
            self._remove(old)
        return target

    def _remove(self, folder: Path) -> None:
        """Renamed first, so that a half-deleted folder is never taken for a checkpoint."""
        aside = folder.with_name(f"{PARTIAL}old-{folder.name}-{self.epoch}")
        folder.rename(aside)
        shutil.rmtree(aside)

    def _fence(self) -> None:
        mark = self.folder / "epoch"
        newest = int(mark.read_text()) if mark.exists() else 0
        if newest > self.epoch:
            raise StaleEpoch(f"checkpoints in {self.folder}", why=f"epoch {newest} writes here, this is {self.epoch}")
        if newest < self.epoch:
            temporary = self.folder / f"epoch.{self.epoch}"
            temporary.write_text(str(self.epoch))
            temporary.rename(mark)


def read_state(folder: Path) -> CheckpointState:
    """What a checkpoint says of itself.

    Raises:
        Refused: it is not a checkpoint of a run. Corrupt: its state file cannot be read.
    """
    path = folder / STATE_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=CheckpointState)
    except FileNotFoundError:
        raise Refused(f"checkpoint {folder}", why=f"it has no {STATE_FILE}") from None
    except msgspec.DecodeError as error:
        raise Corrupt(f"checkpoint {folder}", why=str(error), hint="remove it: an older one will be used") from error


def _step_of(folder: Path) -> int:
    """By the folder's name; -1 if that says none."""
    number = folder.name.removeprefix(PREFIX)
    return int(number) if number.isdecimal() else -1


def write_sampling(folder: Path, state: Mapping[str, Any]) -> None:
    """Put what filters and samplers know into a checkpoint that is being made."""
    if state:
        (folder / SAMPLING_FILE).write_bytes(msgspec.json.encode(state))


def read_sampling(folder: Path) -> dict[str, Any]:
    """What `write_sampling` put there; empty if the run that made the checkpoint had neither filters nor sampler.

    Raises:
        Refused: it cannot be read.
    """
    try:
        return msgspec.json.decode((folder / SAMPLING_FILE).read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except msgspec.DecodeError as error:
        raise Refused(f"{SAMPLING_FILE} of checkpoint {folder.name}", why=str(error)) from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
