"""The device of a role: its choice, its random generators, and copies from it to the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Literal

import torch

from relax_rt.roles.models.precision import cpu_dtype
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.interfaces.role import RoleContext
    from relax_rt.roles.models.settings import ShardedSettings

CPU = torch.device("cpu")
PINNED_BYTES = 16 << 20
"""Size of each of the two buffers through which values leave a GPU."""


def choose_device(wanted: Literal["auto", "cuda", "cpu"], gpus: float) -> torch.device:
    """Return the GPU of a slot, or the CPU. Call it in the role's own process: a zygote must not touch CUDA.

    Args:
        gpus: that the slot was given, the only ones that its process sees; a slot that was given none must not touch
            one.

    Raises:
        Refused: "cuda" is wanted, and torch sees no GPU.
    """
    if wanted == "cpu" or not gpus:
        return CPU
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        return torch.device("cuda", 0)
    if wanted == "cuda":
        built = torch.version.cuda is not None
        raise Refused(
            'device = "cuda"',
            why="torch sees no GPU" if built else f"torch {torch.__version__} is built without CUDA",
            hint="`relax-rt doctor` shows what it sees" if built else "install torch for your CUDA",
        )
    return CPU


def open_device(ctx: RoleContext, table: ShardedSettings) -> torch.device:
    """Choose a role's device and log it; see `choose_device`.

    Raises:
        Refused: see there.
    """
    device = choose_device(table.device, table.gpus)
    if table.gpus and device.type == "cpu":
        ctx.log.warning("computing on the CPU: torch sees no GPU", gpus=table.gpus)
    else:
        ctx.log.info("computing", device=str(device), dtype=table.dtype)
    warn_if_slow(ctx, device.type, table.dtype)
    return device


def warn_if_slow(ctx: RoleContext, device: str, dtype: str) -> None:
    """Say in the role's log that its node is slow with its dtype: it was chosen by another one, or by the user.

    Args:
        device: cuda or cpu.
    """
    if device != "cpu" or dtype != "bfloat16" or (fast := cpu_dtype()).dtype == "bfloat16":
        return
    ctx.log.warning(f"{fast.why}: float32 would be faster than bfloat16", setting="dtype")


def autocast_context(device: torch.device, wanted: bool) -> AbstractContextManager[object]:
    """bfloat16 autocast on this device, if it is wanted."""
    return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()


def empty_cache(device: torch.device) -> None:
    """Release torch's cached, unused GPU memory."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def generator_states(device: torch.device) -> dict[str, torch.Tensor]:
    """States of torch's random generators, uint8 on the CPU: the CPU's, and that of the GPU that is used."""
    states = {CPU.type: torch.get_rng_state()}
    if device.type == "cuda":
        states[device.type] = torch.cuda.get_rng_state(device)
    return states


def set_generator_states(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Go on from `generator_states`, as far as they are of this kind of device."""
    if (state := states.get(CPU.type)) is not None:
        torch.set_rng_state(state)
    if device.type == "cuda" and (state := states.get(device.type)) is not None:
        torch.cuda.set_rng_state(state, device)


def copy_to_host(values: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of contiguous values in this process's ordinary memory.

    From a GPU they come through two pinned buffers, one of which is filled while the other is emptied: pinned memory as
    large as a model is expensive, and a direct copy into ordinary memory runs at a fraction of the bus's speed.

    Args:
        out: of the same shape and dtype; None: memory of its own.
    """
    if out is None:
        out = torch.empty(values.shape, dtype=values.dtype)
    if values.device.type != "cuda":
        out.copy_(values.detach())
        return out
    source, target = (one.reshape(-1).view(torch.uint8) for one in (values.detach(), out))
    with _PinnedBuffers.turn:
        copy_through(source, target, _PinnedBuffers.buffers())
    return out


def copy_through(source: torch.Tensor, target: torch.Tensor, buffers: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Copy uint8 [n] from a GPU to uint8 [n] on the CPU: one buffer is filled while the other one is emptied."""
    arrived: tuple[torch.Tensor, torch.Tensor, torch.cuda.Event] | None = None
    for number, at in enumerate(range(0, len(source), len(buffers[0]))):
        part = source[at : at + len(buffers[0])]
        buffer = buffers[number % 2][: len(part)]
        buffer.copy_(part, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        if arrived is not None:
            arrived[2].synchronize()
            arrived[0].copy_(arrived[1])
        arrived = target[at : at + len(part)], buffer, copied
    if arrived is not None:
        arrived[2].synchronize()
        arrived[0].copy_(arrived[1])


class _PinnedBuffers:
    """The two pinned buffers of this process, used under the lock `turn`."""

    turn = threading.Lock()
    _made: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def buffers(cls) -> tuple[torch.Tensor, torch.Tensor]:
        if cls._made is None:
            one, two = (torch.empty(PINNED_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
            cls._made = one, two
        return cls._made


OUT_OF_MEMORY_TEXTS = ("can't allocate memory", "not enough memory", "bad_alloc", "out of memory")
"""Parts of the messages of out-of-memory errors of torch on a CPU, NCCL and cuBLAS."""


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in OUT_OF_MEMORY_TEXTS)


@contextmanager
def denormals_flushed() -> Iterator[None]:
    """Treat denormal numbers as zero in this thread: on CPUs they cost a hundred times a normal operation.

    The setting belongs to the thread: it is set where the work is done, and reset afterwards.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)
