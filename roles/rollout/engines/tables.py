"""The table for engines that share a device with the trainer."""

from __future__ import annotations

from typing import Literal

from relax_rt.config.schema import Seconds, Table

Mode = Literal["asynchronous", "colocate", "hybrid"]
SHARING: frozenset[Mode] = frozenset({"colocate", "hybrid"})
"""Modes in which engines and trainer have their device in turns."""


class ColocationTable(Table):
    """How long engines may take over turns, with mode = "colocate" or "hybrid"."""

    give_way_s: Seconds = 150.0
    """To end what is in flight, tokens kept, and to give memory back. An engine that takes longer ends and is started
    again."""
    take_back_s: Seconds = 180.0
    """To take memory again and to have the newest weights; the same holds."""
