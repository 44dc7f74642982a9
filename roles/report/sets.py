"""Held-out sets in the account of a run: pass@k before and after."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax_rt.observe.text import count, number

MAIN = "held_out"


class SetScore(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of a set.

    Attributes:
        pass_at: by k: the value and the ends of its 95% interval.
        reward: mean, where a reward function judges; greedy: share of right greedy completions; None: not measured.
    """

    when: str
    step: int
    items: int
    samples: int
    pass_at: dict[str, tuple[float, float, float]]
    exact: float | None
    reward: float | None
    greedy: float | None


def set_of(record: Mapping[str, Any]) -> str:
    """The set that a record tells of; empty where the summary's other lines say all of it."""
    if record.get("kind") == "evaluation_set":
        return str(record.get("set", ""))
    samples = record.get("samples")
    several = isinstance(samples, int) and samples > 1
    return MAIN if several or "greedy" in record else ""


def read_score(record: Mapping[str, Any]) -> SetScore:
    """A record of an evaluation; what is not as it must be is left out."""
    ends = [_table(record, f"pass_at{end}") for end in ("", "_low", "_high")]
    greedy = _table(record, "greedy")
    return SetScore(
        when=str(record.get("when", "during")),
        step=int(_number(record, "step") or 0),
        items=int(_number(record, "items") or 0),
        samples=int(_number(record, "samples") or 1),
        pass_at={
            k: (value, low if low is not None else 0.0, high if high is not None else 1.0)
            for k in ends[0]
            if (value := _number(ends[0], k)) is not None
            for low, high in [(_number(ends[1], k), _number(ends[2], k))]
        },
        exact=_number(record, "exact"),
        reward=_number(record, "reward"),
        greedy=_number(greedy, "success" if "success" in greedy else "exact"),
    )


def summarise_sets(sets: Mapping[str, Sequence[SetScore]]) -> dict[str, Any]:
    """Of each set the evaluations `before`, `after` and `newest`; None for those that were not made."""
    return {
        name: {
            "before": _plain(next((s for s in scores if s.when == "before"), None)),
            "after": _plain(next((s for s in reversed(scores) if s.when == "after"), None)),
            "newest": _plain(next((s for s in reversed(scores) if s.when != "before"), None)),
        }
        for name, scores in sets.items()
    }


def set_lines(sets: Mapping[str, Any]) -> list[str]:
    """A line for each set."""
    return [f"{name}: {_line(one)}" for name, one in sets.items()]


def _line(one: Mapping[str, Any]) -> str:
    before, last = one["before"], one["after"] or one["newest"]
    shown = last or before
    parts = []
    for k, (value, low, high) in shown["pass_at"].items():
        first = f"{number(before['pass_at'][k][0], '.3f')} -> " if last and before and k in before["pass_at"] else ""
        parts.append(f"pass@{k} {first}{number(value, '.3f')} [{number(low, '.3f')}, {number(high, '.3f')}]")
    for key in ("greedy", "reward"):
        if shown[key] is not None:
            first = f"{number(before[key], '.3f')} -> " if last and before and before[key] is not None else ""
            parts.append(f"{key} {first}{number(shown[key], '.3f')}")
    each = f" x {shown['samples']}" if shown["samples"] > 1 else ""
    at = "" if one["after"] else f" at step {shown['step']}"
    return f"{', '.join(parts) or 'nothing measured'} on {count(shown['items'])} items{each}{at}"


def _plain(score: SetScore | None) -> dict[str, Any] | None:
    return None if score is None else msgspec.to_builtins(score)


def _table(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
