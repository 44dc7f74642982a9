"""Resumes from the newest good checkpoint, and waits for one that is being written."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from relax_rt.config.problems import BadInput
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.training.checkpoints.store import PARTIAL, CheckpointState, CheckpointStore, is_transient
from relax_rt.transport.rpc.errors import Corrupt, Refused, RelaxError, StaleEpoch

LOOK_S = 1.0
COMPARE_ALLOWANCE_S = 120.0
"""Time until the first bytes of a checkpoint that is verified are read."""
MIB = 1 << 20
LISTED_FAULTS = 4
"""Checkpoints whose faults are listed in full when none can be read."""

Resume = Callable[[Path, CheckpointState], Awaitable[None]]


class ResumedCheckpoint(NamedTuple):
    """The checkpoint that a training resumed from."""

    folder: Path
    state: CheckpointState


async def resume_newest(
    ctx: RoleContext, store: CheckpointStore, take: Resume, *, shown: str = "", anew: bool = False
) -> tuple[ResumedCheckpoint | None, list[str]]:
    """Resume from the newest checkpoint that can be read and whose digests match, which is verified first.

    Skipped ones are reported (event `checkpoint_damaged`) and, once an older one was resumed, quarantined (event
    `checkpoint_quarantined`).

    Args:
        take: resumes a checkpoint, or refuses it.
        shown: prefix of the names of checkpoints in events.
        anew: if none can be read, quarantine all and start anew.

    Returns:
        The resumed checkpoint, None if there is none yet; and the names of those skipped.

    Raises:
        BadInput: there are some, and none can be read; all are left as they are. To begin at step 0 would undo the run.
            Or one is of another model, another run or a newer version: it is good, and must not be skipped.
        RelaxError: the file system refused one: another try may read it, so nothing is skipped.
        StaleEpoch: a newer incarnation of the trainer has begun.
    """
    passed: list[tuple[Path, str]] = []
    for folder, state, why in await asyncio.to_thread(store.found):
        if state is not None:
            unsaid = store.check(folder, state)
            try:
                await asyncio.to_thread(verify_files, ctx, store, folder, state, shown)
                await take(folder, state)
            except StaleEpoch:
                raise
            except (SafetensorError, OSError, Refused, Corrupt) as error:
                why = str(error) or type(error).__name__
                if is_transient(error):
                    hint = "the trainer is started again and looks once more; is the file system there?"
                    raise RelaxError(f"checkpoint {folder}", why=why, hint=hint) from error
            else:
                if unsaid:
                    ctx.event("checkpoint_unverified", checkpoint=f"{shown}{folder.name}", why=unsaid)
                await _quarantine(ctx, store, passed, shown)
                return ResumedCheckpoint(folder, state), [one.name for one, _ in passed]
        passed.append((folder, why))
        ctx.event("checkpoint_damaged", checkpoint=f"{shown}{folder.name}", why=why)
        ctx.log.warning("skipping a checkpoint", checkpoint=f"{shown}{folder.name}", error=why)
    if anew:
        await _quarantine(ctx, store, passed, shown)
        return None, [one.name for one, _ in passed]
    before = await asyncio.to_thread(store.quarantined)
    if passed or before:
        raise _none_readable(store.folder, passed, before)
    return None, []


def verify_files(
    ctx: RoleContext, store: CheckpointStore, folder: Path, state: CheckpointState, shown: str = ""
) -> None:
    """See `CheckpointStore.compare`; blocks. The role's deadline, as if it is at its start, moves out by what reading
    takes, and once more by that for whoever takes the checkpoint: the same bytes are read again. A read that stands
    still moves nothing.

    Args:
        shown: see `resume_newest`.
    """
    if not state.files:
        return
    what = f"comparing {shown}{folder.name} with its digests"
    began = last = time.monotonic()
    lock = threading.Lock()

    def done(nbytes: int) -> None:
        nonlocal last
        with lock:
            since, last = last, time.monotonic()
            ctx.progress.extend(last - since, what)
        ctx.progress.advance(max(1, nbytes // MIB), what)

    ctx.progress.extend(COMPARE_ALLOWANCE_S, what)
    store.compare(folder, state, done)
    ctx.progress.extend(time.monotonic() - began, f"taking {shown}{folder.name}")


async def _quarantine(ctx: RoleContext, store: CheckpointStore, passed: list[tuple[Path, str]], shown: str) -> None:
    for folder, why in passed:
        aside = await asyncio.to_thread(store.quarantine, folder)
        ctx.event("checkpoint_quarantined", checkpoint=f"{shown}{folder.name}", folder=f"{shown}{aside.name}", why=why)


def _none_readable(folder: Path, passed: list[tuple[Path, str]], aside: list[Path]) -> BadInput:
    reasons = [f"{one.name}: {why}" for one, why in passed[:LISTED_FAULTS]]
    reasons += [f"and {len(passed) - LISTED_FAULTS} more"] * (len(passed) > LISTED_FAULTS)
    reasons += [f"quarantined before: {', '.join(one.name for one in aside)}"] * bool(aside)
    hint = (
        "put back a good copy, or the model that model.path had when these were written; to begin again at step 0, "
        f"move {folder} away or give the run another run.name"
    )
    return BadInput(f"none of the checkpoints in {folder} can be read", why="; ".join(reasons), hint=hint)


async def wait_for_save(
    saving: asyncio.Task[None],
    store: CheckpointStore,
    report: Callable[[int, str], None],
    beside: Path | None = None,
    look_s: float = LOOK_S,
) -> None:
    """Wait for a checkpoint that is being written. What it has grown by, and what of it came to disk, is its progress:
    a write that stands still shows none, a slow one does; what was read of it for digests counts too.

    Args:
        report: gets how many MiB were added, and a line on it.
        beside: folder of files that another role writes for it.
        look_s: time between looks.

    Raises:
        Exception: what the write raised.
    """
    seen = 0
    while not saving.done():
        await asyncio.wait([saving], timeout=look_s)
        written, forced = await asyncio.to_thread(_being_written, store.folder, beside), store.forced
        done = written + store.digested + forced
        if done > seen:
            line = f"writing a checkpoint: {written // MIB} MiB so far, {forced // MIB} of them on disk"
            report(max(1, (done - seen) // MIB), line)
            seen = done
    saving.result()


def _being_written(folder: Path, beside: Path | None = None) -> int:
    """Bytes of checkpoints that are not complete."""
    found = 0
    # What is renamed or removed meanwhile ends the look, and the next one sees the rest.
    with suppress(OSError):
        for path in folder.glob(f"{PARTIAL}[0-9]*/**/*"):
            found += path.stat().st_size
        for path in beside.glob("**/*") if beside is not None else ():
            found += path.stat().st_size
    return found
