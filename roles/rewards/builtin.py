"""Reward functions ready to be named in `reward.function`, as `relax_rt.roles.rewards.builtin:integer`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relax_rt.roles.data.items import answer_text
from relax_rt.roles.evaluation.scoring import bare_integer, last_integer, squeeze
from relax_rt.roles.rewards.loader import UnreadGold

FORMAT, RIGHT = 0.3, 0.7


def _gold(answer: Any) -> int:
    value = bare_integer(answer_text(answer))
    if value is None:
        raise UnreadGold(answer, "it is not an integer")
    return value


def integer(completion: str, answer: Any, finish_reason: str = "stop") -> dict[str, float]:
    """0.3 for a completion that is an integer and nothing else and ended by itself, 0.7 more if it is the answer."""
    right, value = _gold(answer), bare_integer(completion)
    formatted = value is not None and finish_reason == "stop"
    return {"format": FORMAT * formatted, "right": RIGHT * (formatted and value == right)}


def lenient_integer(completion: str, answer: Any) -> float:
    """1 if the last number anywhere in the completion is the answer, an integer."""
    return float(last_integer(completion) == _gold(answer))


def exact(completion: str, answer: Any) -> float:
    """1 if the completion is the answer, white space aside."""
    return float(squeeze(completion) == squeeze(answer_text(answer)))


def verifier(completion: str, answer: str, score: Callable[[str], float]) -> float:
    """The reasoning-gym task's own verdict, 0 to 1."""
    return score(completion.strip())


def judged(completion: str, answer: str, verdict: float) -> dict[str, float]:
    """The verdict of the generative judge, 0 to 1: what `reward.function = "genrm"` means."""
    return {"verdict": verdict}
