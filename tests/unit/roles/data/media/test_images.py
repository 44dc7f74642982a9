"""Images in messages: what is taken, and what is turned away before it costs anything."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_vision import encoded_image, part

from relax_rt.roles.data.media.images import (
    MAX_ASPECT,
    MAX_BYTES,
    MAX_PIXELS,
    ImageSpan,
    decode_image,
    identity,
    image_digest,
    part_bytes,
)
from relax_rt.transport.rpc.errors import Refused

pillow = pytest.importorskip("PIL.Image")
DATA = encoded_image(1)
TEXT = base64.b64encode(DATA).decode()


@pytest.mark.parametrize(
    "given_",
    [
        part(DATA),
        {"type": "image_url", "image_url": f"data:image/png;base64,{TEXT}"},
        {"type": "input_image", "detail": "low", "image_url": f"data:;base64,{TEXT}"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": TEXT}},
        {"type": "image", "source": {"type": "url", "url": f"data:image/png;base64,{TEXT}"}},
    ],
)
def test_the_forms_of_all_apis_are_read(given_: dict[str, Any]) -> None:
    assert part_bytes(given_) == DATA


@pytest.mark.parametrize(
    ("given_", "why"),
    [
        ({"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}, "at a URL (https:)"),
        ({"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}, "nothing is fetched"),
        ({"type": "image", "source": {"type": "url", "url": "file:///etc/passwd"}}, "at a URL (file:)"),
        ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "it has no data"),
        ({"type": "input_image", "file_id": "f"}, "it has no data; it has file_id, type"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "not in base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,a b"}}, "base64 cannot be read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,äöü="}}, "base64 cannot be read"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "it is empty"),
        ({"type": "image_url", "image_url": 7}, "it has no data"),
    ],
)
def test_what_has_no_data_is_refused_and_nothing_is_fetched(given_: dict[str, Any], why: str) -> None:
    with pytest.raises(Refused) as caught:
        part_bytes(given_)
    assert why in str(caught.value) and len(str(caught.value)) < 300


def test_too_many_bytes_are_refused_before_they_are_decoded() -> None:
    url = "data:image/png;base64," + "!" * (MAX_BYTES * 4 // 3 + 8)
    with pytest.raises(Refused, match=f"at most {MAX_BYTES} are taken"):
        part_bytes({"type": "image_url", "image_url": {"url": url}})


def png(width: int, height: int, rows: bytes = b"") -> bytes:
    """A PNG whose head says this size, whatever its data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("size", [(4097, 4096), (10_000, 10_000), (12_000, 12_000), (60_000, 60_000)])
def test_an_image_bomb_is_not_decoded(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("it was decoded")

    monkeypatch.setattr(pillow.Image, "convert", never)
    with pytest.raises(Refused, match=f"{MAX_PIXELS}"):
        decode_image(png(*size))


def test_a_line_is_refused_that_would_be_blown_up() -> None:
    """Brought to a shorter side of 336, as CLIP's processors do, this one would have 84 million pixels."""
    with pytest.raises(Refused, match=f"more than {MAX_ASPECT} times"):
        decode_image(png(1 << 18, 1))
    assert decode_image(encoded_image(2, (MAX_ASPECT, 1))).size == (MAX_ASPECT, 1)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_images_of_all_forms_are_opened_as_rgb(form: str) -> None:
    found = decode_image(encoded_image(3, (24, 20), form))
    assert (found.mode, found.size) == ("RGB", (24, 20))


def test_a_camera_that_was_held_upright_is_believed() -> None:
    held, exif = io.BytesIO(), pillow.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    pillow.new("RGB", (24, 20)).save(held, "JPEG", exif=exif)
    assert decode_image(held.getvalue()).size == (20, 24)


@given(st.binary(max_size=300) | st.integers(0, len(DATA) // 2).map(lambda end: DATA[:end]))
def test_what_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        decode_image(data)


def test_other_forms_are_not_tried() -> None:
    held = io.BytesIO()
    pillow.new("RGB", (8, 8)).save(held, "TIFF")
    with pytest.raises(Refused, match="PNG, JPEG"):
        decode_image(held.getvalue())


spans = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from([b"a", b"b", b"c"])), max_size=5)


def laid_out(found: list[tuple[int, int, bytes]]) -> list[ImageSpan]:
    """Images with gaps between them."""
    media, at = [], 0
    for gap, length, data in found:
        media.append(ImageSpan(at + gap, at + gap + length, data))
        at += gap + length
    return media


@given(spans, spans)
def test_prompts_are_told_apart_by_their_images(one: list[Any], other: list[Any]) -> None:
    """Of two prompts of nothing but one token, beginnings are alike exactly as far as tokens and images are."""
    both = [laid_out(one), laid_out(other)]
    tokens = (7,) * 40
    named = [identity(tokens, media) for media in both]
    images = [
        [next((m.data for m in media if m.start <= at < m.end), b"") for at in range(len(tokens))] for media in both
    ]
    assert [a == b for a, b in zip(*named, strict=True)] == [a == b for a, b in zip(*images, strict=True)]
    assert all((number == 7) == (data == b"") for number, data in zip(named[0], images[0], strict=True))
    assert all(-(1 << 63) <= number < 1 << 63 for number in named[0])
    assert identity(tokens, ()) is tokens and image_digest(b"a") != image_digest(b"b")
