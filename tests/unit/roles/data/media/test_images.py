"""Images in messages: what is taken, and what is turned away before it costs anything."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from typing import Any

import numpy as np
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


image = pytest.importorskip("PIL.Image")
cms = pytest.importorskip("PIL.ImageCms")

GREY, RGB, PALETTE, GREY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
WHITE, BLACK, RED, BLUE = (255, 255, 255), (0, 0, 0), (255, 0, 0), (0, 0, 255)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def one_row_png(depth: int, colour: int, row: bytes, width: int, *extra: bytes) -> bytes:
    """A PNG of one row of samples, with what comes before them."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, 1, depth, colour, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(extra) + data + chunk(b"IEND", b"")


def words(*values: int) -> bytes:
    return struct.pack(f">{len(values)}H", *values)


def key(*values: int) -> bytes:
    """The colour that is transparent."""
    return chunk(b"tRNS", words(*values))


def pixels(data: bytes) -> list[tuple[int, ...]]:
    """The first row."""
    found = decode_image(data)
    assert found.mode == "RGB"
    return [tuple(pixel) for pixel in np.asarray(found)[0].tolist()]


def grey(*values: int) -> list[tuple[int, ...]]:
    return [(value,) * 3 for value in values]


def saved(found: Any, form: str = "PNG", **options: Any) -> bytes:
    held = io.BytesIO()
    found.save(held, form, **options)
    return held.getvalue()


def drawn(mode: str, *colours: Any) -> Any:
    """An image of one row."""
    found = image.new(mode, (len(colours), 1))
    for x, colour in enumerate(colours):
        found.putpixel((x, 0), colour)
    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0, 0x4000, 0x8000, 0xFFFF), (0, 64, 128, 255)),
        ((255, 256, 257, 300), (1, 1, 1, 1)),
        ((128, 129, 385, 386), (0, 1, 1, 2)),
        ((0xFF00, 0xFFFE, 0xFF7E, 0xFF7F), (254, 255, 254, 255)),
        ((1000, 2000, 30_000, 60_000), (4, 8, 117, 233)),
    ],
)
def test_sixteen_bits_of_grey_are_scaled_to_eight(values: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert pixels(one_row_png(16, GREY, words(*values), 4)) == grey(*expected)
    assert pixels(saved(image.fromarray(np.array([values], np.uint16)))) == grey(*expected)


def test_sixteen_bits_of_grey_are_turned_as_the_camera_says() -> None:
    exif = image.Exif()
    exif[0x0112] = 3  # half a turn
    found = image.fromarray(np.array([[0, 0x4000, 0x8000]], np.uint16))
    assert pixels(saved(found, exif=exif)) == grey(128, 64, 0)


CLEAR = (0, 0, 0, 0)
PALETTE_OF_TWO = chunk(b"PLTE", bytes([*BLACK, *RED]))
ANIMATED = {"save_all": True, "append_images": [image.new("RGBA", (2, 1), BLUE)]}


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        pytest.param(saved(drawn("RGBA", CLEAR, (0, 0, 0, 255))), [WHITE, BLACK], id="RGBA"),
        pytest.param(saved(drawn("RGBA", (255, 0, 0, 51), CLEAR)), [(255, 204, 204), WHITE], id="partly"),
        pytest.param(saved(drawn("LA", (0, 0), (0, 255), (0, 127))), grey(255, 0, 128), id="LA"),
        pytest.param(saved(drawn("RGBA", CLEAR, (*RED, 255)), "WEBP", lossless=True), [WHITE, RED], id="WebP"),
        pytest.param(saved(drawn("RGBA", CLEAR, (*RED, 255)), "GIF"), [WHITE, RED], id="GIF"),
        pytest.param(saved(drawn("RGBA", CLEAR, (*RED, 255)), "GIF", **ANIMATED), [WHITE, RED], id="animated GIF"),
        pytest.param(saved(drawn("RGBA", CLEAR, (*RED, 255)), **ANIMATED), [WHITE, RED], id="APNG"),
        pytest.param(saved(drawn("RGBA", CLEAR, (*RED, 255)), "WEBP", lossless=True, **ANIMATED), [WHITE, RED]),
        pytest.param(
            one_row_png(8, PALETTE, b"\0\1", 2, PALETTE_OF_TWO, chunk(b"tRNS", b"\0")), [WHITE, RED], id="palette"
        ),
        pytest.param(
            one_row_png(8, PALETTE, b"\0\1", 2, PALETTE_OF_TWO, chunk(b"tRNS", b"\xff\x33")),
            [BLACK, (255, 204, 204)],
            id="palette, partly",
        ),
        pytest.param(
            one_row_png(1, PALETTE, b"\x40", 2, PALETTE_OF_TWO, chunk(b"tRNS", b"\0")), [WHITE, RED], id="palette 1"
        ),
        pytest.param(one_row_png(8, GREY, b"\x0a\xc8", 2, key(10)), grey(255, 200), id="grey key"),
        pytest.param(one_row_png(1, GREY, b"\x40", 2, key(0)), grey(255, 255), id="grey key of 1 bit"),
        pytest.param(one_row_png(2, GREY, b"\x1b", 4, key(1)), grey(0, 255, 170, 255), id="grey key of 2 bits"),
        pytest.param(one_row_png(4, GREY, b"\x05", 2, key(5)), grey(0, 255), id="grey key of 4 bits"),
        pytest.param(one_row_png(16, GREY, words(10, 0xC000), 2, key(10)), grey(255, 191), id="grey key of 16 bits"),
        pytest.param(one_row_png(16, GREY, words(0x4001, 0x4000), 2, key(0x4000)), grey(64, 255), id="near the key"),
        pytest.param(one_row_png(8, RGB, bytes([1, 2, 3, 4, 5, 6]), 2, key(1, 2, 3)), [WHITE, (4, 5, 6)], id="RGB key"),
        pytest.param(
            one_row_png(16, RGB, words(256, 512, 768, 0x4000, 0, 0), 2, key(256, 512, 768)),
            [WHITE, (64, 0, 0)],
            id="RGB key of 16 bits",
        ),
        pytest.param(
            one_row_png(16, RGB_ALPHA, words(0xFFFF, 0, 0, 0x3333, 0, 0, 0, 0), 2),
            [(255, 204, 204), WHITE],
            id="RGBA of 16",
        ),
        pytest.param(one_row_png(16, GREY_ALPHA, words(0x4000, 0xFFFF, 0, 0), 2), grey(64, 255), id="LA of 16 bits"),
    ],
)
def test_what_is_transparent_shows_a_white_page(data: bytes, expected: list[tuple[int, ...]]) -> None:
    assert pixels(data) == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (one_row_png(16, RGB, words(0x4000, 0x8000, 0xFFFF), 1), [(64, 128, 255)]),
        (one_row_png(1, GREY, b"\x50", 4), grey(0, 255, 0, 255)),
        (one_row_png(2, GREY, b"\x1b", 4), grey(0, 85, 170, 255)),
        (one_row_png(4, GREY, b"\x05", 2), grey(0, 85)),
        (saved(image.new("1", (1, 1), 1)), [WHITE]),
        (saved(image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100), [RED] * 16),
        (saved(image.new("CMYK", (16, 16), (0, 0, 0, 255)), "JPEG", quality=100), [BLACK] * 16),
        (saved(image.new("L", (8, 8), 100), "JPEG"), grey(*[100] * 8)),
        (saved(drawn("RGB", RED, WHITE)), [RED, WHITE]),
        (saved(drawn("RGBA", (1, 2, 3, 255), (*RED, 255))), [(1, 2, 3), RED]),
    ],
)
def test_other_modes_are_as_they_were(data: bytes, expected: list[tuple[int, ...]]) -> None:
    assert pixels(data) == expected


def swapped_profile() -> bytes:
    """An ICC profile whose red is sRGB's blue and the reverse."""
    data = bytearray(cms.ImageCmsProfile(cms.createProfile("sRGB")).tobytes())
    (count,) = struct.unpack_from(">I", data, 128)
    for at in range(132, 132 + 12 * count, 12):
        name = bytes(data[at : at + 4])
        data[at : at + 4] = {b"rXYZ": b"bXYZ", b"bXYZ": b"rXYZ"}.get(name, name)
    return bytes(data).replace("sRGB built-in".encode("utf-16-be"), "swapped built".encode("utf-16-be"))


SWAPPED = swapped_profile()
FLAT_RED = image.new("RGB", (16, 16), RED)


@pytest.mark.parametrize(
    "data",
    [
        saved(FLAT_RED, icc_profile=SWAPPED),
        saved(FLAT_RED, "JPEG", quality=100, icc_profile=SWAPPED),
        saved(FLAT_RED, "WEBP", lossless=True, icc_profile=SWAPPED),
        saved(FLAT_RED.convert("RGBA"), icc_profile=SWAPPED),
        saved(FLAT_RED.convert("P"), icc_profile=SWAPPED),
        saved(FLAT_RED.convert("RGBA"), icc_profile=SWAPPED, **ANIMATED),
    ],
)
def test_colours_are_those_that_the_profile_says(data: bytes) -> None:
    (found,) = set(pixels(data))
    assert max(abs(a - b) for a, b in zip(found, BLUE, strict=True)) <= 2, found


@pytest.mark.parametrize("profile", [b"x", SWAPPED[:200], SWAPPED[:-300], b"\0" * 500])
def test_a_profile_that_cannot_be_used_is_left_out(profile: bytes) -> None:
    assert set(pixels(saved(FLAT_RED, icc_profile=profile))) <= {RED, BLUE}
    assert pixels(saved(image.new("L", (1, 1), 100), icc_profile=SWAPPED)) == grey(100)
    assert pixels(saved(image.new("CMYK", (16, 16)), "JPEG", icc_profile=SWAPPED)) == [WHITE] * 16


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (saved(image.new("F", (4, 4), 0.5), "TIFF"), "TIFF"),
        (saved(image.new("RGB", (4, 4)), "TIFF", big_tiff=False), "TIFF"),
        (saved(image.new("RGB", (16, 16)), "ICO"), "ICO"),
        (b"\n<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"<?xml version='1.0'?><svg/>", "SVG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"\0\0\0\x1cftypavif\0\0\0\0", "AVIF"),
        (b"\0\0\0\x24ftypheic\0\0\0\0", "HEIC"),
        (b"8BPS\0\1", "PSD"),
    ],
)
def test_formats_that_are_not_decoded_are_refused_by_name(data: bytes, name: str) -> None:
    with pytest.raises(Refused, match=name) as caught:
        decode_image(data)
    assert "send PNG, JPEG, WEBP, GIF, BMP" in str(caught.value)
