"""The checker of the engine soak: sound records pass, and each kind of false record is detected."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[5] / "tools" / "soak"))

import engine_chaos_check as judge

from relax_rt.transport.base.versions import VersionRecord

RECORDS = [
    VersionRecord(1, 0, 1),
    VersionRecord(2, 1, 2),
    VersionRecord(3, 1, 1, changed=False),
    VersionRecord(4, 3, 2),
]
COMMITTED = judge.Committed(
    [{"kind": "version_committed", "t": 10.0 * r.version, "version": r.version} for r in RECORDS], RECORDS
)


def line(kind: str, at: float, **facts: Any) -> judge.Line:
    return {"kind": kind, "at": at, **facts}


def engine(*lines: judge.Line, slot: str = "rollout/0", epoch: int = 1) -> judge.Incarnation:
    return judge.Incarnation(slot, epoch, list(lines))


def asked(seed: int = 7, lag: int = 0, kind: str = "done", tokens: int = 4, spans: Any = None) -> judge.Asked:
    return judge.Asked(seed, lag, kind, tokens, [(0, 4, 2, 2)] if spans is None else spans)


def test_versions() -> None:
    whole = engine(line("sampled", 1.0))
    assert judge.versions([whole], [asked()], COMMITTED) == (5, [])
    assert judge.versions([engine(line("wrong_version", 1.0))], [], COMMITTED)[1]
    for spans in ([(0, 4, 9, 9)], [(0, 3, 2, 2)], [(1, 4, 2, 2)], []):
        assert judge.versions([], [asked(spans=spans)], COMMITTED)[1], spans


def test_weights_are_held_against_what_was_committed() -> None:
    records = [VersionRecord(1, 0, 1, "aa"), VersionRecord(2, 1, 2, "bb")]

    def found(version: int, digest: str) -> tuple[int, list[str]]:
        return judge.weights([engine(line("holds", 1.0, version=version, digest=digest, after="swap"))], records)

    assert found(2, "bb") == (1, [])
    assert found(2, "aa")[1] and found(2, "ab")[1]
    assert found(0, "aa")[1], "a version that was never committed"
    assert found(3, "cc") == (0, []), "committed after the registry was asked"


def test_routing_is_judged_by_the_tree_of_versions() -> None:
    def found(version: int, at: float, lag: int) -> list[str]:
        return judge.routed([engine(line("begun", at, seed=7, version=version))], [asked(lag=lag)], COMMITTED)[1]

    assert not found(2, 25.0, 0)
    assert found(1, 25.0, 0) and not found(1, 25.0, 1)
    # 3 is 1 once more: to be at 1 is to be at 3, and 2 is on another branch.
    assert not found(1, 35.0, 0)
    assert found(2, 35.0, 0) and not found(2, 35.0, 1)
    assert found(2, 45.0, 1)
    assert found(0, 25.0, 5), "without weights"
    assert not found(1, 20.0 + judge.NEWS_S / 2, 0), "nobody could know yet"


def test_outcomes() -> None:
    assert judge.outcomes([asked()], 1, 4) == (1, [])
    assert judge.outcomes([asked(), asked()], 2, 8)[1]
    assert judge.outcomes([asked()], 2, 4)[1]
    assert judge.outcomes([asked(kind="late")], 1, 4)[1]
    assert judge.outcomes([asked()], 1, 5)[1]


def handed_on(
    had: list[int], marked: list[int], sampled: int, *, ago: float = 5.0, unanswered: tuple[int, ...] = ()
) -> tuple[list[str], dict[str, float]]:
    """One engine samples and marks a member and dies; another goes on with it."""
    first = engine(
        line("taken", 1.0, request=1, group=5, members=[2], had=[[]]),
        line("sampled", 20.0 - ago, request=1, place=0, upto=sampled),
        line("marking", 19.0, group=5, member=2, start=0, tokens=marked),
        line("marked", 19.1, group=5, member=2, start=0, tokens=marked),
        *(line("marking", 19.2, group=5, member=2, start=len(marked), tokens=list(t)) for t in [unanswered] if t),
        line("order", 20.0),
    )
    second = engine(line("taken", 30.0, request=1, group=5, members=[2], had=[had]), slot="rollout/1", epoch=2)
    looked, wrong, figures = judge.lost([first, second], 3)
    assert looked == 1
    return wrong, figures


def test_marks() -> None:
    assert handed_on([1, 2, 3], [1, 2, 3], 5) == (
        [],
        {"handed_on": 1, "had_due": 1, "let_go": 0, "tokens_lost_median": 2, "tokens_lost_max": 2},
    )
    assert handed_on([1, 2], [1, 2, 3], 3)[0], "fewer than were acknowledged"
    assert handed_on([1, 9, 3], [1, 2, 3], 3)[0], "others than were acknowledged"
    assert not handed_on([1, 2, 3, 4], [1, 2, 3], 4, unanswered=(4,))[0], "nobody heard that they were marked"
    assert not handed_on([1, 2, 3], [1, 2, 3], 4, unanswered=(4,))[0], "they were not"
    assert handed_on([1, 2, 3, 9], [1, 2, 3], 4, unanswered=(4,))[0], "others than it was asked for"
    assert handed_on([1, 2, 3, 4], [1, 2, 3], 4)[0], "nobody has asked for it"
    assert handed_on([1, 2, 3], [1, 2, 3], 9)[0], "more lost than a mark"
    assert not handed_on([1, 2, 3], [1, 2, 3], 9, ago=0.1)[0], "sampled in the moment of its death"
    assert handed_on([], [1, 2, 3], 3)[1]["let_go"] == 1
    assert handed_on([1, 2, 3], [1, 2, 3], 9, ago=0.1)[1]["had_due"] == 0, "nothing was due yet"
    assert handed_on([], [], 9)[0], "never marked though it was due"


def test_reward() -> None:
    up, flat = [n / 300 for n in range(300)], [0.3] * 300
    assert judge.rising(up)[1:3] == ([], [])
    assert judge.rising(flat)[1] and judge.rising(up[::-1])[1]
    assert judge.rising([*up[:200], *([0.2] * 100)])[1], "it fell at the end"
    assert judge.rising([0.95] * 300)[1] == [], "no higher is possible"
    assert judge.rising(up[:50])[2], "too short to be shown"


def test_a_step_done_again_counts_once() -> None:
    steps = [{"step": n, "life": 1} for n in (1, 2, 3)] + [{"step": n, "life": 2} for n in (2, 3, 4)]
    assert [(s["step"], s["life"]) for s in judge.on_the_path(steps)] == [(1, 1), (2, 2), (3, 2), (4, 2)]
