"""The processes of queue_chaos.py, what is done to them, and what can be seen of them from outside."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import psutil
from queue_chaos_records import now, record_file
from queue_chaos_worker import FENCED, Orders

from relax_rt.transport.base.folder import RUN_ID, SHM_PREFIX, SHM_ROOT, find
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import Incarnation

BROKER, TRAINER = "broker/0", "trainer/0"
PRODUCERS = ("rollout/0", "rollout/1", "rollout/2")
CONSUMERS = ("reward/0", "reward/1")
WORKER = Path(__file__).with_name("queue_chaos_worker.py")
MARK = "QUEUE_CHAOS_RUN"
"""Environment of all processes of a run: whoever has it at the end was left over."""
TICK_S = 0.05
_LOOK_S = 0.5
WAITS = ("payloads fill the capacity", "staleness bound", "over-stale", "ready", "announced", "is not finished")
"""Reasons for waits that are counted apart, by words that are in them."""


class Process:
    """One process of a slot."""

    def __init__(self, slot: str, number: int, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.slot, self.number, self.popen, self.log = slot, number, popen, log
        self.stopped_until = 0.0

    @property
    def role(self) -> str:
        return self.slot.partition("/")[0]

    def signal(self, number: int) -> None:
        if self.popen.poll() is None:
            self.popen.send_signal(number)

    def last_lines(self) -> str:
        return " | ".join(self.log.read_text(errors="replace").splitlines()[-4:])


class Fleet:
    """The processes, and what was done to them."""

    def __init__(self, folder: Path, seed: int, sabotage: str) -> None:
        self.folder, self._seed, self._sabotage = folder, seed, sabotage
        self.mark = f"{os.getpid()}-{folder.name}"
        self.running: dict[str, Process] = {}
        self.overtaken: list[Process] = []
        self.started: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.killed_at: list[float] = []
        self.crashes: list[str] = []

    def start(self, slot: str) -> Process:
        self.started[slot] += 1
        number = self.started[slot]
        orders = Orders(str(self.folder), slot, number, self._seed, self._sabotage)
        role = slot.partition("/")[0]
        log = self.folder / "logs" / f"{slot.replace('/', '-')}-{number}.log"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", MARK: self.mark}
        command = [sys.executable, str(WORKER), role, msgspec.json.encode(orders).decode()]
        with log.open("wb") as file:
            popen = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        self.running[slot] = Process(slot, number, popen, log)
        return self.running[slot]

    def kill(self, slot: str) -> None:
        """SIGKILL, and another one in its place at once."""
        process = self.running[slot]
        if process.popen.poll() is not None:
            return
        process.popen.kill()
        process.popen.wait()
        self.faults[f"kill {process.role}"] += 1
        self.killed_at.append(now())
        self.start(slot)

    def stop(self, slot: str, for_s: float) -> None:
        """SIGSTOP: its lease ends meanwhile."""
        process = self.running[slot]
        process.signal(signal.SIGSTOP)
        process.stopped_until = now() + for_s
        self.faults[f"stop {process.role}"] += 1

    def overtake(self, slot: str, dice: random.Random) -> None:
        """A second process under the same name; the first one goes on a little after that has joined."""
        old = self.running[slot]
        if not self._has_joined(old):
            return
        old.signal(signal.SIGSTOP)
        old.stopped_until = now() + 1.0 + 2.0 * dice.random()
        self.overtaken.append(old)
        self.faults[f"overtake {old.role}"] += 1
        self.start(slot)

    def _has_joined(self, process: Process) -> bool:
        path = record_file(self.folder / "records", process.slot, process.number)
        return path.exists() and path.stat().st_size > 0

    def look(self) -> None:
        """Wake those whose stop is over, and note who ended by itself."""
        for process in [*self.running.values(), *self.overtaken]:
            if process.stopped_until and process.stopped_until <= now() and self._may_wake(process):
                process.stopped_until = 0.0
                process.signal(signal.SIGCONT)
        for process in [one for one in self.overtaken if one.popen.poll() is not None]:
            self.overtaken.remove(process)
            if process.popen.returncode != FENCED:
                self._crashed(process)
        for slot, process in list(self.running.items()):
            if process.popen.poll() is not None:
                self._crashed(process)
                self.start(slot)

    def _may_wake(self, process: Process) -> bool:
        """An overtaken process goes on when its successor has joined."""
        return process not in self.overtaken or self._has_joined(self.running[process.slot])

    def _crashed(self, process: Process) -> None:
        what = f"{process.slot} (number {process.number}) ended by itself with {process.popen.returncode}"
        self.crashes.append(f"{what}: {process.last_lines()}")

    async def end(self, slots: tuple[str, ...], patience_s: float) -> None:
        """Ask them to stop, and wait until they have."""
        for slot in slots:
            self.running[slot].signal(signal.SIGTERM)
            self.running[slot].signal(signal.SIGCONT)
        deadline = now() + patience_s
        for slot in slots:
            process = self.running.pop(slot)
            while process.popen.poll() is None and now() < deadline:  # noqa: ASYNC110 - another process ends
                await asyncio.sleep(TICK_S)
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()
                self.crashes.append(f"{slot} did not stop within {patience_s:.0f} s: {process.last_lines()}")
            elif process.popen.returncode:
                self._crashed(process)

    def kill_all(self) -> None:
        """However the run ends."""
        for process in [*self.running.values(), *self.overtaken]:
            process.popen.kill()
            process.popen.wait()

    def left_over(self) -> list[str]:
        """Processes of the run that still live, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.pid != os.getpid():
                    found.append(f"process {process.pid} is left over: {' '.join(process.cmdline())[:120]}")
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found


class Watcher:
    """Looks at the run from outside: journal, memory, and how long the broker is away."""

    def __init__(self, folder: Path, fleet: Fleet) -> None:
        self._folder, self._fleet = folder, fleet
        self.archive = folder / "archive"
        self.journal_bytes = 0
        self.shm_bytes = 0
        self.rss: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()
        self.outages: list[float] = []
        self.now = ""
        self._outage: asyncio.Task[None] | None = None
        self._client = rpc.RpcClient(self._address, rpc.make_hello(RUN_ID, Incarnation("watcher/0", 0)))
        self.api = self._client.bind(QueueApi, timeout_s=20.0)

    async def _address(self) -> str:
        return find(self._folder / "queue").addresses[0]

    async def close(self) -> None:
        """Ask nothing more."""
        if self._outage is not None:
            self._outage.cancel()
        await self._client.close()

    def broker_killed(self) -> None:
        """Time how long nobody is answered."""
        if self._outage is None or self._outage.done():
            self._outage = asyncio.create_task(self._time(now()))

    async def _time(self, since: float) -> None:
        while True:
            try:
                await self.api.stats()
            except RelaxError:
                continue
            self.outages.append(now() - since)
            return

    def link_journal(self) -> None:
        """Keep every segment, also those that a snapshot replaces."""
        for path in (self._folder / "queue" / "journal").glob("segment-*.log"):
            if not (self.archive / path.name).exists():
                try:
                    (self.archive / path.name).hardlink_to(path)
                except FileNotFoundError:
                    continue

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.journal_bytes = max(self.journal_bytes, _size(self._folder / "queue" / "journal"))
            self.shm_bytes = max(self.shm_bytes, _size(memory_of(self._folder)))
            for process in self._fleet.running.values():
                try:
                    rss = psutil.Process(process.popen.pid).memory_info().rss
                except psutil.NoSuchProcess:
                    continue
                self.rss[process.role] = max(self.rss[process.role], rss)
            try:
                stats = await self.api.stats()
            except RelaxError:
                continue
            self.now = f"step {stats.step}, version {stats.trainer_version}, {stats.payload_bytes >> 10} KiB"
            for reason in stats.waiting.values():
                kind = next((kind for kind in WAITS if kind in reason), "something else")
                self.waits[kind] += 1

    async def settled(self, patience_s: float) -> tuple[dict[str, int], list[str]]:
        """The account when everybody has gone, and what the broker still holds for them."""
        deadline = now() + patience_s
        while True:
            told: dict[str, Any] = await self.api.statistics()
            leases, memory = told["leases"], told["memory"]
            held = {name: leases[name] for name in ("held", "ended_but_pinned", "tickets") if leases[name]}
            if (not held and len(slabs_in(self._folder)) <= memory["slabs"]) or now() > deadline:
                break
            await asyncio.sleep(0.1)
        wrong = [f"after all have gone the broker holds {held}"] if held else []
        if memory["pinned_extents"]:
            wrong.append(f"{memory['pinned_extents']} extents are pinned by nobody")
        return await self.api.account(), wrong


def memory_of(folder: Path) -> Path:
    """Where the payload of the run's queue lies."""
    name = folder / "queue" / "memory"
    return SHM_ROOT / f"{SHM_PREFIX}{name.read_text().strip() if name.exists() else 'none'}"


def slabs_in(folder: Path) -> set[str]:
    """Files that hold payload, in memory and on disk."""
    return {path.name for place in (memory_of(folder), folder / "queue" / "spill") for path in place.glob("*.slab")}


def _size(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total
