"""What a cold start leaves in the run's folder (its own checkpoints), and how other roles wait for its weights.

Written by the trainer's cold start; read by the launcher, the reference and the rollouts.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.training.algorithms.settings import ColdStartTable
from relax_rt.roles.training.checkpoints.store import PREFIX, is_transient
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

FOLDER = "cold_start"
PROGRESS_FILE = "cold_start.json"
REFERENCE_FILE = "reference.safetensors"
KEEP = 2

Floats = NDArray[np.float32]


class ColdStartProgress(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a cold start, in each of its checkpoints.

    Attributes:
        step: optimizer steps done, of `total`. done: the phase is over, and RL begins with these weights.
        digest: of the data. tokens: learnt so far. skipped: skipped steps. elapsed_s: training took so long.
    """

    step: int
    total: int
    done: bool
    digest: str
    tokens: int = 0
    skipped: int = 0
    elapsed_s: float = 0.0


def cold_start_folder(run_dir: Path) -> Path:
    """Return the folder of the cold start's checkpoints."""
    return run_dir / FOLDER


def write_progress(folder: Path, mark: ColdStartProgress) -> None:
    """Write progress into a checkpoint that is being written."""
    (folder / PROGRESS_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(mark)))


def read_progress(folder: Path) -> ColdStartProgress | None:
    """Read a checkpoint's progress; None if it has none.

    Raises:
        OSError: the file system refused it, see `is_transient`.
    """
    try:
        return msgspec.json.decode((folder / PROGRESS_FILE).read_bytes(), type=ColdStartProgress)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        if is_transient(error):
            raise
        return None


def cold_start_weights(run_dir: Path) -> Path | None:
    """Return the weights after the cold start, as a Hugging Face folder; None before its end."""
    for folder in sorted(cold_start_folder(run_dir).glob(f"{PREFIX}*"), reverse=True):
        # What cannot be read now is tried again, by waiting roles and by a resuming trainer.
        with suppress(OSError):
            mark = read_progress(folder)
            if mark is not None and mark.done:
                return folder
    return None


def write_reference_logprobs(folder: Path, values: list[list[Floats]], digest: str) -> None:
    """Save the initial weights' log-probabilities of each sequence of each row, atomically."""
    flat = [one for row in values for one in row]
    joined: Floats = np.concatenate(flat).astype(np.float32)
    tensors: dict[str, np.ndarray] = {
        "lengths": np.array([len(one) for one in flat], np.int64),
        "members": np.array([len(row) for row in values], np.int64),
        "values": joined,
    }
    temporary = folder / f".{REFERENCE_FILE}.partial"
    save_file(tensors, temporary, metadata={"digest": digest, "check": _checksum(joined)})
    temporary.replace(folder / REFERENCE_FILE)


def read_reference_logprobs(folder: Path, digest: str) -> list[list[Floats]] | None:
    """Read what `write_reference_logprobs` saved, if it is of this data."""
    try:
        with safe_open(folder / REFERENCE_FILE, framework="np") as file:
            found = {name: file.get_tensor(name) for name in ("lengths", "members", "values")}
            metadata = file.metadata() or {}
    except (OSError, SafetensorError):
        return None
    if metadata.get("digest") != digest or metadata.get("check") != _checksum(found["values"]):
        return None
    flat = iter(np.split(found["values"], np.cumsum(found["lengths"])[:-1]))
    return [[next(flat) for _ in range(int(members))] for members in found["members"]]


def _checksum(values: Floats) -> str:
    return xxhash.xxh3_64_hexdigest(np.ascontiguousarray(values).tobytes())


WHY = "the trainer's cold start"
POLL_S = 0.5


async def report_cold_start_wait(ctx: RoleContext) -> None:
    """In a run whose cold start is under way, report that the role waits for it, and count the role as started.

    The cold start may take longer than a start may. Whoever waits for the weights themselves keeps waiting.
    """
    if not ctx.config.table(ColdStartTable).wanted:
        return
    with suppress(Unreachable, DeadlineExceeded):
        if await ctx.registry.versions():
            return
    ctx.progress.waiting(WHY)
    await ctx.ready()


async def wait_for_cold_start(ctx: RoleContext) -> Path | None:
    """Wait for the weights that RL begins with; None: the role was asked to stop before."""
    while (folder := cold_start_weights(ctx.run_dir)) is None:
        ctx.progress.waiting(WHY)
        if not ctx.stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await ctx.stopping.wait()
        if ctx.stopping.is_set():
            return None
    ctx.progress.waiting("")
    return folder
