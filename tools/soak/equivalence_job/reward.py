"""Rewards of the equivalence runs: the right one, and one that says nothing about the completion."""

from __future__ import annotations

import random


def right(completion: str, answer: str, finish_reason: str) -> float:
    """1 for the right sum and nothing else, ended by itself."""
    return float(finish_reason == "stop" and completion.strip() == answer)


def by_lot(completion: str, answer: str, finish_reason: str) -> float:
    """1 as often as at the middle of an undisturbed run, whatever the completion is: there is nothing to learn."""
    return float(random.random() < 0.45)
