"""Names of slabs, which say whose memory it is: ``<slot>-<epoch>-<n>.slab``. Standard library only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_rt.transport.rpc.identity import Incarnation

SPILL = "spill"
"""Owner in the names of slabs that are files on the broker's disk."""
SPILL_PREFIX = SPILL + "-"
"""Names of files on the broker's disk begin with it; no other slab's does."""
_SLAB = re.compile(r"[A-Za-z0-9_.-]{1,200}-\d{1,20}-\d{1,20}\.slab")
_SPILLED = re.compile(r"spill-[A-Za-z0-9_.-]{1,200}")
_SLOT = re.compile(r"[A-Za-z0-9_.-]{1,100}/\d{1,9}")


def owner_key(who: Incarnation) -> str:
    """How an incarnation is named in slab names."""
    return f"{who.slot.replace('/', '-')}-{who.epoch}"


def slab_name(who: Incarnation, n: int) -> str:
    """``rollout-0-7-1.slab``: slot, epoch, running number."""
    return f"{owner_key(who)}-{n}.slab"


def owner_of(slab: str) -> str:
    """The owner's key in a slab's name."""
    return slab.rpartition("-")[0]


def is_slab_name(name: str) -> bool:
    """Whether an incarnation's slab can have this name."""
    return not is_spilled(name) and _SLAB.fullmatch(name) is not None


def is_spill_name(name: str) -> bool:
    """Whether a file of spilled payload can have this name."""
    return _SPILLED.fullmatch(name) is not None


def is_spilled(slab: str) -> bool:
    """Whether the slab of this name is a file on the broker's disk."""
    return slab.startswith(SPILL_PREFIX)


def unfit_slot(who: Incarnation) -> str:
    """Why the incarnation's slot cannot stand in slab names; empty if it can.

    With such a slot no two incarnations have the same key.
    """
    if not _SLOT.fullmatch(who.slot):
        return "a slot's name is letters, digits, _ . - then / and a number"
    if is_spilled(owner_key(who)):
        return f"'{SPILL}' is how files of spilled payloads are named"
    return ""
