"""The canonical form of a question, its id, and the split that derives from it.

The form folds case, white space and Unicode compatibility, so that near-identical questions fall on the same side of
the held-out split. It is used for the split only: rows whose text differs are different prompts.
"""

from __future__ import annotations

import hashlib
import unicodedata


def canonical(question: str) -> str:
    """Return the question with case, white space and Unicode compatibility forms folded."""
    return " ".join(unicodedata.normalize("NFKC", question).casefold().split())


def question_hash(question: str) -> bytes:
    """blake2b-64 of the canonical question: 8 bytes, big-endian."""
    return hashlib.blake2b(canonical(question).encode(), digest_size=8, person=b"relax-item").digest()


def item_id(question: str) -> str:
    """Stable id of a question: blake2b-64 of its canonical form, 16 hex digits."""
    return question_hash(question).hex()


def held_out_below(share: float) -> float:
    """Questions whose hash, read as an integer, lies below this are held out."""
    return share * 2.0**64


def in_held_out(question: str, share: float) -> bool:
    """Return whether the question is held out: its id, as a fraction of 2^64, lies below `share`.

    It depends on the question alone, so that no seed, size or order moves a question between the splits, and a
    larger share holds out a superset.
    """
    return int.from_bytes(question_hash(question), "big") < held_out_below(share)
