"""Answers of the data as text."""

from __future__ import annotations

import json
from typing import Any


def text_of(answer: Any) -> str:
    """An answer of any JSON type as text: text as it is, a float without a fraction as an integer, else JSON."""
    if isinstance(answer, str):
        return answer
    if answer is None:
        return ""
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53:
        return str(int(answer))
    return json.dumps(answer, ensure_ascii=False, default=str)


def listed(answer: Any) -> str:
    """As text_of, with the members of a list side by side: 1, 2, 3."""
    return ", ".join(text_of(one) for one in answer) if isinstance(answer, list | tuple) else text_of(answer)
