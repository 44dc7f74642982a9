"""The images of a session: decoded and processed in a thread when they arrive, then named by digest in messages.

So histories stay short and are compared cheaply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_rt.roles.agentic.tokens.types import Message
from relax_rt.roles.data.media.images import IMAGE, MAX_IMAGES, is_image, part_bytes, part_digest
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.roles.data.media.image_processor import ImageProcessor, ProcessedImage

MAX_MEDIA_BYTES = 16 << 20
"""Default limit on the encoded images of a session: a message between roles holds them all."""
_THREAD = ThreadPoolExecutor(1, "relax-images")
"""One thread: a caller with many large images delays only others with images."""


class EncodedImage(NamedTuple):
    """An encoded image, and its tokens."""

    data: bytes
    tokens: tuple[int, ...]


class SessionImages:
    """The images that were added to a ledger.

    Args:
        max_bytes: of all together, encoded.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._by_digest: dict[str, EncodedImage] = {}

    def add(self, image: ProcessedImage) -> Message:
        """Store an image and return the message part that names it; see TokenLedger.add_image."""
        part = {"type": IMAGE, "digest": image.digest}
        if image.digest in self._by_digest:
            return part
        if len(self._by_digest) >= MAX_IMAGES:
            raise Refused("another image", why=f"the episode has {MAX_IMAGES}, the limit", hint="show fewer")
        if (total := self._bytes + len(image.data)) > self._max_bytes:
            why = f"with it the episode's images have {total} bytes, at most {self._max_bytes}"
            hint = "show fewer or smaller ones, or raise roles.env.media_kib "
            hint += "(of programs roles.gateway.session_media_kib)"
            raise Refused(f"an image of {len(image.data)} bytes", why=why, hint=hint)
        # Without its tensors: the engine computes them again.
        self._by_digest[image.digest] = EncodedImage(image.data, image.tokens)
        self._bytes = total
        return part

    def data(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return encoded images by digest."""
        return {digest: self._by_digest[digest].data for digest in digests}

    def in_messages(self, messages: Sequence[Message]) -> list[EncodedImage]:
        """Return the images in messages, in order.

        Raises:
            Refused: one was not added before.
        """
        found = []
        for part in _parts(messages):
            if is_image(part):
                if (image := self._by_digest.get(part_digest(part))) is None:
                    why = "the model's processor has not processed it, or the model reads text alone"
                    raise Refused("an image in a message", why=why)
                found.append(image)
        return found


def _parts(messages: Sequence[Mapping[str, Any]]) -> Iterable[Any]:
    return (part for message in messages if isinstance(message.get("content"), list) for part in message["content"])


def new_images(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts that are images not yet processed."""
    return [part for part in _parts(messages) if is_image(part) and not part_digest(part)]


async def process_images(parts: Sequence[Mapping[str, Any]], image_processor: ImageProcessor) -> list[ProcessedImage]:
    """Decode and process images in a thread.

    Raises:
        Refused: one is no image or exceeds a limit (says which), or there are too many.
    """
    if len(parts) > MAX_IMAGES:
        raise Refused(f"{len(parts)} images", why=f"at most {MAX_IMAGES} are taken", hint="show fewer")
    loop = asyncio.get_running_loop()
    processed: list[ProcessedImage] = []

    def process(part: Mapping[str, Any]) -> ProcessedImage:
        return image_processor.process(part_bytes(part))

    for number, part in enumerate(parts, 1):
        try:
            processed.append(await loop.run_in_executor(_THREAD, process, part))
        except Refused as error:
            raise Refused(f"new image {number}: {error.what}", why=error.why, hint=error.hint) from error
    return processed


def replace_images(
    messages: Sequence[Message], images: Sequence[ProcessedImage], add_image: Callable[[ProcessedImage], Message]
) -> list[Message]:
    """Return messages with new images replaced by their digests; they were processed in this order.

    Raises:
        Refused: the ledger takes no more of them.
    """
    following = iter(images)

    def replace(part: Any) -> Any:
        return add_image(next(following)) if is_image(part) and not part_digest(part) else part

    return [
        {**message, "content": [replace(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


async def ingest_images(
    messages: list[Message], image_processor: ImageProcessor | None, add_image: Callable[[ProcessedImage], Message]
) -> list[Message]:
    """Process the new images of messages and name them by digest, if the model takes images (`image_processor`).

    Args:
        add_image: TokenLedger.add_image.

    Raises:
        Refused: see `process_images` and `replace_images`.
    """
    if image_processor is None or not (parts := new_images(messages)):
        return messages
    return replace_images(messages, await process_images(parts, image_processor), add_image)
