"""Checkpoint folders: complete or absent. The atomic rename is the commit point of everything a checkpoint covers."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import xxhash
from msgspec.structs import replace

from relax_rt.config.problems import BadInput
from relax_rt.roles.training.checkpoints.digests import FileDigest, ModelIdentity, collect_digests, verify_digests
from relax_rt.transport.rpc.errors import Corrupt, Refused, RelaxError, StaleEpoch

FORMAT = 2
"""Format number of checkpoint folders; those of another one are refused. 1: relax-rt 0.1."""
STATE_FILE = "relax_rt.json"
SAMPLING_FILE = "sampling.json"
"""Outcomes of the prompts so far, if filters or a prompt sampler decide by them."""
PREFIX = "step-"
PARTIAL = ".partial-"
DAMAGED = "damaged-"
"""Prefix of a quarantined checkpoint: it was skipped, counts as none, and is kept for inspection."""
KEEP_DAMAGED = 2
REPLACED = "-replaced"
"""Suffix of a checkpoint while the same step, done again, takes its place."""
FORCE_BYTES = 64 << 20
"""Bytes of a file that are forced to disk at a time, so that progress can be reported."""
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
"""Patterns of the tokenizer files of a model folder; a checkpoint has copies."""


class CheckpointState(msgspec.Struct, frozen=True):
    """The state file of a checkpoint: all but model and optimizer.

    Attributes:
        step: optimizer steps done. version: the policy version of its weights; digest: that version's digest.
        epoch: incarnation of the trainer that wrote it.
        ledger_step: samples trained up to this step are covered, by the queue's count.
        elapsed_s: wall-clock time that training had taken.
        objective: what the objective carries from step to step (`Objective.state`).
        format: see FORMAT. model: identity of the initial model; None: not recorded.
        files: digests of the other files, by path within the folder; empty: they are not verified.
        own: digest of the other fields, see `_own_digest`; empty: it is not verified.
    """

    step: int
    version: int
    digest: str
    epoch: int
    ledger_step: int
    elapsed_s: float = 0.0
    objective: dict[str, float] = {}
    format: int = 0
    model: ModelIdentity | None = None
    files: dict[str, FileDigest] = {}
    own: str = ""


class _FormatHeader(msgspec.Struct):
    """The fields that are read before the format is known."""

    format: int = 0
    own: str | None = None


class FoundCheckpoint(NamedTuple):
    """A checkpoint folder and its state; None: `why` it cannot be read."""

    folder: Path
    state: CheckpointState | None
    why: str


def is_transient(error: BaseException) -> bool:
    """Whether the file system failed, and not the checkpoint: another try may read it, so it must not be
    quarantined."""
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError)


class CheckpointStore:
    """The checkpoints of a run, in one folder.

    Args:
        model: identity of the initial model; None: checkpoints neither record nor check it.

    Attributes:
        published: digests of the run's policy versions; a checkpoint of another version is of another run. None: not
            checked.
        digested, forced: bytes of the checkpoint being written that were digested, and that were forced to disk.

    Raises:
        StaleEpoch: a newer incarnation of the trainer writes here.
    """

    def __init__(self, folder: Path, epoch: int, keep: int, model: ModelIdentity | None = None) -> None:
        self.folder, self.epoch, self.keep, self.model = folder, epoch, keep, model
        self.published: Mapping[int, str] | None = None
        self.digested = self.forced = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._fence()
        for partial in folder.glob(f"{PARTIAL}*"):
            shutil.rmtree(partial)
        for replaced in folder.glob(f"{PREFIX}*{REPLACED}"):
            # Whoever replaced it died: the new one is whole if it is there at all.
            target = replaced.with_name(replaced.name.removesuffix(REPLACED))
            if target.exists():
                self._remove(replaced)
            else:
                replaced.rename(target)

    def found(self) -> list[FoundCheckpoint]:
        """All checkpoint folders, highest step first; quarantined ones are not among them.

        Raises:
            OSError: the file system refused one, see `is_transient`.
        """
        return find_checkpoints(self.folder)

    def complete(self) -> list[tuple[Path, CheckpointState]]:
        """The checkpoints whose state can be read, highest step first."""
        return [(one.folder, one.state) for one in self.found() if one.state is not None]

    def quarantined(self) -> list[Path]:
        """Quarantined checkpoints, lowest step first."""
        return sorted(self.folder.glob(f"{DAMAGED}*"))

    def quarantine(self, folder: Path) -> Path:
        """Rename a checkpoint that was skipped, so that it neither counts as the newest nor takes the place of a
        good one; of those quarantined the last `KEEP_DAMAGED` stay. Returns its new place.

        Raises:
            StaleEpoch: a newer incarnation of the trainer writes here.
        """
        self._fence()
        target = folder.with_name(DAMAGED + folder.name)
        if target.exists():
            self._remove(target)
        folder.rename(target)
        _sync(self.folder)
        others = sorted((one for one in self.quarantined() if one != target), key=lambda one: one.stat().st_mtime)
        for old in others[: max(0, len(others) + 1 - KEEP_DAMAGED)]:
            self._remove(old)
        return target

    def newest(self) -> tuple[Path, CheckpointState] | None:
        """The complete checkpoint of the highest step, if there is one."""
        return next(iter(self.complete()), None)

    def check(self, folder: Path, state: CheckpointState) -> str:
        """Check a checkpoint against the model that the training begins with, and against the run; returns what it does
        not record.

        Raises:
            BadInput: it is of another model, or of another run.
        """
        other = state.model.other(self.model) if state.model is not None and self.model is not None else []
        if other:
            raise BadInput(
                f"checkpoint {folder}",
                why=f"it is of another model: model.path has another {' and another '.join(other)} than it began with",
                hint="put back the model that model.path had, or give this training a run of its own (run.name); if it "
                f'is the same model in other files, take "model" and "own" out of the checkpoint\'s {STATE_FILE}',
            )
        self._of_this_run(folder, state)
        unsaid = ["names no model"] * (state.model is None and self.model is not None)
        unsaid += ["has no digests of its files"] * (not state.files)
        if not unsaid:
            return ""
        return f"its {STATE_FILE} {' and '.join(unsaid)}: it is taken unverified"

    def _of_this_run(self, folder: Path, state: CheckpointState) -> None:
        if self.published is None or not state.digest:
            return
        if not self.published:
            raise BadInput(
                f"checkpoint {folder}",
                why="the run's registry knows of no published policy version: it cannot be seen whether "
                f"{state.version} of digest {state.digest} is one of this run",
                hint="put the registry's files (registry.sqlite*) back into the run's folder; if they are lost, or the "
                "checkpoints are another run's, give a run of another run.name that folder as model.path",
            )
        digest = self.published.get(state.version)
        if digest == state.digest:
            return
        here = f"has the digest {digest} in this run" if digest is not None else "was never published by this run"
        raise BadInput(
            f"checkpoint {folder}",
            why=f"it is of another run: its policy version {state.version} of digest {state.digest} {here}",
            hint=f"move it out of {folder.parent}, and `relax-rt up` resumes from the one before; to begin with its "
            "weights, give a run of another run.name that folder as model.path",
        )

    def compare(self, folder: Path, state: CheckpointState, done: Callable[[int], object] = lambda _: None) -> None:
        """Check a checkpoint's files against its digests, as far as it has any. Blocks, and reads all of them.

        Args:
            done: called with the number of bytes as they are read; called by several threads.

        Raises:
            Corrupt: one is missing, or has other bytes. OSError: the file system refused one, see `is_transient`.
        """
        verify_digests(folder, state.files, done)

    def save(self, state: CheckpointState, write: Callable[[Path], None]) -> Path:
        """Have `write` fill a new folder, force it to disk and rename it into place; then remove the oldest ones. A
        checkpoint of the same step stays until the new one is in its place.

        Raises:
            StaleEpoch: a newer incarnation of the trainer writes here; nothing was renamed.
        """
        self._fence()
        self.digested = self.forced = 0
        state = replace(state, format=FORMAT, model=self.model)
        partial = self.folder / f"{PARTIAL}{state.step:06d}-{self.epoch}"
        partial.mkdir()
        try:
            write(partial)
            state = replace(state, files=collect_digests(partial, self._count_digested))
            state = replace(state, own=_own_digest(msgspec.json.encode(state)))
            (partial / STATE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(state)))
            for path in partial.rglob("*"):
                _sync(path, self._count)
            _sync(partial)
        except FileNotFoundError:
            # A newer incarnation clears away what older ones were writing: say so, if that is what happened.
            self._fence()
            raise
        target = self.folder / f"{PREFIX}{state.step:06d}"
        self._fence()
        replaced = target.with_name(target.name + REPLACED)
        if target.exists():
            # The same step again, by an incarnation that resumed before it.
            target.rename(replaced)
        partial.rename(target)
        _sync(self.folder)
        self.digested = self.forced = 0
        if replaced.exists():
            self._remove(replaced)
        for old, _ in self.complete()[self.keep :]:
            self._remove(old)
        return target

    def _count(self, nbytes: int) -> None:
        self.forced += nbytes

    def _count_digested(self, nbytes: int) -> None:
        self.digested += nbytes

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
        BadInput: it is of another format.
    """
    path = folder / STATE_FILE
    try:
        raw = path.read_bytes()
        header = msgspec.json.decode(raw, type=_FormatHeader)
        if header.own is not None and header.own != (digest := _own_digest(raw)):
            why = f"{STATE_FILE} is not what was written: its xxh3-128 is {digest}, it was {header.own}"
            raise Corrupt(f"checkpoint {folder}", why=why, hint='if it was changed by hand, take "own" out of it')
        if header.format != FORMAT:
            writer = "a newer version" if header.format > FORMAT else "relax-rt 0.1"
            raise BadInput(
                f"checkpoint {folder}",
                why=f"it is of format {header.format}, which {writer} wrote, and this version reads format {FORMAT}",
                hint="continue with the version that wrote it, or begin a run of another run.name with this folder as "
                "model.path",
            )
        return msgspec.json.decode(raw, type=CheckpointState)
    except FileNotFoundError:
        raise Refused(f"checkpoint {folder}", why=f"it has no {STATE_FILE}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"checkpoint {folder}", why=str(error), hint="remove it: an older one will be used") from error


def find_checkpoints(folder: Path) -> list[FoundCheckpoint]:
    """All checkpoint folders in a folder, highest step first; quarantined ones are not among them.

    Nothing is changed. A checkpoint whose replacement never came is among them, because the next trainer renames it
    back.

    Raises:
        BadInput: one is of another format. OSError: the file system refused one, see `is_transient`.
    """
    found = []
    for one in folder.glob(f"{PREFIX}*"):
        if one.name.endswith(REPLACED) and one.with_name(one.name.removesuffix(REPLACED)).exists():
            continue
        try:
            found.append(FoundCheckpoint(one, read_state(one), ""))
        except (Refused, Corrupt, OSError) as error:
            if is_transient(error):
                raise
            found.append(FoundCheckpoint(one, None, error.why if isinstance(error, RelaxError) else str(error)))
    return sorted(found, key=lambda one: one.state.step if one.state else _step_of(one.folder), reverse=True)


def newest_step(folder: Path) -> int:
    """Step of the newest checkpoint in a folder whose state can be read; 0: there is none.

    Raises:
        RelaxError: one is of a format that only newer versions know, or the file system refused one.
    """
    try:
        return next((one.state.step for one in find_checkpoints(folder) if one.state is not None), 0)
    except OSError as error:
        raise RelaxError(f"the checkpoints in {folder}", why=str(error)) from error


def _own_digest(raw: bytes) -> str:
    """xxh3-128, hex, of what a state file says beside `own`, however it is laid out; what only other versions know is
    part of it."""
    said = msgspec.json.decode(raw, type=dict[str, Any])
    said.pop("own", None)
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(said, order="deterministic"))


def _step_of(folder: Path) -> int:
    """By the folder's name; -1 if that says none."""
    number = folder.name.removeprefix(PREFIX).removesuffix(REPLACED)
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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{SAMPLING_FILE} of checkpoint {folder.name}", why=str(error)) from error


def _sync(path: Path, done: Callable[[int], None] = lambda _: None) -> None:
    """Force a file or folder to disk.

    Args:
        done: called with the number of bytes as they reach the disk.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        found = os.fstat(descriptor)
        size = found.st_size if stat.S_ISREG(found.st_mode) else 0
        at = 0
        while at < size and _sync_range(descriptor, at, FORCE_BYTES):
            done(min(FORCE_BYTES, size - at))
            at += FORCE_BYTES
        os.fsync(descriptor)
        done(max(0, size - at))
    finally:
        os.close(descriptor)


_LIBC = ctypes.CDLL(None)
_WAIT_WRITE_WAIT = 7


def _sync_range(descriptor: int, at: int, nbytes: int) -> bool:
    """Have the kernel write a part of a file, and wait for it. False where it cannot: fsync does all of it then."""
    call = getattr(_LIBC, "sync_file_range", None)
    return call is not None and call(descriptor, ctypes.c_int64(at), ctypes.c_int64(nbytes), _WAIT_WRITE_WAIT) == 0
