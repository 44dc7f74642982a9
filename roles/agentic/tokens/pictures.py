"""The pictures of a session: decoded and processed in a thread when they arrive, and named by digest in messages.

So histories stay short and are compared cheaply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from relax_rt.roles.agentic.tokens.types import Message
from relax_rt.roles.data.media.pictures import IMAGE, MAX_PICTURES, data_of, digest_in, is_picture
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.roles.data.media.image_processor import ImageProcessor, ProcessedImage

MAX_MEDIA_BYTES = 16 << 20
"""Of a session, where nobody says less: a message between roles holds them all."""


class Picture(NamedTuple):
    """An encoded picture, and the tokens that stand for it."""

    data: bytes
    tokens: tuple[int, ...]


class SessionPictures:
    """The pictures that a ledger was shown.

    Args:
        max_bytes: of all together, encoded.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._held: dict[str, Picture] = {}

    def add(self, looked: ProcessedImage) -> Message:
        """Hold a picture and return the part of a message that names it; see TokenLedger.show."""
        part = {"type": IMAGE, "digest": looked.digest}
        if looked.digest in self._held:
            return part
        if len(self._held) >= MAX_PICTURES:
            raise Refused("another picture", why=f"the episode has {MAX_PICTURES}, the bound", hint="show fewer")
        if self._bytes + len(looked.data) > self._max_bytes:
            why = f"with it the episode's pictures have {self._bytes + len(looked.data)} bytes, at most "
            hint = (
                "show fewer or smaller ones, or raise roles.env.media_kib (of programs roles.gateway.session_media_kib)"
            )
            raise Refused(f"a picture of {len(looked.data)} bytes", why=f"{why}{self._max_bytes}", hint=hint)
        # The engine computes its tensors again.
        self._held[looked.digest] = Picture(looked.data, looked.tokens)
        self._bytes += len(looked.data)
        return part

    def data(self, digests: Iterable[str]) -> dict[str, bytes]:
        """Return encoded pictures by digest."""
        return {digest: self._held[digest].data for digest in digests}

    def of(self, messages: Sequence[Message]) -> list[Picture]:
        """Return the pictures in messages, in order.

        Raises:
            Refused: one was not shown before.
        """
        parts = (
            part for message in messages if isinstance(message.get("content"), list) for part in message["content"]
        )
        found = []
        for part in parts:
            if is_picture(part):
                if (held := self._held.get(digest_in(part))) is None:
                    why = "the model's processor has not looked at it, or the model reads text alone"
                    raise Refused("a picture in a message", why=why)
                found.append(held)
        return found


_THREAD = ThreadPoolExecutor(1, "relax-pictures")
"""One thread: a caller with many large pictures delays others with pictures, and nobody else."""


def new_pictures(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the parts that are pictures not yet processed."""
    lists = (content for message in messages if isinstance(content := message.get("content"), list))
    return [part for parts in lists for part in parts if is_picture(part) and not digest_in(part)]


async def process_pictures(parts: Sequence[Mapping[str, Any]], image_processor: ImageProcessor) -> list[ProcessedImage]:
    """Decode and process pictures in a thread.

    Raises:
        Refused: one is no picture, or beyond a bound, and says which; or there are too many.
    """
    if len(parts) > MAX_PICTURES:
        raise Refused(f"{len(parts)} pictures", why=f"at most {MAX_PICTURES} are taken", hint="show fewer")
    loop = asyncio.get_running_loop()
    return [
        await loop.run_in_executor(_THREAD, _process, part, number, image_processor)
        for number, part in enumerate(parts, 1)
    ]


def _process(part: Mapping[str, Any], number: int, image_processor: ImageProcessor) -> ProcessedImage:
    try:
        return image_processor.process(data_of(part))
    except Refused as error:
        raise Refused(f"new picture {number}: {error.what}", why=error.why, hint=error.hint) from error


def with_digests(
    messages: Sequence[Message], looked: Sequence[ProcessedImage], show: Callable[[ProcessedImage], Message]
) -> list[Message]:
    """Return messages with new pictures replaced by their digests; they were processed in this order.

    Raises:
        Refused: the ledger takes no more of them.
    """
    following = iter(looked)

    def of(part: Any) -> Any:
        return show(next(following)) if is_picture(part) and not digest_in(part) else part

    return [
        {**message, "content": [of(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


async def ingest_pictures(
    messages: list[Message], image_processor: ImageProcessor | None, show: Callable[[ProcessedImage], Message]
) -> list[Message]:
    """Process the new pictures of messages and name them by digest, if the model takes pictures (`sight`).

    Args:
        show: TokenLedger.show.

    Raises:
        Refused: see `process_pictures` and `with_digests`.
    """
    if image_processor is None or not (parts := new_pictures(messages)):
        return messages
    return with_digests(messages, await process_pictures(parts, image_processor), show)
