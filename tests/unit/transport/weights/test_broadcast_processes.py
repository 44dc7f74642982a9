"""The processes of ranks: real ones, whose words and whose launcher's may come in any order."""

from __future__ import annotations

import asyncio

import pytest

from relax_rt.transport.weights.broadcast.processes import Key, RankProcesses
from relax_rt.transport.weights.broadcast.protocol import RankFailed, Report

NOT_THERE = "relax_rt.transport.weights.broadcast.backends:NotThere"
DEADLINE_S = 120.0


async def test_a_rank_that_fails_before_its_fork_was_told_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its word may come first: it is given up then, and the launcher, which hangs in nothing, starts the next one."""
    ends: list[tuple[Key, str]] = []
    failed: dict[Key, str] = {}
    news = asyncio.Event()

    def said(key: Key, what: Report) -> None:
        if isinstance(what, RankFailed):
            failed[key] = what.error
            ranks.kill(key)
        news.set()

    def ended(key: Key, how: str) -> None:
        ends.append((key, how))
        news.set()

    ranks = RankProcesses(NOT_THERE, {}, said, ended)
    told: list[tuple[Key, int, int]] = []
    forked = ranks._forked
    monkeypatch.setattr(ranks, "_forked", lambda *what: told.append(what))  # held back until the rank has spoken
    exits: list[tuple[int, str]] = []
    exited = ranks._exited

    def in_order(pid: int, how: str) -> None:
        """The launcher tells of an end after the fork: held back with it."""
        exits.append((pid, how)) if pid not in ranks._pids else exited(pid, how)

    monkeypatch.setattr(ranks, "_exited", in_order)
    blamed: list[Key] = []
    monkeypatch.setattr(ranks, "_end_launcher", lambda: blamed.append(told[-1][0]))
    try:
        async with asyncio.timeout(DEADLINE_S):
            for number in range(3):
                key = ("rollout/0", number)
                ranks.spawn(key)
                while key not in failed or key not in [one for one, *_ in told]:
                    news.clear()
                    await asyncio.wait({asyncio.ensure_future(news.wait())}, timeout=0.05)
                forked(*told[number])
                while exits:
                    exited(*exits.pop(0))
                while key not in [one for one, _ in ends]:
                    news.clear()
                    await asyncio.wait({asyncio.ensure_future(news.wait())}, timeout=0.05)
    finally:
        await ranks.close()
    assert all("NotThere" in why for why in failed.values()), failed
    assert [key for key, _ in ends] == [("rollout/0", number) for number in range(3)]
    assert not ranks.living
    assert not blamed, "the launcher hung in nothing"
