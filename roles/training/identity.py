"""Which model a checkpoint is of: digests of the folder that its training began with, cheap enough for every start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from relax_rt.transport.rpc.errors import Corrupt
from relax_rt.transport.weights.safetensors_header import LENGTH, METADATA, header_bytes

TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*")
"""Other files here, and checkpoints of before are of another tokenizer."""
INCIDENTAL = ("transformers_version", "_name_or_path", "torch_dtype", "dtype")
"""In config.json: they say how the folder was written, and no model differs by them alone."""
SAMPLES, SAMPLE_BYTES = 64, 4096
"""Of the weights' values that are looked at, evenly spread."""


class ModelIdentity(msgspec.Struct, frozen=True):
    """Digests (hex) of a model folder. Weights: every tensor's name, dtype and shape, and some of their values, however
    they are spread over files. Empty: the folder has none of it."""

    config: str
    tokenizer: str
    weights: str

    def other(self, than: ModelIdentity) -> list[str]:
        """What differs, in words."""
        named = {"config": "config.json", "tokenizer": "tokenizer", "weights": "set of weights"}
        return [words for name, words in named.items() if getattr(self, name) != getattr(than, name)]


def identity_of(folder: Path) -> ModelIdentity:
    """Blocks for some milliseconds.

    Raises:
        OSError: a file cannot be read. Corrupt: one is not what it should be.
    """
    return ModelIdentity(_config(folder / "config.json"), _tokenizer(folder), _weights(folder))


def _config(path: Path) -> str:
    if not path.exists():
        return ""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise Corrupt(str(path), why=str(error)) from error
    kept = {name: value for name, value in found.items() if name not in INCIDENTAL}
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(kept, order="deterministic"))


def _tokenizer(folder: Path) -> str:
    paths = {path for pattern in TOKENIZER for path in folder.glob(pattern) if path.is_file()}
    if not paths:
        return ""
    digest = xxhash.xxh3_128()
    for path in sorted(paths):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest()


def _weights(folder: Path) -> str:
    paths = sorted(folder.glob("model*.safetensors")) or sorted(folder.glob("*.safetensors"))
    if not paths:
        return _unstructured(sorted(folder.glob("*.bin")))
    found = [(name, entry, path, data) for path in paths for name, entry, data in _tensors(path)]
    tensors = sorted(found, key=lambda one: (one[0], one[2]))
    digest = xxhash.xxh3_128()
    for name, entry, _, _ in tensors:
        digest.update(f"{name}:{entry['dtype']}:{entry['shape']};".encode())
    for _, entry, path, data in _spread(tensors):
        start, stop = entry["data_offsets"]
        digest.update(_read(path, data + (start + stop - SAMPLE_BYTES) // 2, data + start, data + stop))
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


def _spread(tensors: Sequence[Any]) -> Sequence[Any]:
    return tensors[:: max(1, len(tensors) // SAMPLES)]


def _read(path: Path, at: int, start: int, stop: int) -> bytes:
    """Some bytes of [start, stop) from `at` on, or from where there are as many."""
    first = max(start, at)
    with path.open("rb") as file:
        return os.pread(file.fileno(), min(stop, first + SAMPLE_BYTES) - first, first)


def _unstructured(paths: Sequence[Path]) -> str:
    """Of files that are not read here: their sizes, and some of their bytes."""
    if not paths:
        return ""
    digest = xxhash.xxh3_128()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name}:{size};".encode())
        for n in range(SAMPLES):
            digest.update(_read(path, size * n // SAMPLES, 0, size))
    return digest.hexdigest()
