"""Messages as they come: their pictures are looked at, in a thread, and stand there by digest from then on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from relax_rt.roles.agentic.tokens import Message, TokenLedger
from relax_rt.roles.data.media.pictures import MOST_PICTURES, data_of, digest_in, is_picture
from relax_rt.roles.data.media.sight import Looked, Sight
from relax_rt.transport.rpc.errors import Refused

_LOOKING = ThreadPoolExecutor(1, "relax-pictures")
"""One thread: whoever sends many large pictures holds up others that send some, and nobody else."""


def new_pictures(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Parts that are pictures nobody has looked at yet."""
    lists = (content for message in messages if isinstance(content := message.get("content"), list))
    return [part for parts in lists for part in parts if is_picture(part) and not digest_in(part)]


async def look_at(parts: Sequence[Mapping[str, Any]], sight: Sight) -> list[Looked]:
    """Decode and process them.

    Raises:
        Refused: one is no picture, or beyond a bound, and says which; or there are too many.
    """
    if len(parts) > MOST_PICTURES:
        raise Refused(f"{len(parts)} pictures", why=f"at most {MOST_PICTURES} are taken", hint="show fewer")
    loop = asyncio.get_running_loop()
    return [await loop.run_in_executor(_LOOKING, _look, part, number, sight) for number, part in enumerate(parts, 1)]


def _look(part: Mapping[str, Any], number: int, sight: Sight) -> Looked:
    try:
        return sight.look(data_of(part))
    except Refused as error:
        raise Refused(f"new picture {number}: {error.what}", why=error.why, hint=error.hint) from error


def with_digests(messages: Sequence[Message], looked: Sequence[Looked], ledger: TokenLedger) -> list[Message]:
    """Messages whose new pictures were looked at, in this order.

    Raises:
        Refused: the ledger takes no more of them.
    """
    following = iter(looked)

    def of(part: Any) -> Any:
        return ledger.show(next(following)) if is_picture(part) and not digest_in(part) else part

    return [
        {**message, "content": [of(part) for part in content]}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


async def looked_at(messages: list[Message], ledger: TokenLedger) -> list[Message]:
    """The same messages, with pictures by their digests where the ledger's model sees.

    Raises:
        Refused: see `look_at` and `with_digests`.
    """
    if (sight := ledger.sight) is None or not (parts := new_pictures(messages)):
        return messages
    return with_digests(messages, await look_at(parts, sight), ledger)
