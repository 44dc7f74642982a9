"""Around the trainer's checkpoints: which one it goes on from, and how one that is being written gets on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError

from relax_rt.config.problems import BadInput
from relax_rt.role import RoleContext
from relax_rt.roles.trainers.checkpoint import PARTIAL, CheckpointState, CheckpointStore, passing
from relax_rt.transport.errors import Refused, RelaxError, StaleEpoch

LOOK_S = 1.0
MIB = 1 << 20
NAMED = 4
"""Checkpoints whose faults are told in full when none can be read."""

Take = Callable[[Path, CheckpointState], Awaitable[None]]


async def take_newest(ctx: RoleContext, store: CheckpointStore, take: Take) -> tuple[CheckpointState | None, list[str]]:
    """Go on from the newest checkpoint that can be read. Those passed over are said (event `checkpoint_damaged`) and,
    once an older one was taken, set aside (event `checkpoint_set_aside`).

    Args:
        take: goes on from a checkpoint.

    Returns:
        What the checkpoint says of itself, None if the run has none yet; and the names of those passed over.

    Raises:
        BadInput: there are some, and none can be read; all are left as they are. To begin at step 0 would undo the run.
        RelaxError: the file system refused one: another try may read it, so nothing is passed over.
        StaleEpoch: a newer incarnation of the trainer has begun.
    """
    passed: list[tuple[Path, str]] = []
    for folder, state, why in await asyncio.to_thread(store.found):
        if state is not None:
            try:
                await take(folder, state)
            except StaleEpoch:
                raise
            except (SafetensorError, OSError, Refused) as error:
                why = str(error) or type(error).__name__
                if passing(error):
                    hint = "the trainer is started again and looks once more; is the file system there?"
                    raise RelaxError(f"checkpoint {folder}", why=why, hint=hint) from error
            else:
                for damaged, reason in passed:
                    aside = await asyncio.to_thread(store.set_aside, damaged)
                    ctx.event("checkpoint_set_aside", checkpoint=damaged.name, folder=aside.name, why=reason)
                ctx.event("resumed", checkpoint=folder.name, step=state.step, version=state.version)
                return state, [one.name for one, _ in passed]
        passed.append((folder, why))
        ctx.event("checkpoint_damaged", checkpoint=folder.name, why=why)
        ctx.log.warning("passing over a damaged checkpoint", checkpoint=folder.name, error=why)
    before = await asyncio.to_thread(store.damaged)
    if passed or before:
        raise _none_readable(store.folder, passed, before)
    return None, []


def _none_readable(folder: Path, passed: list[tuple[Path, str]], aside: list[Path]) -> BadInput:
    reasons = [f"{one.name}: {why}" for one, why in passed[:NAMED]]
    reasons += [f"and {len(passed) - NAMED} more"] * (len(passed) > NAMED)
    reasons += [f"set aside before: {', '.join(one.name for one in aside)}"] * bool(aside)
    hint = (
        "put back a good copy, or the model that model.path had when these were written; to begin again at step 0, "
        f"move {folder} away or give the run another run.name"
    )
    return BadInput(f"none of the checkpoints in {folder} can be read", why="; ".join(reasons), hint=hint)


async def through(saving: asyncio.Task[None], store: CheckpointStore, tell: Callable[[int, str], None]) -> None:
    """Wait for a checkpoint that is being written. What it has grown by is its progress: a write that stands still
    shows none, a slow one does.

    Args:
        tell: gets how many MiB were added, and a line on it.

    Raises:
        Exception: what the write raised.
    """
    seen = 0
    while not saving.done():
        await asyncio.wait([saving], timeout=LOOK_S)
        size = await asyncio.to_thread(_being_written, store.folder)
        if size > seen:
            tell(max(1, (size - seen) // MIB), f"writing a checkpoint: {size // MIB} MiB so far")
            seen = size
    saving.result()


def _being_written(folder: Path) -> int:
    """Bytes of checkpoints that are not complete."""
    found = 0
    # What is renamed or removed meanwhile ends the look, and the next one sees the rest.
    with suppress(OSError):
        for path in folder.glob(f"{PARTIAL}[0-9]*/**/*"):
            found += path.stat().st_size
    return found
