"""An SGLang server's tensors, their checksums, and the private copy of a version that it loads."""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.models.experts import ExpertStack
from relax_rt.roles.rollout.engines.sglang.options import Device
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused
from relax_rt.transport.weights.manifest import ALIGNMENT, Layout, TensorEntry
from relax_rt.transport.weights.source import WeightSource

Words = NDArray[np.uint32]
SEED = 0x243F6A88
SEEDS = (SEED, ((SEED * 0x9E3779B1) ^ 0xDEADBEEF) & 0xFFFFFFFF)
POSITION = (0x27D4EB2D, 0x165667B1)
ROTATED = (15, 13)
TILE_WORDS = 8192
TILES_AT_A_TIME = 128


def content_hash(parts: Sequence[memoryview], padding: int, device: Device) -> str:
    """Hash consecutive bytes and so many zeros to 64 bits, as 16 hexadecimal digits; as the server hashes its
    tensors."""
    if device == "cpu":
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        digest.update(bytes(padding))
        return digest.hexdigest()[:16]
    size = sum(len(part) for part in parts) + padding
    data = np.zeros(-(-size // 4) * 4, np.uint8)
    at = 0
    for part in parts:
        data[at : at + len(part)] = np.frombuffer(part, np.uint8)
        at += len(part)
    return f"{_hash_words(data.view(np.uint32)):016x}"


def _hash_words(words: Words) -> int:
    """Each tile of words has two 32-bit sums of hashes of (word, position); their sum is mixed once more."""
    if not len(words):
        return 0
    total, step = 0, TILE_WORDS * TILES_AT_A_TIME
    nbytes = np.uint32(len(words) * 4 & 0xFFFFFFFF)
    for start in range(0, len(words), step):
        some = words[start : start + step]
        index = np.arange(start, start + len(some), dtype=np.uint64).astype(np.uint32)
        tiles = np.arange(0, len(some), TILE_WORDS)
        high, low = (
            _murmur3_mix(
                np.add.reduceat(_murmur3_mix(some ^ _position_key(index, which)), tiles, dtype=np.uint32) ^ nbytes
            )
            for which in (0, 1)
        )
        both = (high.astype(np.uint64) << np.uint64(32)) | low.astype(np.uint64)
        total += int(both.sum(dtype=np.uint64))
    return splitmix64(total)


def _position_key(index: Words, which: int) -> Words:
    turn = ROTATED[which]
    rotated = (index << np.uint32(turn)) | (index >> np.uint32(32 - turn))
    key: Words = (index * np.uint32(POSITION[which]) + np.uint32(SEEDS[which])) ^ rotated
    return key


def _murmur3_mix(x: Any) -> Any:
    """Apply MurmurHash3's last step."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def splitmix64(x: int) -> int:
    """Apply SplitMix64's last step, a permutation of 64-bit numbers."""
    mask = (1 << 64) - 1
    x &= mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
VOCABULARY_MULTIPLE = 64
"""SGLang pads embeddings and the head to this many rows, with zeros."""
JOINED = (
    (re.compile(r"(.*\.)qkv_proj\.(weight|bias)"), ("q_proj", "k_proj", "v_proj")),
    (re.compile(r"(.*\.)gate_up_proj\.(weight|bias)"), ("gate_proj", "up_proj")),
)
EXPERTS = re.compile(r"(.*\.experts\.)(w13|w2)_weight")


class Recipe(msgspec.Struct, frozen=True):
    """How a tensor of the server is composed: consecutive published tensors, then zeros.

    Attributes:
        padding: rows of zeros, as long as those of the parts.
    """

    parts: tuple[str, ...]
    padding: int = 0


def by_expert(layout: Layout) -> Layout:
    """Return the layout with each expert's tensors under names of their own, as SGLang reads them. The bytes are the
    same: a trainer that has a layer's experts in one tensor, as transformers does, publishes [experts, rows, columns],
    the rows of `gate_proj` before those of `up_proj`."""
    entries: list[TensorEntry] = []
    for entry in layout.entries:
        stack = ExpertStack.of(entry.name, entry.shape)
        if stack is None:
            entries.append(entry)
            continue
        each, shape = entry.nbytes // (stack.experts * len(stack.pieces)), (stack.rows, stack.columns)
        for number, name in enumerate(stack.names()):
            entries.append(TensorEntry(name, entry.dtype, shape, entry.offset + number * each, each))
    return Layout(tuple(entries), layout.nbytes)


def recipes(server_names: Iterable[str], layout: Layout) -> dict[str, Recipe]:
    """Return how each tensor of the server is composed of published ones.

    Raises:
        Refused: one of them has no known composition, or a published one is part of none.
    """
    published = {entry.name: entry for entry in layout.entries}
    made = {name: _recipe(name, published) for name in server_names}
    if unknown := sorted(name for name, recipe in made.items() if recipe is None):
        raise Refused(
            f"the server's tensor {unknown[0]}" + (f" and {len(unknown) - 1} more" if unknown[1:] else ""),
            why="no published tensors are known to make it up, so that a load of it could not be verified",
            hint="tensor-parallel and quantised servers, and models with other layers, are not supported yet",
        )
    found = {name: recipe for name, recipe in made.items() if recipe is not None}
    used = {part for recipe in found.values() for part in recipe.parts}
    # A head that is tied to the embedding is published, where it is, under its own name as well.
    if left := sorted(published.keys() - used - {"lm_head.weight"}):
        raise Refused(f"the published tensor {left[0]}", why="the server has none that it is part of")
    return found


def _recipe(name: str, published: Mapping[str, TensorEntry]) -> Recipe | None:
    if name in published:
        return Recipe((name,), _padding(name, published[name]))
    parts: Sequence[str] = ()
    for pattern, pieces in JOINED:
        if match := pattern.fullmatch(name):
            parts = [f"{match[1]}{piece}.{match[2]}" for piece in pieces]
    if match := EXPERTS.fullmatch(name):
        one = ("gate_proj", "up_proj") if match[2] == "w13" else ("down_proj",)
        count = sum(1 for other in published if re.fullmatch(re.escape(match[1]) + r"\d+\.down_proj\.weight", other))
        parts = [f"{match[1]}{expert}.{piece}.weight" for expert in range(count) for piece in one]
    return Recipe(tuple(parts)) if parts and all(part in published for part in parts) else None


def _padding(name: str, entry: TensorEntry) -> int:
    if not name.endswith(("embed_tokens.weight", "lm_head.weight")) or not entry.shape:
        return 0
    return -entry.shape[0] % VOCABULARY_MULTIPLE


def checksums(made: Mapping[str, Recipe], layout: Layout, data: memoryview, device: Device = "cpu") -> dict[str, str]:
    """Return the checksum that a server on this device must report of each of its tensors if it holds `data`."""
    entries = {entry.name: entry for entry in layout.entries}

    def bytes_of(part: str) -> memoryview:
        return data[entries[part].offset : entries[part].offset + entries[part].nbytes]

    def hash_of(recipe: Recipe) -> str:
        first = entries[recipe.parts[0]]
        padding = recipe.padding * first.nbytes // first.shape[0] if recipe.padding else 0
        return content_hash([bytes_of(part) for part in recipe.parts], padding, device)

    return {name: hash_of(recipe) for name, recipe in made.items()}


def compare(expected: Mapping[str, str], reported: Mapping[str, str], version: int) -> None:
    """Compare checksums.

    Raises:
        Corrupt: they differ; says where.
    """
    wrong = sorted(name for name in expected.keys() | reported.keys() if expected.get(name) != reported.get(name))
    if wrong:
        raise Corrupt(
            f"policy version {version} on the SGLang server",
            why=f"{len(wrong)} of {len(expected)} tensors are not what was published, {wrong[0]} the first of them",
            hint="the server reported them as loaded; it is restarted",
        )


def published_tensors(folder: Path, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of each tensor that a publication of the model in a Hugging Face folder has, without
    loading it: floating ones in the engine's dtype."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            floating = entry["dtype"] in ("F64", "F32", "F16", "BF16")
            found[name] = (dtype if floating else entry["dtype"].lower(), tuple(entry["shape"]))
    return found


def check_layout(layout: Layout, model: Mapping[str, tuple[str, tuple[int, ...]]], needed: Iterable[str] = ()) -> None:
    """Refuse a publication of another model before a byte of it is used.

    Args:
        needed: tensors that the server has: a head is among them unless it is tied to the embedding.

    Raises:
        Refused: a tensor is missing, or of another name, dtype or shape.
    """
    ours = {entry.name: (entry.dtype, tuple(entry.shape)) for entry in layout.entries}
    odd = sorted(name for name, what in ours.items() if model.get(name) != what)
    missing = sorted(model.keys() - ours.keys() - ({"lm_head.weight"} - set(needed)))
    if odd or missing:
        what = f"{odd[0]} {ours[odd[0]]}" if odd else f"{missing[0]} is missing"
        raise Refused(
            f"published weights do not fit this engine: {what}",
            why=f"the model has {model.get(odd[0]) if odd else model[missing[0]]}",
            hint="trainer and engines must load the same model and dtype",
        )


class PrivateCopy:
    """One version in a safetensors file, which the server can load and whose data have the layout of publications.

    The file is mapped, so that a fetch writes where the server reads, and stays for the next delta. Alignment gaps
    between tensors become tensors of their own, which no model knows and SGLang skips.

    Attributes:
        version: the version that is whole in it; 0: none.
        path: of the file. start: where the layout begins in it, a multiple of its alignment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "model.safetensors"
        self.version = self.start = 0
        self.layout: Layout | None = None
        self._map: mmap.mmap | None = None
        self._view: memoryview | None = None

    def fill(self, source: WeightSource) -> memoryview:
        """Fetch a version; return its verified bytes.

        Raises:
            Gone, Corrupt, Refused: as of the source. OutOfSpace: there is no room for the file.
        """
        manifest = source.manifest
        if manifest.payload == "delta" and (self.version != manifest.base or self.layout != manifest.layout):
            raise Refused(
                f"delta to policy version {manifest.version}",
                why=f"it is of version {manifest.base}, and version {self.version} lies here",
                hint="fetch the version in full",
            )
        if self.layout != manifest.layout:
            self._create(manifest.layout)
        assert self._view is not None
        # Also a fetch that fails overwrites the version before it.
        self.version = 0
        source.copy_into(self._view)
        self.version = manifest.version
        return self.view

    @property
    def view(self) -> memoryview:
        """Its bytes, read-only; release the view after use."""
        assert self._view is not None, "nothing was fetched yet"
        return self._view.toreadonly()

    def _create(self, layout: Layout) -> None:
        self._unmap()
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        header = safetensors_header(by_expert(layout))
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, len(header) + layout.nbytes)
            os.pwrite(descriptor, header, 0)
            self._map = mmap.mmap(descriptor, len(header) + layout.nbytes)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            raise OutOfSpace(
                f"{layout.nbytes >> 20} MiB for an engine's weights in {self.folder}",
                why=str(error),
                hint="enlarge /dev/shm",
            ) from error
        finally:
            os.close(descriptor)
        self._view = memoryview(self._map)[len(header) :]
        self.layout, self.version, self.start = layout, 0, len(header)

    def close(self) -> None:
        """Unmap, and remove the folder."""
        self._unmap()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _unmap(self) -> None:
        # If an abandoned thread still holds views, the memory is freed with the last of them.
        with suppress(BufferError):
            if self._view is not None:
                self._view.release()
            if self._map is not None:
                self._map.close()
        self._view = self._map = self.layout = None
        self.version = 0


def safetensors_header(layout: Layout) -> bytes:
    """Return length and header of a safetensors file of this layout, padded to the alignment."""
    entries: dict[str, object] = {}
    end = 0
    for entry in (*layout.entries, TensorEntry("", "uint8", (0,), layout.nbytes, 0)):
        if entry.offset > end:
            gap = entry.offset - end
            entries[f"_gap_{end}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [end, entry.offset]}
        end = entry.offset + entry.nbytes
        if entry.name:
            dtype, span = SAFETENSORS_DTYPES[entry.dtype], [entry.offset, end]
            entries[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return struct.pack("<Q", len(text)) + text
