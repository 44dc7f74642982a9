"""The canonical form of a question, its id, and the split that derives from it."""

from __future__ import annotations

import hashlib
import unicodedata


def canonical(question: str) -> str:
    """Questions that differ only in case, white space or Unicode form are the same one."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def item_id(question: str) -> str:
    """Stable id of a question: blake2b-64 of its canonical form, 16 hex digits."""
    return hashlib.blake2b(canonical(question).encode(), digest_size=8, person=b"relax-item").hexdigest()


def in_held_out(question: str, share: float) -> bool:
    """Whether the question is held out: its id, as a fraction of 2^64, lies below `share`.

    It depends on the question alone, so that no seed, size or order moves a question between the splits, and a
    larger share holds out a superset.
    """
    return int(item_id(question), 16) < share * 2.0**64
