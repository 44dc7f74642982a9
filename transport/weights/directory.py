"""Versions as files: each a folder of safetensors, complete or absent, that any tool can load.

``v00000007/`` holds ``model-00001-of-00003.safetensors`` …, the index that Hugging Face tools know, and a manifest with
the version's record and a checksum of each tensor. It is written under a temporary name and renamed. On a file system
that all nodes see it is the carrier that needs nothing else, and the fallback of the others.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Gone, OutOfSpace, Refused
from relax_rt.transport.weights.manifest import Manifest, Sent, TensorEntry, check_manifest
from relax_rt.transport.weights.safetensors_header import (
    LENGTH,
    FileTensor,
    decode_header,
    encode_header,
    header_bytes,
)
from relax_rt.transport.weights.stage import fence, verify

FORMAT = 1
MANIFEST_FILE, INDEX_FILE = "weights.json", "model.safetensors.index.json"
MAX_MANIFEST_BYTES = 256 << 20
SHARD_BYTES = 2 << 30
PIECE_BYTES = 4 << 20
"""Written, or read, and digested at a time; the deadline is checked in between."""
COMPANIONS = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "chat_template*")
"""Files of a model folder that make the folder loadable by other tools."""

_VERSION = re.compile(r"v(\d{8,20})")
_SHARD = r"model-\d{5}-of-\d{5}\.safetensors"
_FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG))


class StoredTensor(msgspec.Struct, frozen=True, array_like=True):
    """The file of a tensor, and the xxh3-128 of its bytes, hex."""

    name: str
    file: Annotated[str, msgspec.Meta(pattern=f"^{_SHARD}$")]
    digest: str


class StoredVersion(msgspec.Struct, frozen=True):
    """The manifest of a folder. `tensors` are in the order of the layout's entries."""

    format: int
    record: VersionRecord
    manifest: Manifest
    tensors: tuple[StoredTensor, ...]


def version_folder(root: Path, version: int) -> Path:
    return root / f"v{version:08d}"


class WeightDirectory:
    """The writing side, for one incarnation of the trainer.

    Args:
        shard_bytes: size of one file; a larger tensor has a file of its own.
        companions: a model folder whose config and tokenizer are copied beside the weights.

    Raises:
        StaleEpoch: a newer incarnation writes here.
        OutOfSpace, Refused: the folder cannot be made or written.
    """

    def __init__(
        self,
        root: Path,
        epoch: int,
        *,
        shard_bytes: int = SHARD_BYTES,
        companions: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.root, self.epoch = root, epoch
        self._shard_bytes, self._companions, self._clock = shard_bytes, companions, clock
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _unusable(error, root) from error
        self._fence()

    def write(self, record: VersionRecord, manifest: Manifest, data: memoryview, timeout_s: float) -> Path:
        """Write a version from its flat buffer; blocks. Returns its folder.

        Raises:
            OutOfSpace: the disk or the quota is full. DeadlineExceeded: it took longer.
            Refused: it is there already, is no whole version, or the folder cannot be written.
            StaleEpoch: a newer incarnation writes here.
            In each case nothing of the version remains.
        """
        folder = version_folder(self.root, record.version)
        what = f"policy version {record.version} in {self.root}"
        if manifest.payload != "full" or len(data) < manifest.layout.nbytes:
            raise Refused(what, why=f"a {manifest.payload} payload of {len(data)} bytes is not the whole version")
        self._fence()
        # What dead incarnations, and failed removals of this one, left.
        for left in [*self.root.glob(".writing-*"), *self.root.glob(".retired-*")]:
            shutil.rmtree(left, ignore_errors=True)
        temporary = self.root / f".writing-{self.epoch}-{folder.name}"
        until = self._clock() + timeout_s
        try:
            temporary.mkdir(mode=0o700)
            stored = list(self._write_shards(temporary, manifest, data, until, what))
            total = sum(entry.nbytes for entry in manifest.layout.entries)
            index = {"metadata": {"total_size": total}, "weight_map": {t.name: t.file for t in stored}}
            (temporary / INDEX_FILE).write_bytes(msgspec.json.encode(index))
            version = StoredVersion(FORMAT, record, manifest, tuple(stored))
            (temporary / MANIFEST_FILE).write_bytes(msgspec.json.encode(version))
            if self._companions is not None:
                for pattern in COMPANIONS:
                    for path in self._companions.glob(pattern):
                        shutil.copyfile(path, temporary / path.name)
            self._fence()
            temporary.rename(folder)
        except OSError as error:
            raise _write_error(error, what) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def retire(self, committed: int) -> None:
        """Remove the versions before the committed one. A reader keeps the files that it has open."""
        for folder in self.root.glob("v*"):
            found = _VERSION.fullmatch(folder.name)
            if found and int(found[1]) < committed:
                # Renamed first, so that a half-removed folder is never taken for a version.
                gone = self.root / f".retired-{folder.name}"
                with suppress(OSError):
                    folder.rename(gone)
                    shutil.rmtree(gone, ignore_errors=True)

    def _fence(self) -> None:
        try:
            fence(self.root, self.epoch, "weight directory")
        except (OSError, ValueError) as error:
            raise _unusable(error, self.root) from error

    def _write_shards(
        self, folder: Path, manifest: Manifest, data: memoryview, until: float, what: str
    ) -> Iterator[StoredTensor]:
        # Padding is not written to the files, and the digests of the whole cover it.
        for gap in _gaps(manifest):
            if any(data[gap]):
                raise Refused(what, why=f"bytes {gap.start} to {gap.stop}, which belong to no tensor, are not zero")
        shards = _shards(manifest.layout.entries, self._shard_bytes)
        for number, entries in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            header = encode_header([(e.name, e.dtype, e.shape, e.nbytes) for e in entries], {"format": "pt"})
            descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # A full disk is noticed here, before gigabytes are written.
                os.posix_fallocate(descriptor, 0, len(header) + sum(e.nbytes for e in entries))
                _write_all(descriptor, memoryview(header))
                for entry in entries:
                    digest = xxhash.xxh3_128()
                    for at in range(entry.offset, entry.offset + entry.nbytes, PIECE_BYTES):
                        piece = data[at : min(at + PIECE_BYTES, entry.offset + entry.nbytes)]
                        if self._clock() >= until:  # also where both are infinite
                            raise DeadlineExceeded(what, why=f"the disk is too slow; at tensor {entry.name}")
                        digest.update(piece)
                        _write_all(descriptor, piece)
                    yield StoredTensor(entry.name, name, digest.hexdigest())
            finally:
                os.close(descriptor)


class DirectorySource:
    """A version in a folder of files. Implements WeightSource.

    Attributes:
        folder: the version's own, for engines that load it by its path.

    Raises:
        Gone: it is not there (any more).
        Corrupt: it is damaged, or another version than was committed under this number.
    """

    def __init__(self, root: Path, record: VersionRecord) -> None:
        self.folder = version_folder(root, record.version)
        self.record, self.carrier = record, "directory"
        self._what = f"policy version {record.version} in {root}"
        self._stored = _read_stored(self.folder, self._what)
        self.manifest = self._stored.manifest
        self.payload: Sent = "full"
        self.nbytes = self.manifest.layout.nbytes
        stored, manifest = self._stored, self.manifest
        if stored.format != FORMAT:
            raise Corrupt(self._what, why=f"its manifest is of format {stored.format}, this is {FORMAT}")
        if stored.record.version != record.version:
            raise Corrupt(self._what, why=f"the folder says that it is version {stored.record.version}")
        check_manifest(manifest, record, self._what)
        if [tensor.name for tensor in stored.tensors] != [entry.name for entry in manifest.layout.entries]:
            raise Corrupt(self._what, why="the manifest's checksums are not those of its tensors")

    def copy_into(self, into: memoryview) -> None:
        """Fill `into`; each tensor is verified against its checksum."""
        if len(into) < self.manifest.layout.nbytes:
            raise Refused(self._what, why=f"{len(into)} bytes are no room for {self.manifest.layout.nbytes}")
        places = {entry.name: entry for entry in self.manifest.layout.entries}
        for gap in _gaps(self.manifest):
            into[gap] = bytes(gap.stop - gap.start)
        with self._tensors() as tensors:
            for stored, tensor, descriptor, start in tensors:
                entry = places[stored.name]
                target = into[entry.offset : entry.offset + entry.nbytes]
                self._read(stored, tensor, descriptor, start, lambda at, n, target=target: target[at : at + n])  # type: ignore[misc]
        verify(self.manifest, into[: self.manifest.layout.nbytes])

    def mapped(self) -> AbstractContextManager[memoryview]:
        raise Refused(f"mapping {self._what}", why="its tensors lie in several files", hint="copy it")

    def check(self) -> None:
        """Verify every tensor against its checksum, for an engine that loads the folder by itself.

        Raises:
            Gone, Corrupt: as for copy_into.
        """
        room = memoryview(bytearray(PIECE_BYTES))
        with self._tensors() as tensors:
            for stored, tensor, descriptor, start in tensors:
                self._read(stored, tensor, descriptor, start, lambda _, n: room[:n])

    @contextmanager
    def _tensors(self) -> Iterator[Iterator[tuple[StoredTensor, FileTensor, int, int]]]:
        """Open the files; give each tensor with its file and the offset of its first byte."""
        opened: dict[str, _Shard] = {}
        try:
            # All at once: an open file stays readable when the version is retired.
            for name in dict.fromkeys(stored.file for stored in self._stored.tensors):
                opened[name] = _open_shard(self.folder / name, self._what)
            entries = self.manifest.layout.entries
            yield (
                (stored, found, shard.descriptor, shard.data + found.start)
                for stored, entry in zip(self._stored.tensors, entries, strict=True)
                for shard in (opened[stored.file],)
                for found in (_check_tensor(shard.tensors.get(stored.name), entry, f"{stored.file} of {self._what}"),)
            )
        finally:
            for shard in opened.values():
                os.close(shard.descriptor)

    def _read(
        self,
        stored: StoredTensor,
        tensor: FileTensor,
        descriptor: int,
        start: int,
        room: Callable[[int, int], memoryview],
    ) -> None:
        digest = xxhash.xxh3_128()
        nbytes = tensor.stop - tensor.start
        at = 0
        while at < nbytes:
            piece = room(at, min(PIECE_BYTES, nbytes - at))
            got = os.preadv(descriptor, [piece], start + at)
            if got == 0:
                raise Corrupt(f"tensor {stored.name} of {self._what}", why=f"{stored.file} ends too soon")
            digest.update(piece[:got])
            at += got
        if digest.hexdigest() != stored.digest:
            raise Corrupt(f"tensor {stored.name} of {self._what}", why=f"its bytes in {stored.file} were damaged")


class _Shard(NamedTuple):
    descriptor: int
    data: int
    tensors: dict[str, FileTensor]


def _open_shard(path: Path, what: str) -> _Shard:
    try:
        # Neither through a link, nor blocking on a named pipe in its place.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Gone(what, why=f"{path.name} is not there (any more)") from None
    except OSError as error:
        raise Corrupt(f"{path.name} of {what}", why=str(error)) from error
    try:
        size, name = os.fstat(descriptor).st_size, f"{path.name} of {what}"
        length = header_bytes(os.pread(descriptor, LENGTH.size, 0), size, name)
        text = os.pread(descriptor, length, LENGTH.size)
        header = decode_header(text, size - LENGTH.size - length, name)
    except BaseException:
        os.close(descriptor)
        raise
    return _Shard(descriptor, LENGTH.size + length, {tensor.name: tensor for tensor in header.tensors})


def _check_tensor(found: FileTensor | None, entry: TensorEntry, where: str) -> FileTensor:
    if found is None:
        raise Corrupt(f"tensor {entry.name}", why=f"it is missing in {where}")
    if (found.dtype, found.shape) != (entry.dtype, entry.shape):
        raise Corrupt(
            f"tensor {entry.name} in {where}",
            why=f"it is {found.dtype} {list(found.shape)} there, {entry.dtype} {list(entry.shape)} in the manifest",
        )
    return found


def _read_stored(folder: Path, what: str) -> StoredVersion:
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise Corrupt(f"{path.name} of {what}", why=f"it has more than {MAX_MANIFEST_BYTES} bytes")
        return msgspec.json.decode(path.read_bytes(), type=StoredVersion)
    except FileNotFoundError:
        raise Gone(what, why="it is not there (any more)") from None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Corrupt(f"{path.name} of {what}", why=str(error)) from error
    except OSError as error:
        raise Corrupt(f"{path.name} of {what}", why=str(error)) from error


def _shards(entries: Sequence[TensorEntry], shard_bytes: int) -> list[list[TensorEntry]]:
    shards: list[list[TensorEntry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + entry.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += entry.nbytes
    return shards


def _gaps(manifest: Manifest) -> Iterator[slice]:
    """Yield the padding between tensors of the flat buffer."""
    at = 0
    for entry in manifest.layout.entries:
        if entry.offset > at:
            yield slice(at, entry.offset)
        at = entry.offset + entry.nbytes
    if manifest.layout.nbytes > at:
        yield slice(at, manifest.layout.nbytes)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _write_error(error: OSError, what: str) -> OutOfSpace | Refused:
    if error.errno in _FULL:
        return OutOfSpace(what, why=str(error), hint="free some space, or name another folder")
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
        return Refused(what, why="it is there already: a version's number is used once")
    return Refused(what, why=str(error))


def _unusable(error: OSError | ValueError, root: Path) -> OutOfSpace | Refused:
    if isinstance(error, OSError) and error.errno in _FULL:
        return OutOfSpace(f"weight directory {root}", why=str(error), hint="free some space, or name another folder")
    return Refused(f"weight directory {root}", why=str(error), hint="make it a folder that this user may write in")
