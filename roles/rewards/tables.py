"""The table of a generative judge."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_rt.config.schema import Seconds, Table

NUMBER = r"(-?\d+(?:\.\d+)?)"


class JudgeTable(Table):
    """What the generative judge of [roles.genrm] is asked, and how its words are read."""

    prompt: str
    """The user message: {question}, {completion} and {answer} are filled in, and keys of the item's metadata."""
    system: str | None = None
    """System message put before it."""
    pattern: str = NUMBER
    """Regular expression of the verdict; its last match counts, and of that the first group."""
    words: dict[str, float] = Field(default_factory=dict)
    """Verdicts in words: { yes = 1.0, no = 0.0 }, whatever their case. Empty: verdicts are numbers."""
    lowest: float = 0.0
    """A number of this or less is the verdict 0."""
    highest: float = 1.0
    """A number of this or more is the verdict 1; between the two it is in proportion."""
    otherwise: float | None = None
    """The verdict where nothing in the judge's words matches; unset: the sample fails and is made again."""
    samples: Annotated[int, Field(ge=1, le=64)] = 1
    """Verdicts of each completion; their mean counts."""
    temperature: Annotated[float, Field(ge=0, le=10)] = 0.0
    """0 is greedy: the same words always get the same verdict."""
    max_new_tokens: Annotated[int, Field(ge=1, le=131_072)] = 64
    """Of the judge's words."""
    timeout_s: Seconds = 120.0
    """For one verdict, the wait for a judge included. A sample whose verdict does not come fails, and is made again."""
