"""Images as message parts, as encoded bytes and as spans of tokens, independent of the model.

Senders are not trusted: bytes are counted before they are decoded, and pixels and aspect ratio are limited. A line of
few pixels would be scaled up without bound by a processor that brings the shorter side to a fixed size.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec

from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 8 << 20
"""Limit on an encoded image."""
MAX_PIXELS = 1 << 24
MAX_ASPECT = 32
"""Longer side over shorter."""
MAX_IMAGES = 64
"""Limit on one conversation."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
OTHER_FORMATS = {
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"<svg": "SVG",
    b"<?xml": "XML, as SVG is",
    b"%PDF": "PDF",
    b"8BPS": "PSD",
    b"\0\0\1\0": "ICO",
    b"v/1\1": "OpenEXR",
    b"\0\0\0\x0cJXL ": "JPEG XL",
    b"\xff\x0a": "JPEG XL",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
}
"""First bytes of formats that are refused by name."""
PNG_DEPTH_AT = 24
"""Offset of the bits per channel in a PNG's header."""
DIGEST_BYTES = 16
IMAGES = frozenset({"image_url", "input_image", "image"})
"""Types of message parts that are images, in OpenAI's and Anthropic's APIs."""
IMAGE = "image"
"""Type of a message part whose image was processed; its `digest` names it."""


class ImageSpan(msgspec.Struct, frozen=True, array_like=True):
    """An image among tokens: [start, end) are its tokens, as the model's processor gave them.

    data: the encoded image.
    """

    start: Annotated[int, msgspec.Meta(ge=0)]
    end: Annotated[int, msgspec.Meta(ge=0)]
    data: Annotated[bytes, msgspec.Meta(max_length=MAX_BYTES)]

    def shifted(self, by: int) -> ImageSpan:
        """Return the span in a sequence that has `by` more tokens before it."""
        return ImageSpan(self.start + by, self.end + by, self.data)


class ImageRef(msgspec.Struct, frozen=True, array_like=True):
    """An ImageSpan whose bytes are stored elsewhere, by digest."""

    start: int
    end: int
    digest: str


class BatchImage(NamedTuple):
    """The part of an image in a batch: token t of its sequence, first <= t < last, in column t + offset of a row."""

    row: int
    span: ImageSpan
    first: int
    last: int
    offset: int


def image_digest(data: bytes) -> str:
    """Return the digest that names an encoded image: 32 hex digits."""
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def identity(tokens: tuple[int, ...], media: Sequence[ImageSpan]) -> tuple[int, ...]:
    """Return tokens for comparison: those of an image become a negative number of its own."""
    if not media:
        return tokens
    found = list(tokens)
    for one in media:
        number = -1 - int(image_digest(one.data)[:15], 16)
        found[one.start : one.end] = [number] * (one.end - one.start)
    return tuple(found)


def is_image(part: Any) -> bool:
    """Return whether a part of a message is an image, processed or not."""
    return isinstance(part, Mapping) and part.get("type") in IMAGES


def part_digest(part: Mapping[str, Any]) -> str:
    """Return the digest in a part whose image was processed; empty for other parts."""
    found = part.get("digest")
    return found if part.get("type") == IMAGE and isinstance(found, str) else ""


def part_bytes(part: Mapping[str, Any]) -> bytes:
    """Return the encoded image in a message part of OpenAI's or Anthropic's APIs.

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
        raise Refused("an image", why=why, hint="send it as data:image/png;base64,…")
    head, comma, data = given[:64].partition(",")
    if not head.startswith("data:"):
        scheme = head.partition(":")[0][:16]
        why = f"it is at a URL ({scheme}:), and nothing is fetched for a caller"
        raise Refused("an image", why=why, hint="send it as data:image/png;base64,…")
    if not comma or not head.endswith(";base64"):
        raise Refused("an image in a data: URL", why="it is not in base64", hint="send data:image/png;base64,…")
    return _decoded(given[len(given[:64]) - len(data) :])


def _decoded(text: str) -> bytes:
    if (nbytes := len(text) * 3 // 4) > MAX_BYTES:
        why = f"it has {nbytes} bytes, at most {MAX_BYTES} are taken"
        raise Refused("an image", why=why, hint="scale it down: the model sees it small anyway")
    try:
        found = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused("an image", why=f"its base64 cannot be read: {error}") from error
    if not found:
        raise Refused("an image", why="it is empty")
    return found


def decode_image(data: bytes) -> Image:
    """Decode an image to 8-bit RGB, as a viewer on a white page would show it. Blocks.

    The camera's orientation is applied, transparent parts show white, 16-bit values are scaled to 8 bits, and colours
    with an ICC profile are converted to sRGB. Of an animation, the first frame is taken.

    Raises:
        Refused: the bytes are no image of FORMATS, or it exceeds a limit.
    """
    from PIL import Image as pillow
    from PIL import ImageOps

    hint = f"send {', '.join(FORMATS)}"
    if name := _other_format(data):
        raise Refused("an image", why=f"it is {name}, which is not decoded", hint=hint)
    try:
        with pillow.open(io.BytesIO(data), formats=FORMATS) as found:
            # Only the header was read: nothing is decoded yet.
            width, height = found.size
            what = f"an image of {width} x {height}"
            if width * height > MAX_PIXELS:
                why = f"it has {width * height} pixels, at most {MAX_PIXELS} are decoded"
                raise Refused(what, why=why, hint="scale it down: the model sees it small anyway")
            if max(width, height) > MAX_ASPECT * min(width, height):
                why = f"its longer side is more than {MAX_ASPECT} times the shorter"
                raise Refused(what, why=why, hint="cut it: brought to the model's size it would not fit into memory")
            found.seek(0)
            if found.format == "PNG":
                _scale_colour_key(found, depth=data[PNG_DEPTH_AT])
            return _to_srgb(ImageOps.exif_transpose(found))
    except Refused:
        raise
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        why = f"it has far too many pixels, at most {MAX_PIXELS} are decoded"
        raise Refused("an image", why=why, hint="scale it down") from error
    except MemoryError:
        raise
    except Exception as error:
        # Decoders raise what they like on bytes that are no image.
        why = f"it cannot be read: {type(error).__name__}: {error}"[:200]
        raise Refused("an image", why=why, hint=hint) from error


def _other_format(data: bytes) -> str:
    """Name a common format that is not in FORMATS; empty for all else."""
    head = data[:64].lstrip()
    if data[4:8] == b"ftyp":
        return {b"avif": "AVIF", b"avis": "AVIF"}.get(data[8:12], "HEIC or a video")
    return next((name for magic, name in OTHER_FORMATS.items() if head.startswith(magic)), "")


def _scale_colour_key(found: Image, *, depth: int) -> None:
    """Bring a PNG's transparent colour to the scale of the decoded pixels: Pillow leaves it at that of the file."""
    key = found.info.get("transparency")
    if found.mode == "L" and isinstance(key, int) and depth < 8:
        found.info["transparency"] = key * 255 // ((1 << depth) - 1)
    elif found.mode == "RGB" and isinstance(key, tuple) and depth == 16:
        # Pillow decodes such pixels to their high bytes.
        found.info["transparency"] = tuple(value >> 8 for value in key)


def _to_srgb(found: Image) -> Image:
    """Return a decoded image as sRGB on white."""
    from PIL import Image as pillow

    profile, size = found.info.get("icc_profile"), found.size
    if found.mode.startswith("I"):
        found = _eight_bits(found)
    if found.mode in ("RGBA", "LA", "PA") or "transparency" in found.info:
        drawn = found.convert("RGBA")
        found = pillow.new("RGB", size, "white")
        found.paste(drawn, mask=drawn.getchannel("A"))
    elif found.mode == "P":
        found = found.convert("RGB")
    if profile and (managed := _colour_managed(found, profile)) is not None:
        return managed
    return found.convert("RGB")


def _eight_bits(found: Image) -> Image:
    """Scale 16-bit grey values to 8 bits; values of the transparent colour become white."""
    import numpy as np
    from PIL import Image as pillow

    values = np.asarray(found).astype(np.uint32)
    scaled = (values.clip(0, 65535) * 255 + 32767) // 65535
    if (key := found.info.get("transparency")) is not None:
        scaled[values == key] = 255
    return pillow.fromarray(scaled.astype(np.uint8))


def _colour_managed(found: Image, profile: bytes) -> Image | None:
    """Convert colours from the image's ICC profile to sRGB; None where the profile is sRGB or cannot be used."""
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "sRGB" in ImageCms.getProfileDescription(source):
            return None
        return ImageCms.profileToProfile(found, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError, ImportError):
        # Damaged, for other channels than the image's, or Pillow was built without littlecms: viewers ignore it, too.
        return None
