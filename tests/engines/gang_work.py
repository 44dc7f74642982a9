"""What the ranks of any backend's gang do for a test. Each function runs on every rank at the same time."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.gang import Follower, Leader
from relax_rt.roles.training.backend.interface import StepResult
from relax_rt.roles.training.batch.rows import replica_share
from relax_rt.roles.training.step import StepBatch, accumulate, optimizer_updates
from relax_rt.transport.rpc.errors import Refused, RelaxError

STEP_S = 60.0
LATE_S = 0.7


class Here:
    """This rank; its groups are made anew for each division."""

    def __init__(self, rank: int, world: int, folder: Path) -> None:
        self.rank, self.world = rank, world
        self.store = dist.FileStore(str(folder / "store"), world)
        self.ranks: Any = None
        self.backend: Any
        self.gradients: Callable[[], dict[str, Any]]
        self.whole: Callable[[], dict[str, Any]]
        """Gradient sums of all ranks by Hugging Face name, each rank with some rows of each tensor, or none."""
        self._joined = 0

    def leave(self) -> None:
        """Leave the groups of the division before, with all that holds on to them."""
        if self.ranks is not None:
            self.ranks.close()
            self.ranks = None
            del self.backend
            gc.collect()

    def next_store(self) -> dist.Store:
        """Where the ranks meet for the next division."""
        self._joined += 1
        return dist.PrefixStore(f"{self._joined}/", self.store)


def mine(here: Here, samples: list[Sample]) -> tuple[list[int], list[Sample]]:
    """This replica's share of a batch."""
    if here.ranks is None:
        return list(range(len(samples))), samples
    whole = here.backend.keeps_groups_together(samples)
    found = replica_share(samples, here.ranks.replica, here.ranks.replicas, whole_groups=whole)
    return [index for index, _ in found], [sample for _, sample in found]


def logprobs(here: Here, samples: list[Sample]) -> dict[int, Any]:
    """By index in the batch, of this replica's share."""
    indices, part = mine(here, samples)
    return dict(zip(indices, here.backend.log_probabilities(part), strict=True))


def step(here: Here, batches: list[list[Sample]], count: float, number: int = 1) -> Any:
    """One optimizer step over batches that arrive one after the other."""
    for batch in batches:
        here.backend.accumulate(mine(here, batch)[1])
    return here.backend.apply(count, number)


def export(here: Here, dtype: str = "float32") -> tuple[Any, bytes] | None:
    """Layout and bytes of the whole model, from rank 0."""
    layout = here.backend.layout(dtype)
    into = bytearray(layout.nbytes) if here.rank == 0 else None
    here.backend.export(memoryview(into) if into is not None else None, dtype)
    return None if into is None else (layout, bytes(into))


def save(here: Here, folder: Path) -> None:
    here.backend.snapshot()
    here.backend.write(folder)


def write(here: Here, folder: Path) -> None:
    here.backend.write(folder)


def restore(here: Here, folder: Path) -> None:
    here.backend.restore(folder)


def streamed(here: Here, parts: list[list[Sample]]) -> dict[str, Any]:
    """This rank's gradient sums of a step whose groups come in parts, driven by rank 0 as the trainer role drives it;
    then forgotten."""
    if here.rank == 0:
        leader, batch = Leader(here.backend), StepBatch()
        for part in parts:
            batch.samples += part
            accumulate(batch, leader, here.backend.objective, 1)
        leader.close()
    else:
        Follower(here.backend).run()
    found = {name: value.numpy().copy() for name, value in here.gradients().items()}
    here.backend._accumulation.forget()
    return found


def updates(here: Here, batch: list[Sample], number: int = 1, parts: int = 2, version: int = 4) -> StepResult | None:
    """A step of several updates, driven by rank 0 as the trainer role drives it; its answer."""
    if here.rank != 0:
        Follower(here.backend).run()
        return None
    backend = Leader(here.backend) if here.ranks is not None else here.backend
    step = StepBatch(samples=batch)
    found = optimizer_updates(step, backend, here.backend.objective, updates=parts, version=version, number=number)
    if here.ranks is not None:
        backend.close()
    return found


def grads(here: Here, batches: list[list[Sample]]) -> dict[str, Any]:
    """This rank's gradient sums, by name; then forgotten."""
    for batch in batches:
        here.backend.accumulate(mine(here, batch)[1])
    found = {name: value.numpy().copy() for name, value in here.gradients().items()}
    here.backend._accumulation.forget()
    return found


def whole(here: Here, batches: list[list[Sample]]) -> dict[str, Any]:
    """The gradient sums of all ranks, as `Here.whole` has them; then forgotten."""
    for batch in batches:
        here.backend.accumulate(mine(here, batch)[1])
    found = {name: value.numpy().copy() for name, value in here.whole().items()}
    here.backend._accumulation.forget()
    return found


def stepped(here: Here, parts: list[list[Sample]], version: int) -> dict[str, Any]:
    """`whole` of a step whose samples come in parts and without advantages, driven by rank 0 as the trainer role
    drives it; and on rank 0 what they are to be divided by."""
    batch = StepBatch()
    if here.rank == 0:
        leader = Leader(here.backend)
        for part in parts:
            batch.samples += part
            accumulate(batch, leader, here.backend.objective, version)
        leader.close()
    else:
        Follower(here.backend).run()
    return {"gradients": whole(here, []), "count": batch.count}


def use(here: Here, algorithm: dict[str, Any]) -> None:
    """Go on with another objective."""
    table = AlgorithmTable(**algorithm)
    here.backend.use(Objective.of(table), table)


def orders(here: Here, batch: list[Sample], count: float, folder: Path, damaged: Path) -> dict[str, Any]:
    """A gang driven by its rank 0, as the trainer role drives it; the others follow."""
    done: list[str] = []
    if here.rank != 0:
        Follower(here.backend, done.append).run()
        return {"orders": [name for name in done if name]}
    leader = Leader(here.backend)
    found: dict[str, Any] = {"logprobs": leader.log_probabilities(batch)}
    into = bytearray(leader.layout("float32").nbytes)
    # A publication from a thread of its own, while the next step's gradients are under way.
    copied = threading.Event()

    def publish() -> None:
        leader.export(memoryview(into), "float32")
        copied.set()

    thread = threading.Thread(target=publish)
    leader.accumulate(batch[:3])
    thread.start()
    leader.accumulate(batch[3:])
    found["result"] = leader.apply(count, 1, before_update=copied.wait)
    thread.join()
    found["exported"] = bytes(into)
    leader.snapshot()
    leader.write(folder)
    try:
        leader.restore(damaged)
    except Refused as error:
        found["refused"] = str(error)
    leader.restore(folder)
    leader.export(memoryview(into), "float32")
    found["restored"] = bytes(into)
    leader.close()
    return found


def hold_back(here: Here) -> None:
    """Until this rank has taken its next step, no part of a publication leaves it or arrives at it; and ranks that copy
    their part aside are so late that the step's passes are done before."""
    stepped = threading.Event()
    channel, apply = here.ranks.publication, here.backend.apply
    send, receive, memory = channel.send, channel.receive, channel.memory

    def late_memory(nbytes: int) -> Any:
        if not stepped.is_set():
            time.sleep(LATE_S)
        return memory(nbytes)

    def applied(*arguments: Any) -> Any:
        result = apply(*arguments)
        stepped.set()
        return result

    def held(call: Callable[..., None]) -> Callable[..., None]:
        def late(*arguments: Any) -> None:
            assert stepped.wait(STEP_S), "the next step waits for the gather"
            call(*arguments)

        return late

    here.backend.apply, channel.send, channel.receive = applied, held(send), held(receive)
    channel.memory = late_memory


def overlapped(here: Here, batch: list[Sample], count: float, folder: Path, dtype: str) -> dict[str, Any]:
    """A publication that is gathered only after the next step was taken; a checkpoint of before it meanwhile, and the
    end of the gang in the middle of the second one."""
    hold_back(here)
    if here.rank != 0:
        Follower(here.backend).run()
        return {"kept": here.ranks.publication._memory.numel()}
    leader = Leader(here.backend)
    first, second = (bytearray(leader.layout(dtype).nbytes) for _ in range(2))
    copied = threading.Event()
    thread = threading.Thread(target=lambda: leader.export(memoryview(first), dtype, copied.set))
    thread.start()
    assert copied.wait(STEP_S)
    leader.accumulate(batch[:3])
    leader.snapshot()
    leader.write(folder)
    leader.accumulate(batch[3:])
    found: dict[str, Any] = {"empty": thread.is_alive(), "result": leader.apply(count, 1, copied.wait)}
    thread.join(STEP_S)
    found["first"] = bytes(first)
    begun = threading.Event()
    again = threading.Thread(target=lambda: leader.export(memoryview(second), dtype, begun.set))
    again.start()
    assert begun.wait(STEP_S)
    leader.close()
    found["second"] = bytes(second)
    return found


def struck(here: Here, how: int | None, after: int) -> dict[str, Any]:
    """A publication in whose middle the last rank is struck: by a signal, or it cannot copy its weights."""
    channel, last = here.ranks.publication, here.rank == here.world - 1
    send, left = channel.send, [after]

    def deadly(*arguments: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            assert how is not None
            os.kill(os.getpid(), how)
        send(*arguments)

    def too_large(_: int) -> Any:
        raise MemoryError("no room for a copy")

    if last and how is not None:
        channel.send = deadly
    elif last:
        channel.memory = too_large
    if here.rank != 0:
        Follower(here.backend).run()
        return {}
    leader, found = Leader(here.backend), {}
    copied = threading.Event()
    began = time.monotonic()
    try:
        leader.export(memoryview(bytearray(leader.layout("float32").nbytes)), "float32", copied.set)
    except RelaxError as error:
        found = {"why": str(error), "kind": type(error).__name__}
    return {**found, "seconds": time.monotonic() - began, "copied": copied.is_set()}
