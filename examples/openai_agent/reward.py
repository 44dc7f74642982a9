"""How well the agent did, by what it printed and by the turns of the model."""

from __future__ import annotations

from typing import Any


def score(completion: str, answer: str, turns: list[dict[str, Any]]) -> dict[str, float]:
    """0.3 for having called the calculator, 0.7 for having printed the right number and nothing else."""
    said = [turn["text"] for turn in turns if turn["role"] == "assistant"]
    called = any("<tool_call>" in text and "</tool_call>" in text for text in said[:-1])
    return {"called": 0.3 * called, "right": 0.7 * (completion.strip() == answer)}
