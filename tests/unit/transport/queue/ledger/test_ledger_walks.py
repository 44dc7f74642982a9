"""The machine of test_ledger_machine.py on long walks, with faults as rare as steps can stand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from ledger_consumers import OUTCOMES
from test_ledger_machine import LedgerMachine


@pytest.mark.parametrize("seed", range(24))
def test_a_long_run_with_faults(seed: int) -> None:
    """Hypothesis looks for short cases; this walks far, with faults as rare as steps can stand."""
    rng = random.Random(seed)
    m = LedgerMachine()
    m.start(
        {
            "max_staleness": float(seed % 3),
            "straggler_wait_s": rng.choice([0.0, 10.0]),
            "on_straggler": ("wait", "mask", "wait", "requeue")[seed % 4],
            "on_failed_member": ("regenerate", "regenerate", "shrink", "drop")[seed // 6],
            "frozen_by": rng.choice(["", "values"]),
            "over_provision": seed % 2,
            "on_surplus": rng.choice(["drop", "recycle"]),
            "group_size": rng.choice([2, 3]),
        }
    )
    coin, two, pick = lambda: rng.random() < 0.5, lambda: rng.randrange(2), lambda: rng.randrange(999)
    few = lambda: rng.randint(1, 4)  # noqa: E731
    moves: list[tuple[float, Callable[[], bool], Callable[[], None]]] = [
        (6, lambda: True, lambda: m.admit(two(), few())),
        (9, lambda: bool(m.tickets), lambda: m.put(pick(), few(), rng.random() < 0.1, rng.choice(["", "cat"]), coin())),
        (5, lambda: bool(m.tickets), lambda: m.mark(pick(), few(), few(), rng.choice([0, 0, 1, -1]), coin(), coin())),
        (1, lambda: bool(m.tickets), lambda: m.fetch_partials(pick())),
        (6, lambda: True, lambda: m.take_reward(two(), few(), rng.random() < 0.2)),
        (7, lambda: bool(m.work), lambda: m.finish_reward(pick(), rng.choice(OUTCOMES))),
        (9, lambda: True, lambda: m.take_values(two(), few())),
        (9, lambda: True, lambda: m.finish_values(two(), rng.choice(OUTCOMES), rng.random() < 0.1)),
        (6, lambda: not m.batches, lambda: m.take_batch(rng.choice([1, 2, 2, 2]), rng.choice([0, 0, 1]))),
        (2, lambda: 0 < len(m.batches) < 3, lambda: m.take_batch(few(), rng.choice([0, 1, 1]))),
        (4, lambda: bool(m.batches), lambda: m.train(rng.random() < 0.1, rng.random() < 0.1)),
        (1, lambda: bool(m.batches), lambda: m.filter_groups(pick(), rng.random() < 0.2, coin())),
        (0.5, lambda: True, lambda: m.ask(rng.randrange(3))),
        (0.5, lambda: True, lambda: m.choose({place: pick() for place in range(rng.randrange(6))})),
        (4, lambda: True, lambda: m.update_engine(two())),
        (2, lambda: True, lambda: m.tick(rng.choice([0.5, 2.0, 40.0]))),
        (2, lambda: bool(m.reads), lambda: m.read_no_more(pick())),
        (1, lambda: True, m.copy_to_disk),
        (1, lambda: bool(m.copied), m.copies_are_there),
        (0.6, lambda: True, lambda: m.checkpoint(coin())),
        (0.3, lambda: bool(m.batches), lambda: m.give_batch_up(coin())),
        (0.3, lambda: bool(m.tickets), lambda: m.give_back(pick(), rng.choice([0, 1, 3]))),
        (0.3, lambda: True, lambda: m.kill_engine(two(), coin())),
        (0.3, lambda: True, lambda: m.kill_judge(two())),
        (0.3, lambda: True, lambda: m.kill_critic(two(), coin())),
        (0.3, lambda: True, lambda: m.kill_trainer(coin())),
        (0.3, lambda: True, m.kill_broker),
        (0.2, lambda: True, m.take_snapshot),
        (0.5, lambda: m.d.last is not None, m.repeat_the_last_call),
        (0.05, lambda: len(m.checkpoints) > 1, m.newest_checkpoint_is_corrupt),
        (0.05, lambda: True, m.node_agent_dies),
    ]
    for _ in range(400):
        possible = [(weight, act) for weight, may, act in moves if may()]
        rng.choices([act for _, act in possible], [weight for weight, _ in possible])[0]()
        m.ledger_is_sound()
        m.ledger_is_as_the_model()
        m.memory_comes_back_once()
        m.marks_are_bounded()
    m.nothing_is_trained_twice()
    m.teardown()
