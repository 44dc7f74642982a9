"""Who waits for the broker, and why; what a client says of its own waits; calls that are made again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from eventually import eventually

from relax_rt.transport.base import calls as calls_module
from relax_rt.transport.base.calls import WINDOW, NumberedCalls, WaitingCalls
from relax_rt.transport.queue.puts import WaitReasons
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, Unreachable


class Clock:
    def __init__(self) -> None:
        self.now = 10.0

    def __call__(self) -> float:
        return self.now


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_only_what_was_waited_for_wakes() -> None:
    clock = Clock()
    waits = WaitingCalls(clock)
    woken: list[str] = []

    async def waiting(who: str, topic: str) -> None:
        token = waits.enter(who, topic)
        try:
            await waits.wait(token, f"no {topic}", 30.0)
            woken.append(who)
        finally:
            waits.leave(token)

    tasks = [asyncio.create_task(waiting(*pair)) for pair in [("a/0", "train"), ("b/0", "room"), ("c/0", "train")]]
    await settle()
    assert len(waits) == 3 and waits.reasons() == {"a/0": "no train", "b/0": "no room", "c/0": "no train"}
    clock.now += 2.5
    assert [(one["who"], one["topic"], one["for_s"]) for one in waits.now()] == [
        ("a/0", "train", 2.5),
        ("b/0", "room", 2.5),
        ("c/0", "train", 2.5),
    ]
    waits.touch(["judge"])
    await settle()
    assert woken == []
    waits.touch(["train", "judge"])
    await settle()
    assert sorted(woken) == ["a/0", "c/0"] and len(waits) == 1
    assert waits.over() == {"train": {"waits": 2, "total_s": 5.0}}
    clock.now += 1.0
    waits.touch_all()
    await asyncio.gather(*tasks)
    assert len(waits) == 0 and waits.reasons() == {} and waits.over()["room"] == {"waits": 1, "total_s": 3.5}


async def test_a_wait_ends_by_itself_and_one_that_was_cancelled_is_not_counted_on() -> None:
    waits = WaitingCalls(Clock())
    token = waits.enter("a/0", "train")
    await waits.wait(token, "no train", 0.001)
    waits.leave(token)
    # Without a reason it did not wait.
    waits.leave(waits.enter("a/0", "train"))
    task = asyncio.create_task(waits.wait(waits.enter("b/0", "train"), "no train", 30.0))
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    waits.touch(["train"])
    assert waits.over() == {"train": {"waits": 1, "total_s": 0.0}}


async def test_waiters_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MAX_WAITERS", 3)
    monkeypatch.setattr(calls_module, "POLL_S", 0.001)
    waits = WaitingCalls(Clock())
    tokens = [waits.enter("a/0", "train") for _ in range(3)]
    one_too_many = waits.enter("b/0", "train")
    # It waits all the same, for a moment, and asks again.
    await waits.wait(one_too_many, "no train", 30.0)
    assert len(waits) == 0 and len({*tokens, one_too_many}) == 4
    waits.leave(one_too_many)
    waits.leave(tokens[0])
    assert waits.enter("b/0", "train") not in tokens and waits.over() == {}


def test_the_end_of_one_wait_does_not_clear_the_others() -> None:
    told: list[str] = []
    reasons = WaitReasons(told.append)
    first, second = reasons.wait(), reasons.wait()
    first("memory is full")
    second("the broker is away")
    second("the broker is still away")
    assert reasons.current == "the broker is still away"
    second("")
    assert reasons.current == "memory is full"
    second("")
    with reasons.wait() as third:
        third("payload comes")
        first("")
        assert reasons.current == "payload comes"
    assert reasons.current == ""
    assert told == [
        "memory is full",
        "the broker is away",
        "the broker is still away",
        "memory is full",
        "payload comes",
        "",
    ]


class Broker:
    """Answers the number of a call, unless it is away."""

    def __init__(self) -> None:
        self.away: Exception | None = None
        self.seen: list[int] = []
        self.held: dict[int, asyncio.Event] = {}

    async def __call__(self, seq: int) -> int:
        self.seen.append(seq)
        if seq in self.held:
            await self.held[seq].wait()
        if self.away is not None:
            raise self.away
        return seq


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def make(told: list[str]) -> Callable[[float], NumberedCalls]:
    return lambda patience_s: NumberedCalls("reader/0#1", patience_s, told.append)


@pytest.mark.parametrize("error", [Unreachable("broker", why="away"), DeadlineExceeded("call", why="late")])
async def test_calls_are_made_again_under_their_number(
    make: Callable[[float], NumberedCalls], told: list[str], error: Exception
) -> None:
    broker, calls = Broker(), make(30.0)
    assert await calls.call(broker) == 1
    broker.away = error
    asking = [asyncio.create_task(calls.call(broker)) for _ in range(2)]
    await eventually(lambda: len(broker.seen) >= 7)
    assert told and all(error.why in reason for reason in told)
    assert calls.statistics().unanswered == 2
    broker.away = None
    assert sorted(await asyncio.gather(*asking)) == [2, 3] and set(broker.seen) == {1, 2, 3}
    assert told[-1] == "" and told.count("") == 1
    assert await calls.call(broker) == 4
    numbers = calls.statistics()
    assert (numbers.calls, numbers.unanswered) == (4, 0) and numbers.resent == len(broker.seen) - 4


async def test_patience_ends(make: Callable[[float], NumberedCalls], told: list[str]) -> None:
    broker, calls = Broker(), make(0.1)
    broker.away = Unreachable("broker", why="away")
    with pytest.raises(Unreachable, match="away"):
        await calls.call(broker)
    assert told[-1] == "" and len(broker.seen) > 1
    broker.away = Refused("call", why="no")
    seen = len(broker.seen)
    with pytest.raises(Refused):
        await calls.call(broker)
    assert len(broker.seen) == seen + 1


async def test_no_call_runs_too_far_ahead_of_one_without_an_answer(make: Callable[[float], NumberedCalls]) -> None:
    broker, calls = Broker(), make(30.0)
    broker.held[1] = asyncio.Event()
    first = asyncio.create_task(calls.call(broker))
    await settle()
    others = [asyncio.create_task(calls.call(broker)) for _ in range(2 * WINDOW)]
    await eventually(lambda: len(broker.seen) >= WINDOW)
    assert max(broker.seen) == WINDOW
    broker.held[1].set()
    await asyncio.gather(first, *others)
    assert broker.seen == list(range(1, 2 * WINDOW + 2))


async def test_a_wait_at_the_far_end_gives_way_to_other_calls(make: Callable[[float], NumberedCalls]) -> None:
    calls = make(30.0)
    asked: list[tuple[int, float]] = []

    async def wait(seq: int, wait_s: float) -> str:
        asked.append((seq, wait_s))
        await asyncio.sleep(wait_s)
        return f"{seq}: nothing yet"

    waiting = asyncio.create_task(calls.wait(wait, 3600.0))
    await settle()
    async with asyncio.timeout(120):
        broker = Broker()
        assert await asyncio.gather(*(calls.call(broker) for _ in range(3 * WINDOW))) == broker.seen
        # Asked again without a wait, under its number.
        assert await waiting == "1: nothing yet" and asked == [(1, 3600.0), (1, 0.0)]
    assert calls.statistics().unanswered == 0


async def test_a_silent_broker_is_reported(
    make: Callable[[float], NumberedCalls], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "SILENT_S", 0.01)
    broker, calls = Broker(), make(30.0)
    broker.held[1] = asyncio.Event()
    asking = asyncio.create_task(calls.call(broker))
    await eventually(lambda: bool(told))
    assert told == ["the broker has not answered for 0.01 s"]
    broker.held[1].set()
    await asking
    assert told[-1] == ""


async def test_a_reported_silence_ends_with_the_answer_though_newer_calls_wait(
    make: Callable[[float], NumberedCalls], told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls_module, "SILENT_S", 0.01)
    broker, calls = Broker(), make(30.0)
    broker.held = {seq: asyncio.Event() for seq in (1, 2, 3)}
    asking = [asyncio.create_task(calls.call(broker)) for _ in range(2)]
    await eventually(lambda: bool(told))
    monkeypatch.setattr(calls_module, "SILENT_S", 0.0)
    broker.held[1].set()
    await asking[0]
    assert "" not in told, "the second call has waited too long as well"
    monkeypatch.setattr(calls_module, "SILENT_S", 3600.0)
    asking.append(asyncio.create_task(calls.call(broker)))
    await settle()
    broker.held[2].set()
    await asking[1]
    assert told[-1] == "" and calls.statistics().unanswered == 1
    broker.held[3].set()
    assert await asking[2] == 3 and told.count("") == 1
