"""Answers of the data as the text that rewards compare with."""

from __future__ import annotations

from typing import Any

from relax_rt.roles.data.items import answer_text


def listed(answer: Any) -> str:
    """As answer_text, with the members of a list side by side: 1, 2, 3."""
    return ", ".join(answer_text(one) for one in answer) if isinstance(answer, list | tuple) else answer_text(answer)
