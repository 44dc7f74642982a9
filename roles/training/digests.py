"""Digests of a checkpoint's files: made by the processes that write them, compared before a trainer goes on
from them.

They find torn, flipped and mixed-up bytes; they are no defence against an attacker.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import xxhash

from relax_rt.transport.rpc.errors import Corrupt

CHUNK_BYTES = 1 << 20
"""Read at a time, into the same memory: it stays in the processor's cache, and the digest is made without the GIL."""
TOLD_BYTES = 64 << 20
"""Of a file, between two words on how its digest gets on."""
AT_ONCE = 4
"""Files that are compared at the same time: disks and network file systems are faster then."""
BESIDE = ".digest"
"""Behind the name of a file: there lies its digest, until the checkpoint is complete."""


class FileDigest(msgspec.Struct, frozen=True):
    """A file's size, and the xxh3-128 of its bytes, hex."""

    bytes: int
    xxh3_128: str


def digest_of(path: Path, done: Callable[[int], object] = lambda _: None) -> FileDigest:
    """Blocks; the file is never in memory as a whole.

    Args:
        done: told of bytes as they are read.
    """
    digest, size, told = xxhash.xxh3_128(), 0, 0
    memory = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memory):
            digest.update(memory[:count])
            size += count
            if size - told >= TOLD_BYTES:
                done(size - told)
                told = size
    done(size - told)
    return FileDigest(size, digest.hexdigest())


def leave_digest(path: Path, digest: FileDigest) -> None:
    """Put a file's digest beside it, for whoever completes the checkpoint."""
    _beside(path).write_bytes(msgspec.json.encode(digest))


def _beside(path: Path) -> Path:
    return path.with_name(path.name + BESIDE)


def digests_of(folder: Path, done: Callable[[int], object] = lambda _: None) -> dict[str, FileDigest]:
    """Of all files in a folder, by path within it. Those that lie beside files are taken up, and are gone then; the
    others are made.

    Args:
        done: see `digest_of`.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    left = {path: msgspec.json.decode(path.read_bytes(), type=FileDigest) for path in paths if path.suffix == BESIDE}
    found = {
        path.relative_to(folder).as_posix(): left.get(_beside(path)) or digest_of(path, done)
        for path in paths
        if path not in left
    }
    for path in left:
        path.unlink()
    return found


def compare(folder: Path, wanted: Mapping[str, FileDigest], done: Callable[[int], object] = lambda _: None) -> None:
    """See that the files of a folder are those that were written; others beside them are not looked at.

    Args:
        done: see `digest_of`; called by several threads.

    Raises:
        Corrupt: one is missing, or has other bytes; it is named. OSError: the file system refused one.
    """
    for name, of in wanted.items():
        # Before anything is read: it costs nothing.
        try:
            found = (folder / name).stat()
        except (FileNotFoundError, NotADirectoryError):
            raise Corrupt(f"checkpoint {folder}", why=f"{name} is missing: {of.bytes} bytes were written") from None
        if not stat.S_ISREG(found.st_mode):
            raise Corrupt(f"checkpoint {folder}", why=f"{name} is no file: {of.bytes} bytes were written")
        if found.st_size != of.bytes:
            raise Corrupt(f"checkpoint {folder}", why=f"{name} has {found.st_size} bytes, {of.bytes} were written")
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="digests") as threads:
        made = {name: threads.submit(digest_of, folder / name, done) for name in wanted}
        try:
            for name, of in wanted.items():
                if (digest := made[name].result().xxh3_128) != of.xxh3_128:
                    why = f"{name} is not what was written: its xxh3-128 is {digest}, it was {of.xxh3_128}"
                    raise Corrupt(f"checkpoint {folder}", why=why)
        finally:
            threads.shutdown(cancel_futures=True)
