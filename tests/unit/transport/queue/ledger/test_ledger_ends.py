"""Each way in which samples end: what becomes of their credit, their memory, their group and their prompt."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ledger_driver import ENGINE, JUDGE, OTHER, TRAINER, Driver, make, started

from relax_rt.transport.queue.ledger.admission import outstanding
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.queue.ledger.policy import QueueLimits
from relax_rt.transport.rpc.identity import Incarnation

LIMITS = QueueLimits(quarantine_after=1)


def over_stale(d: Driver, version: int) -> None:
    make(d, version)
    d.rollback(TRAINER, 0, version, changed=True)


def given_back(d: Driver, version: int) -> None:
    d.give_back(ENGINE, d.admit(ENGINE, version).tickets[0].group)


def lapsed(d: Driver, version: int) -> None:
    d.admit(ENGINE, version)
    d.tick(61.0)


def producer_gone(d: Driver, version: int) -> None:
    d.admit(ENGINE, version)
    d.gone(ENGINE)


def failed(d: Driver, version: int) -> None:
    (ticket,) = make(d, version)
    d.reward(JUDGE, d.take(JUDGE, "reward", samples=2), SampleKey(ticket.group, 0))


def kills_its_consumer(d: Driver, version: int) -> None:
    make(d, version)
    judge = Incarnation("reward/0", 90)
    d.take(judge, "reward", samples=1)
    d.gone(judge)


def node_dies(d: Driver, version: int) -> None:
    make(d, version)
    d.reopen("run-2")
    d.rollback(Incarnation("trainer/0", 91), 0, version)


def skipped(d: Driver, version: int) -> None:
    make(d, version)
    d.reward_all(JUDGE)
    d.skip(TRAINER, d.take(TRAINER, "train", groups=1), 1, d.weights())


def trained(d: Driver, version: int) -> None:
    make(d, version)
    d.reward_all(JUDGE)
    d.trained(TRAINER, d.take(TRAINER, "train", groups=1), 1, version)
    d.committed(TRAINER, 1)


def undone(d: Driver, version: int) -> None:
    trained(d, version)
    d.rollback(TRAINER, 0, version)


@pytest.mark.parametrize(
    ("end", "states", "prompt"),
    [
        (over_stale, {"refused(stale)": 2}, "returned"),
        (given_back, {"dropped(returned)": 2}, "returned"),
        (lapsed, {"dropped(lapsed)": 2}, "returned"),
        (producer_gone, {"dropped(producer gone)": 2}, "returned"),
        (failed, {"failed": 1, "dropped(sibling)": 1}, "returned"),
        (kills_its_consumer, {"quarantined": 1, "dropped(sibling)": 1}, "retired"),
        (node_dies, {"lost": 2}, "returned"),
        (skipped, {"skipped": 2}, "used"),
        (trained, {"freed": 2}, "used"),
        (undone, {"lost": 2}, "returned"),
    ],
)
def test_an_end_gives_credit_and_memory_back(
    end: Callable[[Driver, int], None], states: dict[str, int], prompt: str
) -> None:
    d, version = started(LIMITS, max_staleness=0, on_failed_member="drop")
    end(d, version)
    ledger = d.ledger
    assert {state: n for state, n in ledger.state.ended.items() if n} == states
    assert outstanding(ledger.core) == 0 and not ledger.state.groups
    assert not ledger.state.blocks.blocks and ledger.state.blocks.payload_bytes == 0
    places = {
        "returned": [one.index for one in ledger.state.prompts.waiting],
        "retired": ledger.state.prompts.retired,
        "used": [record.prompt.index for records in ledger.state.path.values() for record in records if record.prompt],
    }
    assert places == {place: [0] if place == prompt else [] for place in places}
    if prompt == "returned":
        assert ledger.state.prompts.waiting[0].attempt == 1
    assert ledger.audit() == []
    d.check_replay()


def test_a_straggler_ends_alone() -> None:
    d, version = started(max_staleness=0)
    d.admit(OTHER, version)
    make(d, version)
    d.reward_all(JUDGE)
    assert not d.take(TRAINER, "train", groups=1).samples
    d.now += 10.0
    assert len(d.take(TRAINER, "train", groups=1).samples) == 2
    account = d.ledger.account()
    assert (account["dropped(straggler)"], account["leased"], account["prompts_waiting"]) == (2, 2, 1)
