"""Offers of many callers in few messages: order, limits, faults of one, deadlines, and what is left at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest

from relax_rt.transport.queue import puts as module
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.queue.puts import PutBatcher, Rows, Until
from relax_rt.transport.rpc.errors import OutOfSpace, Refused, StaleEpoch, Unreachable


class Far:
    """What a broker would do: gives ids in the order in which things come."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = []
        self.priorities: list[list[float]] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.room = asyncio.Event()
        self.room.set()
        self.errors: dict[Any, Exception] = {}
        self.next_id = 1

    @property
    def sent(self) -> list[Any]:
        return [*chain(*self.messages)]

    async def send(self, rows: Rows, groups: list[int], priorities: Sequence[float], until: Until) -> list[int]:
        values = [row["n"] for row in rows]
        self.messages.append(values)
        self.priorities.append(list(priorities))
        await self.gate.wait()
        loop = asyncio.get_running_loop()
        while not self.room.is_set():
            try:
                async with asyncio.timeout(min(0.01, max(0.0, until() - loop.time()))):
                    await self.room.wait()
            except TimeoutError:
                if loop.time() >= until():
                    raise OutOfSpace("put", why="full") from None
        for value in values:
            if value in self.errors:
                raise self.errors[value]
        ids = list(range(self.next_id, self.next_id + len(groups)))
        self.next_id += len(groups)
        return ids


def rows(*values: Any) -> list[dict[str, Any]]:
    return [{"n": value} for value in values]


async def put(
    box: PutBatcher, *values: Any, group: bool = False, nbytes: int = 1, wait_s: float = 30.0
) -> list[SampleKey]:
    sizes = [len(values)] if group else [1] * len(values)
    return await box.put(rows(*values), sizes, [float(hash(value) % 7) for value in values], nbytes, wait_s)


async def test_what_is_put_while_a_message_is_under_way_makes_the_next() -> None:
    far = Far()
    far.gate.clear()
    box = PutBatcher(far.send)
    puts = [asyncio.create_task(put(box, n)) for n in range(5)]
    puts.append(asyncio.create_task(put(box, 5, 6, 7, group=True)))
    puts.append(asyncio.create_task(put(box, 8, 9)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    far.gate.set()
    keys = await asyncio.gather(*puts)
    assert far.sent == list(range(10)) and len(far.messages) <= 2
    assert [*chain(*far.priorities)] == [float(n % 7) for n in range(10)]
    assert keys[:5] == [[SampleKey(n, 0)] for n in range(1, 6)]
    assert keys[5] == [SampleKey(6, member) for member in range(3)]
    assert keys[6] == [SampleKey(7, 0), SampleKey(8, 0)]
    assert (box.messages, box.rows) == (len(far.messages), 10)
    await box.close()


async def test_messages_are_bounded_in_rows_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROWS", 4)
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    far = Far()
    far.gate.clear()
    box = PutBatcher(far.send)
    first = asyncio.create_task(put(box, "first"))
    await asyncio.sleep(0.01)
    puts = [asyncio.create_task(put(box, n)) for n in range(9)]
    puts += [asyncio.create_task(put(box, f"large {n}", nbytes=60)) for n in range(2)]
    # One caller's own are not cut.
    puts.append(asyncio.create_task(put(box, *"abcdefgh", nbytes=1000)))
    await asyncio.sleep(0)
    far.gate.set()
    await asyncio.gather(first, *puts)
    assert far.messages == [["first"], [0, 1, 2, 3], [4, 5, 6, 7], [8, "large 0"], ["large 1"], [*"abcdefgh"]]
    await box.close()


@pytest.mark.parametrize("error", [Refused("field 'x'"), ValueError("a value nobody had thought of")])
async def test_the_fault_of_one_is_told_to_that_one(error: Exception) -> None:
    far = Far()
    far.errors["bad"] = error
    box = PutBatcher(far.send)
    answers = await asyncio.gather(*(put(box, n) for n in (1, "bad", 2, 3)), return_exceptions=True)
    assert answers[1] is error
    assert [answers[n] for n in (0, 2, 3)] == [[SampleKey(n, 0)] for n in (1, 2, 3)]
    assert box.rows == 3
    await box.close()


@pytest.mark.parametrize("error", [StaleEpoch("call"), Unreachable("broker"), OutOfSpace("calls that wait")])
async def test_what_concerns_all_is_told_to_all(error: Exception) -> None:
    far = Far()
    far.errors["bad"] = error
    box = PutBatcher(far.send)
    answers = await asyncio.gather(*(put(box, n) for n in (1, "bad", 2)), return_exceptions=True)
    assert answers == [error] * 3 and len(far.messages) == 1
    assert await put(box, 5) == [SampleKey(1, 0)]
    await box.close()


async def test_who_cannot_wait_longer_is_told_and_the_others_go_on() -> None:
    far = Far()
    far.room.clear()
    box = PutBatcher(far.send)
    under_way = [asyncio.create_task(put(box, n, wait_s=60.0 if n else 0.3)) for n in range(3)]
    await asyncio.sleep(0.01)
    behind = [asyncio.create_task(put(box, n, wait_s=60.0 if n > 10 else 0.6)) for n in range(10, 13)]
    for late in (under_way[0], behind[0]):
        with pytest.raises(OutOfSpace, match="full"):
            await late
    assert not any(task.done() for task in [*under_way[1:], *behind[1:]])
    far.room.set()
    keys = await asyncio.gather(*under_way[1:], *behind[1:])
    assert [key.group for (key,) in keys] == [1, 2, 3, 4]
    assert sorted(far.messages[-1] + far.messages[-2]) == [1, 2, 11, 12]
    assert box._pending == 0
    await box.close()


async def test_too_many_wait_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 3)
    far = Far()
    far.gate.clear()
    box = PutBatcher(far.send)
    inside = [asyncio.create_task(put(box, n)) for n in range(3)]
    await asyncio.sleep(0.01)
    with pytest.raises(OutOfSpace, match="3 samples of this process wait to be sent already"):
        await put(box, 3, wait_s=0.01)
    outside = asyncio.create_task(put(box, 4))
    await asyncio.sleep(0.01)
    far.gate.set()
    await asyncio.gather(*inside, outside)
    assert far.sent == [0, 1, 2, 4]
    await box.close()


async def test_a_caller_that_gives_up_leaves_its_samples_to_go_their_way() -> None:
    far = Far()
    far.gate.clear()
    box = PutBatcher(far.send)
    first, second = asyncio.create_task(put(box, 1)), asyncio.create_task(put(box, 2))
    await asyncio.sleep(0.01)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    far.gate.set()
    assert await first == [SampleKey(1, 0)]
    assert far.sent == [1, 2] and box._pending == 0
    await box.close()


async def test_close_tells_whose_samples_were_not_put_and_whose_may_have_been() -> None:
    far = Far()
    far.gate.clear()
    box = PutBatcher(far.send)
    puts = [asyncio.create_task(put(box, 1))]
    await asyncio.sleep(0.01)
    puts.append(asyncio.create_task(put(box, 2)))
    await asyncio.sleep(0.01)
    await box.close()
    sent, kept = await asyncio.gather(*puts, return_exceptions=True)
    assert isinstance(sent, Refused) and isinstance(kept, Refused)
    assert "may have been put" in str(sent) and "may have been put" not in str(kept)
    await PutBatcher(far.send).close()


async def test_close_tells_who_waits_at_the_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PENDING", 2)
    far = Far()
    far.gate.clear()
    box = PutBatcher(far.send)
    inside = [asyncio.create_task(put(box, n)) for n in range(3)]
    async with asyncio.timeout(120):
        while far.sent != [0, 1]:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await box.close()
    assert box._pending == 0
    async with asyncio.timeout(120):
        ends = await asyncio.gather(*inside, return_exceptions=True)
    assert [type(end) for end in ends] == [Refused] * 3
    with pytest.raises(Refused, match="this end of the queue was closed"):
        await put(box, 3)
    assert far.sent == [0, 1]
