"""A rollout that carries out orders of harm at the steps of a publication, and keeps a record of its own.

An order is a file ``<slot>.order`` in the folder that ENGINE_CHAOS names, with a step and a way; it is taken at the
next publication. The record, a file of JSON lines for each incarnation, is made from what passes between the role, its
engine and the queue: it knows nothing of what they say of themselves. What weights an engine has is read off the
parameters that its model computes with.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import engine_chaos_sabotage as sabotage
import torch

from relax_rt.roles.rollout.engines.base import Chunk, Engine, GroupRequest, KvPolicy, Swap
from relax_rt.roles.rollout.generation import FIRST_REQUEST
from relax_rt.roles.rollout.role import RolloutRole
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt
from relax_rt.transport.weights.manifest import Layout, bucket_digest, bucket_slices, total_digest
from relax_rt.transport.weights.source import WeightSource

STEPS = ("before_fetch", "in_fetch", "verified", "in_swap", "swapped")
WAYS = ("kill", "stop", "hang")
HANG_S = 60.0
TURN_S = 0.2
"""How long a token takes here at least: the tiny model's sequences would be over before a mark of theirs is due."""


class Record:
    """One line for each thing seen; written at once, so that a death loses none."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __call__(self, kind: str, **facts: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "at": time.time(), **facts}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class Orders:
    """The orders to one slot; one is taken at a time."""

    def __init__(self, folder: Path, slot: str, record: Record) -> None:
        self._path = folder / f"{slot.replace('/', '-')}.order"
        self._record = record
        self.step = self.way = ""

    def look(self, version: int) -> None:
        """A publication begins: take the order, if there is one. Gone with the file, it is not carried out twice."""
        self.step = self.way = ""
        try:
            self.step, self.way = self._path.read_text().split()
            self._path.unlink()
        except (OSError, ValueError):
            return
        self._record("order", step=self.step, way=self.way, version=version)

    def due(self, step: str) -> bool:
        return bool(self.step) and self.step == step

    async def at(self, step: str) -> None:
        """Carry it out if this is its step."""
        if self.due(step):
            if self.way == "hang":
                await asyncio.sleep(HANG_S)
            else:
                self.now()

    def now(self) -> None:
        """On whatever thread this is."""
        if self.way == "hang":
            threading.Event().wait(HANG_S)
            raise Corrupt("the copy", why="it hung")
        os.kill(os.getpid(), signal.SIGKILL if self.way == "kill" else signal.SIGSTOP)


class Halfway:
    """A source of which half has been copied when the order is carried out."""

    def __init__(self, source: WeightSource, orders: Orders) -> None:
        self._source, self._orders = source, orders
        self.record, self.manifest = source.record, source.manifest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def copy_into(self, into: memoryview) -> None:
        sabotage.copy_half(self._source, into)
        self._orders.now()
        raise Corrupt("the copy", why="it stood still in the middle")

    def mapped(self) -> AbstractContextManager[memoryview]:
        return self._source.mapped()


def digest_in_use(model: torch.nn.Module, layout: Layout) -> str:
    """The digest, as a manifest has it, of the parameters themselves: not of a buffer that they should point into."""
    data = bytearray(layout.nbytes)
    for entry, parameter in zip(layout.entries, model.parameters(), strict=True):
        raw = parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        data[entry.offset : entry.offset + entry.nbytes] = raw.tobytes()
    with memoryview(data) as view:
        return total_digest(bucket_digest(view[part]) for part in bucket_slices(layout.nbytes))


class StruckEngine:
    """An engine between whose lines the orders are carried out, and which is watched."""

    def __init__(self, engine: Engine, orders: Orders, record: Record, sabotaged: str = "") -> None:
        self._engine, self._orders, self._record, self._sabotaged = engine, orders, record, sabotaged
        self._whole: set[int] = set()
        self._swapping = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def start(self, sink: Callable[[list[Chunk]], None], on_failure: Callable[[BaseException], None]) -> None:
        def seen(chunks: list[Chunk]) -> None:
            for chunk in chunks:
                self._see(chunk)
            sink(chunks)

        await self._engine.start(seen, on_failure)

    def _see(self, chunk: Chunk) -> None:
        versions = sorted({span.version for span in chunk.versions})
        unknown = [v for v in versions if v not in self._whole and v != self._swapping]
        covered = sum(span.end - span.start for span in chunk.versions)
        if unknown or covered != len(chunk.tokens):
            self._record("wrong_version", request=chunk.request, versions=versions, whole=sorted(self._whole)[-3:])
        if chunk.request < FIRST_REQUEST:
            self._record("sampled", request=chunk.request, place=chunk.member, upto=chunk.start + len(chunk.tokens))

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            if request.id >= FIRST_REQUEST:
                partial = request.partial(0)
                had = len(partial.tokens) if partial else 0
                self._record("begun", seed=request.seeds[0], had=had, version=self._engine.load().version)
        self._engine.submit(requests)

    async def prepare(self, source: WeightSource) -> None:
        # Not the first: an incarnation is to serve before it is struck.
        if self._whole:
            self._orders.look(source.record.version)
        await self._orders.at("before_fetch")
        source = sabotage.tamper(self._sabotaged, source)
        try:
            await self._engine.prepare(Halfway(source, self._orders) if self._orders.due("in_fetch") else source)
        finally:
            # However a fetch ends, the weights in use are those of before.
            if self._whole:
                self._holds("fetch")
        await self._orders.at("verified")

    async def commit(self, record: VersionRecord, kv: KvPolicy) -> Swap:
        self._swapping = record.version
        if self._orders.due("in_swap"):
            asyncio.get_running_loop().call_soon(self._orders.now)
        swap = await self._engine.commit(record, kv)
        self._whole.add(record.version)
        self._swapping = 0
        self._holds("swap")
        await self._orders.at("swapped")
        return swap

    def _holds(self, after: str) -> None:
        """Record what the model computes with; only a swap changes it, so it may be read beside the engine's thread."""
        engine: Any = self._engine
        decoder = engine._decoder  # beside its interface: it would answer with what it believes to hold
        digest = digest_in_use(decoder._model, decoder.weights.layout)
        self._record("holds", version=self._engine.load().version, digest=digest, after=after)


def slow(decoder: Any) -> None:
    """Have it take TURN_S for each token, on its own thread."""
    turn = decoder.turn

    def later() -> list[Chunk]:
        time.sleep(TURN_S)
        return list(turn())

    decoder.turn = later


class StruckRollout(RolloutRole):
    """See the module."""

    def _load(self) -> None:
        super()._load()
        folder, who = Path(os.environ["ENGINE_CHAOS"]), self.ctx.who
        self.record = Record(folder / f"{who.slot.replace('/', '-')}-{who.epoch}.jsonl")
        sabotaged = os.environ.get("ENGINE_CHAOS_SABOTAGE", "")
        sabotage.apply(sabotaged)
        self.sabotaged = sabotaged
        slow(self.engine._decoder)  # type: ignore[attr-defined]
        self.engine = StruckEngine(self.engine, Orders(folder, who.slot, self.record), self.record, sabotaged)

    def _request(self, number: int, ticket: Any, *more: Any) -> GroupRequest:
        request = super()._request(number, ticket, *more)
        partials = [list(one.tokens) if one else [] for one in request.partials] or [[] for _ in request.seeds]
        self.record(
            "taken", request=number, group=ticket.group, members=list(ticket.wanted()), issue=ticket.issue, had=partials
        )
        return request

    async def _keep(self, due: Any) -> None:
        """The queue has answered when this returns: from here on it owes these tokens to whoever goes on.

        Who dies before the answer has noted what it asked for: the queue may have it or not.
        """
        for one in due:
            self._note("marking", one.mark)
        if self.sabotaged == "marks":
            return
        await super()._keep(due)
        for one in due:
            if one.job.marked[one.place] == one.mark.start + len(one.mark.tokens) // 4:
                self._note("marked", one.mark)

    def _note(self, kind: str, mark: Any) -> None:
        tokens = memoryview(mark.tokens).cast("i").tolist()
        self.record(kind, group=mark.key.group, member=mark.key.member, start=mark.start, tokens=tokens)
