"""The prompts of a run as they were read, kept in its folder: a role that is started again has them at once."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from relax_rt.roles.data.items import PromptItem
from relax_rt.roles.data.source import DataReport, PromptSource
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.sections import DataTable

MAX_BYTES = 256 << 20
"""More than this is read anew each time."""


class Kept(msgspec.Struct, array_like=True, frozen=True):
    """What a file holds."""

    train: list[PromptItem]
    held_out: list[PromptItem]
    report: DataReport


def load_kept(data: DataTable, tokenizer: ChatTokenizer, *, seed: int, config_dir: Path, folder: Path) -> PromptSource:
    """PromptSource.load, or what an earlier call with the same data, tokenizer and code left in `folder`.

    Raises:
        RelaxError: see PromptSource.load. A file that is damaged or cannot be written is no error.
    """
    path = folder / f"prompts-{_key(data, tokenizer, config_dir)}.msgpack"
    if (kept := _read(path)) is not None:
        source = PromptSource(kept.train, kept.held_out, seed=seed, shuffle=data.shuffle, epochs=data.epochs)
        source.report = kept.report
        return source
    source = PromptSource.load(data, tokenizer, seed=seed, config_dir=config_dir)
    _keep(path, Kept(source.train, source.held_out, source.report))
    return source


def _key(data: DataTable, tokenizer: ChatTokenizer, config_dir: Path) -> str:
    """Everything that the items derive from."""
    file = []
    if data.path is not None:
        path = Path(data.path).expanduser()
        with suppress(OSError):
            found = (path if path.is_absolute() else config_dir / path).stat()
            file = [str(path), found.st_size, found.st_mtime_ns, found.st_ino]
    parts: list[Any] = [data.model_dump_json(), tokenizer.tokenizer_digest, tokenizer.template_digest, file]
    for package in ("relax-rt", "reasoning-gym", "transformers"):
        with suppress(metadata.PackageNotFoundError):
            parts.append(metadata.version(package))
    return xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(parts))


def _read(path: Path) -> Kept | None:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=Kept)
    except (OSError, msgspec.DecodeError):
        return None


def _keep(path: Path, kept: Kept) -> None:
    """Put it there whole, instead of those of other data; items that would come back as others are not kept."""
    try:
        encoded = msgspec.msgpack.encode(kept)
        if len(encoded) > MAX_BYTES or msgspec.msgpack.decode(encoded, type=Kept) != kept:
            return
    except (TypeError, msgspec.DecodeError):
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with suppress(OSError):
        try:
            temporary.write_bytes(encoded)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        for other in path.parent.glob("prompts-*.msgpack"):
            if other != path:
                other.unlink(missing_ok=True)
