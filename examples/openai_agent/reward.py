"""How well the agent did, by what it printed and by the turns of the model."""

from __future__ import annotations

import re
from typing import Any


def score(completion: str, answer: str, turns: list[dict[str, Any]]) -> dict[str, float]:
    """0.3 for having called the calculator, 0.3 for the right number in what it printed, 0.4 more if it is all."""
    said = [turn["text"] for turn in turns if turn["role"] == "assistant"]
    called = any("<tool_call>" in text and "</tool_call>" in text for text in said[:-1])
    told = answer in re.findall(r"\d+", completion)
    return {"called": 0.3 * called, "told": 0.3 * told, "alone": 0.4 * (completion.strip() == answer)}
