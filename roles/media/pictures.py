"""Pictures on their way: as parts of messages, as encoded bytes, among tokens. Nothing here knows a model.

Whoever sends one is not trusted. Its bytes are counted before they are decoded, and it is looked at within bounds of
pixels and of form: a picture of one line may be small, and would be blown up beyond all bounds where a processor brings
its shorter side to a size.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from relax_rt.transport.errors import Refused

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 8 << 20
"""Of an encoded picture."""
MOST_PIXELS = 1 << 24
MOST_ASPECT = 32
"""Longer side over shorter."""
MOST_PICTURES = 64
"""Of one conversation."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
DIGEST_BYTES = 16
IMAGES = frozenset({"image_url", "input_image", "image"})
"""Types of parts that are pictures, in the APIs that we speak."""
IMAGE = "image"
"""Type of a part once its picture was looked at; its `digest` names it."""


class Shown(msgspec.Struct, frozen=True, array_like=True):
    """A picture among tokens: those at [start, end) stand for it, as the model's processor gave them.

    data: the encoded picture.
    """

    start: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]
    data: Annotated[bytes, msgspec.Meta(max_length=MOST_BYTES)]

    def moved(self, by: int) -> Shown:
        """The same in a sequence that has so many tokens more before it."""
        return Shown(self.start + by, self.end + by, self.data)


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """The same where the picture's bytes are elsewhere, by its digest."""

    start: int
    end: int
    digest: str


class Glance(NamedTuple):
    """Where tokens of a picture lie in a batch: token t of its sequence, first <= t < last, in column t + offset of a
    row."""

    row: int
    shown: Shown
    first: int
    last: int
    offset: int


def digest_of(data: bytes) -> str:
    """Names an encoded picture: 32 hex digits."""
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def identity(tokens: tuple[int, ...], media: Sequence[Shown]) -> tuple[int, ...]:
    """Tokens to be compared: alike only where pictures are, too. A picture's are a number of its own, below 0."""
    if not media:
        return tokens
    found = list(tokens)
    for one in media:
        number = -1 - int(digest_of(one.data)[:15], 16)
        found[one.start : one.end] = [number] * (one.end - one.start)
    return tuple(found)


def is_picture(part: Any) -> bool:
    """Whether a part of a message is a picture, looked at or not."""
    return isinstance(part, Mapping) and part.get("type") in IMAGES


def digest_in(part: Mapping[str, Any]) -> str:
    """Of a picture that was looked at; empty for others."""
    found = part.get("digest")
    return found if part.get("type") == IMAGE and isinstance(found, str) else ""


def data_of(part: Mapping[str, Any]) -> bytes:
    """The encoded picture in a part of a message, as OpenAI's APIs and Anthropic's have it.

    Raises:
        Refused: it has none, too large a one, or names one that would have to be fetched.
    """
    source = part.get("source")
    if isinstance(source, Mapping):
        given = source.get("data") if source.get("type") == "base64" else source.get("url")
        if source.get("type") == "base64" and isinstance(given, str):
            return _decoded(given)
    else:
        given = part.get("image_url", part.get("url"))
        given = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(given, str):
        why = f"it has no data; it has {', '.join(sorted(map(str, part)))[:80]}"
        raise Refused("a picture", why=why, hint="send it as data:image/png;base64,…")
    head, comma, data = given[:64].partition(",")
    if not head.startswith("data:"):
        scheme = head.partition(":")[0][:16]
        why = f"it is at a URL ({scheme}:), and nothing is fetched for a caller"
        raise Refused("a picture", why=why, hint="send it as data:image/png;base64,…")
    if not comma or not head.endswith(";base64"):
        raise Refused("a picture in a data: URL", why="it is not in base64", hint="send data:image/png;base64,…")
    return _decoded(given[len(given[:64]) - len(data) :])


def _decoded(text: str) -> bytes:
    if (nbytes := len(text) * 3 // 4) > MOST_BYTES:
        why = f"it has {nbytes} bytes, at most {MOST_BYTES} are taken"
        raise Refused("a picture", why=why, hint="scale it down: the model sees it small anyway")
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused("a picture", why=f"its base64 cannot be read: {error}") from error
    if not found:
        raise Refused("a picture", why="it is empty")
    return found


def opened(data: bytes) -> Image:
    """An encoded picture as RGB, turned as its camera says; of several frames the first. Blocks.

    Raises:
        Refused: it is none, or beyond a bound.
    """
    from PIL import Image as pillow
    from PIL import ImageOps

    hint = f"send {', '.join(FORMATS)}"
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as found:
            # The head alone was read: nothing is decoded yet.
            _check_size(*found.size)
            found.seek(0)
            return ImageOps.exif_transpose(found).convert("RGB")
    except Refused:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        why = f"it has far too many pixels, at most {MOST_PIXELS} are decoded"
        raise Refused("a picture", why=why, hint="scale it down") from error
    except MemoryError:
        raise
    except Exception as error:
        # Decoders raise what they like on bytes that are no picture.
        why = f"it cannot be read: {type(error).__name__}: {error}"[:200]
        raise Refused("a picture", why=why, hint=hint) from error


def _check_size(width: int, height: int) -> None:
    """Raises: Refused: too many pixels, or too long for its width."""
    what = f"a picture of {width} x {height}"
    if width * height > MOST_PIXELS:
        why = f"it has {width * height} pixels, at most {MOST_PIXELS} are decoded"
        raise Refused(what, why=why, hint="scale it down: the model sees it small anyway")
    if max(width, height) > MOST_ASPECT * min(width, height):
        why = f"its longer side is more than {MOST_ASPECT} times the shorter"
        raise Refused(what, why=why, hint="cut it: brought to the model's size it would not fit into memory")
