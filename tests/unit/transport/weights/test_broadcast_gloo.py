"""Four real processes over gloo, one of them killed, stopped or missing at every step of a broadcast."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from relax_rt.transport.rpc.errors import Corrupt, Refused
from relax_rt.transport.weights.broadcast.group import GLOO, BroadcastGroup, RankSpec, error_of
from relax_rt.transport.weights.broadcast.machine import BroadcastLimits
from relax_rt.transport.weights.broadcast.protocol import (
    BroadcastFailed,
    BroadcastOutcome,
    DuplicateDevice,
    LostRank,
    PeerLost,
)
from relax_rt.transport.weights.broadcast.rank import digest_of
from relax_rt.transport.weights.memory import HostMemory, Memory, allocate_host_memory, map_host_memory

NAMES = ("root", "a", "b", "c")
BUCKET, BUCKETS = 64 << 10, 16
NBYTES = BUCKET * BUCKETS
START_S = 240.0
"""The first ranks wait for torch to be imported; those after it are forked."""
TIGHT = BroadcastLimits(hello_s=6.0, start_s=6.0, join_s=6.0, stall_s=4.0, abort_s=4.0)
WORST_S = 2 * (TIGHT.hello_s + TIGHT.join_s + TIGHT.stall_s + TIGHT.abort_s)


class Ranks:
    """A group, the memory of its ranks, and what is to go wrong."""

    def __init__(self, folder: Path, shm: Path) -> None:
        self.faults, self._shm = folder / "faults", shm
        self.faults.mkdir()
        self.memories: dict[str, Memory] = {name: allocate_host_memory(shm / name, NBYTES) for name in NAMES}
        environment = {
            "RELAX_FAULTS": str(self.faults),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": "1",
        }
        self.collective = BroadcastGroup(
            [RankSpec(name) for name in NAMES],
            "faulty_gloo:FaultyGloo",
            BroadcastLimits(hello_s=START_S),
            bucket_bytes=BUCKET,
            environment=environment,
        )

    def fill(self) -> str:
        """New bytes at the root, rubbish elsewhere; the digest of the bytes."""
        for name in NAMES:
            (self._shm / name).write_bytes(os.urandom(NBYTES))
        with map_host_memory(self.memories["root"], writable=False) as view:
            return digest_of(view, BUCKET)

    def mapped_by(self, pids: Iterable[int]) -> set[str]:
        """Receivers' memories that one of these processes can still write into."""
        found = set()
        for pid in pids:
            with suppress(OSError):  # it is gone
                maps = Path(f"/proc/{pid}/maps").read_text()
                found |= {name for name in NAMES[1:] if f"{self._shm / name}\n" in maps}
        return found

    def order(self, where: str, what: str, *, again: bool = False, who: str = "b") -> None:
        (self.faults / who).write_text(f"{where} {what} {'always' if again else 'once'}")

    async def send(self, names: tuple[str, ...] = NAMES, timeout_s: float = 30.0) -> tuple[BroadcastOutcome, float]:
        """Broadcast new bytes; what came of it, in which time. Whoever has it has every byte."""
        digest, begin = self.fill(), time.monotonic()
        outcome = await self.collective.broadcast({n: self.memories[n] for n in names}, digest, timeout_s)
        seconds = time.monotonic() - begin
        sent = (self._shm / "root").read_bytes()
        assert all((self._shm / name).read_bytes() == sent for name in outcome.delivered)
        return outcome, seconds

    async def warm(self) -> None:
        """Have every rank there, and limits as tight as tests want them."""
        outcome, _ = await self.send(timeout_s=START_S + 30)
        assert sorted(outcome.delivered) == ["a", "b", "c"]
        self.collective.machine.limits = TIGHT


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    shm = Path(f"/dev/shm/relax-test-{os.getpid()}-{time.monotonic_ns()}")
    shm.mkdir(mode=0o700)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    try:
        yield Ranks(tmp_path, shm)
    finally:
        for file in shm.iterdir():
            file.unlink()
        shm.rmdir()
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert not left, f"left running: {left}"


async def lost_at(ranks: Ranks, where: str, what: str, *, again: bool = False) -> LostRank:
    """Rank b goes wrong there: it alone is lost, within the deadlines, and its process is gone."""
    ranks.order(where, what, again=again)
    outcome, seconds = await ranks.send()
    (ranks.faults / "b").unlink(missing_ok=True)
    assert sorted(outcome.delivered) == ["a", "c"], (where, what, outcome)
    assert seconds < WORST_S, (where, what, seconds)
    (lost,) = outcome.lost
    assert lost.member == "b"
    await asyncio.sleep(0.1)
    assert "b" not in ranks.collective.ranks.pids
    assert "b" in str(error_of(lost)) and lost.why in str(error_of(lost))
    return lost


@pytest.mark.integration
async def test_a_rank_killed_at_every_step_is_left_out_and_comes_back(ranks: Ranks) -> None:
    async with ranks.collective:
        await ranks.warm()
        os.kill(ranks.collective.ranks.pids["b"], signal.SIGKILL)  # between two broadcasts
        await asyncio.sleep(0.2)
        outcome, _ = await ranks.send()
        assert sorted(outcome.delivered) == ["a", "b", "c"], "a new process has taken its place"
        for where in ("before", "middle", "after", "rendezvous", "joined", "start"):
            lost = await lost_at(ranks, where, "kill")
            assert lost.fate == "died" and "SIGKILL" in lost.why
            assert isinstance(error_of(lost), PeerLost)
        outcome, _ = await ranks.send()
        assert sorted(outcome.delivered) == ["a", "b", "c"]


@pytest.mark.integration
async def test_a_rank_stopped_in_the_middle_or_never_there_is_left_out(ranks: Ranks) -> None:
    async with ranks.collective:
        await ranks.warm()
        assert (await lost_at(ranks, "middle", "stop")).fate == "silent"
        assert (await lost_at(ranks, "start", "hang")).fate == "absent"
        lost = await lost_at(ranks, "middle", "fail")
        assert lost.fate == "failed" and "no room for a bucket" in lost.why


@pytest.mark.integration
@pytest.mark.long
async def test_a_rank_stopped_at_every_other_step_is_left_out(ranks: Ranks) -> None:
    async with ranks.collective:
        await ranks.warm()
        os.kill(ranks.collective.ranks.pids["b"], signal.SIGSTOP)  # between two broadcasts
        outcome, _ = await ranks.send()
        assert [(lost.member, lost.fate) for lost in outcome.lost] == [("b", "silent")]
        for where in ("before", "after", "rendezvous", "joined"):
            assert (await lost_at(ranks, where, "stop")).fate == "silent"
        assert (await lost_at(ranks, "start", "stop")).fate == "absent"


@pytest.mark.integration
@pytest.mark.long
async def test_a_rank_whose_library_hangs_gets_a_second_process_and_no_third(ranks: Ranks) -> None:
    async with ranks.collective:
        await ranks.warm()
        for where in ("before", "rendezvous", "middle"):
            assert (await lost_at(ranks, where, "hang", again=True)).fate == "stuck"
        ranks.order("middle", "hang")
        outcome, _ = await ranks.send()
        assert sorted(outcome.delivered) == ["a", "b", "c"], "one that hung once is there again"


@pytest.mark.integration
async def test_a_lost_root_a_hurried_owner_and_bytes_that_differ_have_their_names(ranks: Ranks) -> None:
    async with ranks.collective:
        await ranks.warm()
        ranks.order("middle", "kill", who="root")
        with pytest.raises(BroadcastFailed, match=r"root root is lost \(died\).*SIGKILL") as caught:
            await ranks.send()
        assert caught.value.outcome is not None and not caught.value.outcome.delivered
        ranks.order("before", "stop")
        pids = list(ranks.collective.ranks.pids.values())
        with pytest.raises(BroadcastFailed, match=r"not over within 0\.3 s"):
            await ranks.send(timeout_s=0.3)
        assert not ranks.mapped_by(pids), "its memory may be used again"
        (ranks.faults / "b").unlink(missing_ok=True)
        await ranks.send()
        ranks.order("middle", "stop")
        task, pids = asyncio.create_task(ranks.send()), list(ranks.collective.ranks.pids.values())
        async with asyncio.timeout(START_S):
            while (ranks.faults / "b").exists() or "b" not in ranks.mapped_by(pids):  # noqa: ASYNC110 another does it
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0)
        task.cancel()  # one who is in a hurry waits all the same
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not ranks.mapped_by(pids), "nor does a cancelled one write any more"
        ranks.fill()
        with pytest.raises(BroadcastFailed, match="digest"):
            await ranks.collective.broadcast(ranks.memories, "of something else", 30.0)
        with pytest.raises(Refused, match="one size"):
            await ranks.collective.broadcast({**ranks.memories, "a": HostMemory("/dev/null", 1)}, "", 1.0)
        gone = {**ranks.memories, "a": HostMemory("/dev/shm/relax-nowhere", NBYTES)}
        outcome = await ranks.collective.broadcast(gone, ranks.fill(), 30.0)
        assert sorted(outcome.delivered) == ["b", "c"]
        assert [(lost.member, lost.fate) for lost in outcome.lost] == [("a", "failed")]
        assert "relax-nowhere" in outcome.lost[0].why


async def test_a_library_that_is_not_there_is_told_by_each_rank(tmp_path: Path) -> None:
    memory = allocate_host_memory(tmp_path / "m", NBYTES)
    async with BroadcastGroup([RankSpec("root"), RankSpec("a")], "relax_rt.nowhere:Nothing") as collective:
        with pytest.raises(BroadcastFailed, match=r"root is lost \(failed\).*No module named 'relax_rt.nowhere'"):
            await collective.broadcast({"root": memory, "a": memory}, "", 60.0)


def lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.integration
async def test_ranks_end_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from relax_rt.transport.weights.broadcast.group import GLOO, BroadcastGroup, RankSpec\n"
        "from relax_rt.transport.weights.memory import allocate_host_memory\n"
        "async def main():\n"
        "    memory = {n: allocate_host_memory(Path(sys.argv[1]) / n, 1000) for n in 'xy'}\n"
        "    async with BroadcastGroup([RankSpec('x'), RankSpec('y')], GLOO) as group:\n"
        "        try:\n"
        "            await group.broadcast(memory, 'wrong', 60.0)\n"
        "        except Exception:\n"
        "            os.kill(group.ranks.pids['y'], signal.SIGSTOP)\n"
        "            print(*group.ranks.pids.values(), flush=True)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    pids = [int(word) for word in (await asyncio.wait_for(child.stdout.read(), START_S)).split()]
    assert len(pids) == 2 and await child.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while any(map(lives, pids)):
        assert time.monotonic() < deadline, "ranks outlive their owner"
        await asyncio.sleep(0.02)


def test_errors_carry_the_fate() -> None:
    assert isinstance(error_of(LostRank("b", "corrupt", "x")), Corrupt)
    assert isinstance(error_of(LostRank("b", "duplicate_device", "x")), DuplicateDevice)
    assert GLOO.endswith(":GlooCommunicator")
