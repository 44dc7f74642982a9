"""Digests of checkpoint files and of the model that a training began with.

The processes that write a checkpoint's files make their digests; a trainer compares them before it resumes. They find
torn, flipped and mixed-up bytes; they are no defence against an attacker.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from relax_rt.transport.rpc.errors import Corrupt
from relax_rt.transport.weights.safetensors_header import LENGTH, METADATA, header_bytes

CHUNK_BYTES = 1 << 20
"""Read at a time, into the same memory: it stays in the processor's cache, and the digest is made without the GIL."""
PROGRESS_BYTES = 64 << 20
"""Of a file, between two words on how its digest gets on."""
DIGEST_THREADS = 4
"""Files that are compared at the same time: disks and network file systems are faster then."""
DIGEST_SUFFIX = ".digest"
"""Behind the name of a file: there lies its digest, until the checkpoint is complete."""


class FileDigest(msgspec.Struct, frozen=True):
    """A file's size, and the xxh3-128 of its bytes, hex."""

    bytes: int
    xxh3_128: str


def digest_of(path: Path, done: Callable[[int], object] = lambda _: None) -> FileDigest:
    """Digest a file without reading it into memory as a whole. Blocks.

    Args:
        done: called with the number of bytes as they are read.
    """
    digest, size, reported = xxhash.xxh3_128(), 0, 0
    memory = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(memory):
            digest.update(memory[:count])
            size += count
            if size - reported >= PROGRESS_BYTES:
                done(size - reported)
                reported = size
    done(size - reported)
    return FileDigest(size, digest.hexdigest())


def write_digest(path: Path, digest: FileDigest) -> None:
    """Write a file's digest beside it, for the process that completes the checkpoint."""
    _digest_path(path).write_bytes(msgspec.json.encode(digest))


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + DIGEST_SUFFIX)


def collect_digests(folder: Path, done: Callable[[int], object] = lambda _: None) -> dict[str, FileDigest]:
    """Collect the digests of all files in a folder, by path within it. Digests that lie beside their files are
    adopted and removed; the others are computed.

    Args:
        done: see `digest_of`.
    """
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    left = {
        path: msgspec.json.decode(path.read_bytes(), type=FileDigest) for path in paths if path.suffix == DIGEST_SUFFIX
    }
    found = {
        path.relative_to(folder).as_posix(): left.get(_digest_path(path)) or digest_of(path, done)
        for path in paths
        if path not in left
    }
    for path in left:
        path.unlink()
    return found


def verify_digests(
    folder: Path, wanted: Mapping[str, FileDigest], done: Callable[[int], object] = lambda _: None
) -> None:
    """Verify that the files of a folder are those that were written; other files are ignored.

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
    with ThreadPoolExecutor(DIGEST_THREADS, thread_name_prefix="digests") as threads:
        made = {name: threads.submit(digest_of, folder / name, done) for name in wanted}
        try:
            for name, of in wanted.items():
                if (digest := made[name].result().xxh3_128) != of.xxh3_128:
                    why = f"{name} is not what was written: its xxh3-128 is {digest}, it was {of.xxh3_128}"
                    raise Corrupt(f"checkpoint {folder}", why=why)
        finally:
            threads.shutdown(cancel_futures=True)


TOKENIZER_PATTERNS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
)
"""Other files here, and checkpoints of before are of another tokenizer."""
INCIDENTAL = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""In config.json: they say how the folder was written, and no model differs by them alone."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of the weights' values that are sampled, evenly spaced."""


class ModelIdentity(msgspec.Struct, frozen=True):
    """Digests (hex) of a model folder. Weights: every tensor's name, dtype and shape, and some of their values, however
    they are spread over files. Empty: the folder has none of it."""

    config: str
    tokenizer: str
    weights: str

    def other(self, than: ModelIdentity) -> list[str]:
        """Name what differs."""
        named = {"config": "config.json", "tokenizer": "tokenizer", "weights": "set of weights"}
        return [words for name, words in named.items() if getattr(self, name) != getattr(than, name)]


def identity_of(folder: Path) -> ModelIdentity:
    """Identify the model in a folder. Blocks for some milliseconds.

    Raises:
        OSError: a file cannot be read. Corrupt: one is not what it should be.
    """
    return ModelIdentity(_config_digest(folder / "config.json"), _tokenizer_digest(folder), _weights_digest(folder))


def _config_digest(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Corrupt(str(path), why=str(error)) from error
    kept = {name: value for name, value in found.items() if name not in INCIDENTAL}
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(kept, order="deterministic"))


def _tokenizer_digest(folder: Path) -> str:
    paths = {path for pattern in TOKENIZER_PATTERNS for path in folder.glob(pattern) if path.is_file()}
    if not paths:
        return ""
    digest = xxhash.xxh3_128()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _weights_digest(folder: Path) -> str:
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not paths:
        return _opaque_digest(sorted(folder.glob("*.bin")))
    found = [(name, entry, path, data) for path in paths for name, entry, data in _tensors(path)]
    tensors = sorted(found, key=lambda one: (one[0], one[2]))
    digest = xxhash.xxh3_128()
    for name, entry, _, _ in tensors:
        digest.update(f"{name}:{entry['dtype']}:{entry['shape']};".encode())
    for _, entry, path, data in tensors[:: max(1, len(tensors) // SAMPLES)]:
        start, stop = entry["data_offsets"]
        digest.update(_read_at(path, data + (start + stop - SAMPLE_BYTES) // 2, data + start, data + stop))
    return digest.hexdigest()


def _tensors(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Name, entry of the header, and where the file's values begin."""
    with path.open("rb") as file:
        length = header_bytes(file.read(LENGTH.size), path.stat().st_size, str(path))
        try:
            header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, Any]])
        except msgspec.DecodeError as error:
            raise Corrupt(f"header of {path}", why=str(error)) from error
    header.pop(METADATA, None)
    for name, entry in header.items():
        yield name, entry, LENGTH.size + length


def _read_at(path: Path, at: int, start: int, stop: int) -> bytes:
    """Some bytes of [start, stop) from `at` on, or from where there are as many."""
    first = max(start, at)
    with path.open("rb") as file:
        return os.pread(file.fileno(), min(stop, first + SAMPLE_BYTES) - first, first)


def _opaque_digest(paths: Sequence[Path]) -> str:
    """Digest files of unknown structure: their sizes, and some of their bytes."""
    if not paths:
        return ""
    digest = xxhash.xxh3_128()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        for n in range(SAMPLES):
            digest.update(_read_at(path, size * n // SAMPLES, 0, size))
    return digest.hexdigest()
