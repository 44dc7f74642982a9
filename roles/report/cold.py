"""The cold start in the account of a run: its losses, first and last, read from the trainer's records."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from relax_rt.observe.text import count, number


class ColdStart(msgspec.Struct):
    """What the trainer said of a cold start.

    Attributes:
        phase: sft or dpo. of: steps that it was to make.
        losses, validation: by step; what a restart did again stands in place of what it threw away.
    """

    phase: str = ""
    of: int = 0
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}

    def take(self, record: Mapping[str, Any]) -> None:
        """Take in a record of kind `cold_start`."""
        step, of = record.get("step"), record.get("of")
        if not isinstance(step, int) or not isinstance(of, int):
            return
        self.phase, self.of = str(record.get("phase", "")), of
        for key, found in (("loss", self.losses), ("validation_loss", self.validation)):
            if isinstance(value := record.get(key), int | float):
                found[step] = float(value)


def summarise_cold(cold: ColdStart) -> dict[str, Any] | None:
    """Numbers of the phase; None: there was none."""
    if not cold.phase:
        return None
    return {
        "kind": cold.phase,
        "done": max([*cold.losses, *cold.validation], default=0),
        "of": cold.of,
        "loss": _ends(cold.losses),
        "validation_loss": _ends(cold.validation),
    }


def _ends(values: dict[int, float]) -> list[float] | None:
    steps = sorted(values)
    return [values[steps[0]], values[steps[-1]]] if steps else None


def cold_lines(cold: dict[str, Any] | None) -> list[str]:
    """The lines of the summary."""
    if cold is None:
        return []
    losses = [
        f"{name} {number(ends[0], '.4f')} -> {number(ends[1], '.4f')}"
        for name, ends in (("loss", cold["loss"]), ("validation loss", cold["validation_loss"]))
        if ends
    ]
    of = count(cold["of"])
    return [", ".join([f"{cold['kind']}, {count(cold['done'])} of {of} steps", *losses])]
