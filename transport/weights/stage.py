"""The weight stage: versions on their way from the trainer to the engines of a node, in shared memory.

The stage is a folder of the run's shared memory: buffers (``w0.buf`` …, recycled) and one manifest a version. It
belongs to the node, not to the trainer: the newest committed version stays there in full when the trainer dies. A
reader pins a buffer with a shared file lock, which the kernel drops when the reader dies; the writer reuses only
buffers that it can lock alone and that hold no version still wanted.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone, OutOfSpace, StaleEpoch
from relax_rt.transport.weights.delta import encode
from relax_rt.transport.weights.manifest import (
    MAX_DELTA,
    Delta,
    Layout,
    Manifest,
    bucket_digest,
    bucket_slices,
    check_manifest,
    total_digest,
    worth_applying,
)

MAX_BUFFERS = 4
"""One committed, one being written, and two for slow readers."""
PIECE_BYTES = 512 << 10
"""Copied and digested at a time: fits into a core's L2 cache."""


def _manifest_path(folder: Path, version: int) -> Path:
    return folder / f"v{version:08d}.json"


def delta_file(version: int, digest: str) -> str:
    """Name the file of the delta that makes a version; it exists as long as a manifest names it."""
    return f"d{version:08d}-{digest}.bin"


def wire_file(version: int) -> str:
    """Name the file of a version in the wire dtype, if its manifest has `wire_bytes`."""
    return f"x{version:08d}.bin"


def adapters_file(version: int) -> str:
    """Name the file of a version's adapters, if its manifest has `adapter_bytes`."""
    return f"a{version:08d}.bin"


BASE_FILE = "base.buf"
"""The model's own weights, the base of adapters: staged as version ROOT, beside the buffers of versions."""


_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _decoded(path: Path) -> Manifest:
    return msgspec.json.decode(path.read_bytes(), type=Manifest)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _number(path: Path) -> int:
    return int(path.stem[1:].partition("-")[0])


def read_manifest(folder: Path, version: int) -> Manifest:
    """Read the manifest of a staged version.

    Raises:
        Gone: it is not on this stage (never staged, or retired).
        Corrupt: it cannot be understood.
    """
    what = f"weights of policy version {version}"
    try:
        return _decoded(_manifest_path(folder, version))
    except FileNotFoundError:
        raise Gone(what, why=f"not on the stage {folder}") from None
    except _UNREADABLE as error:
        raise Corrupt(f"the manifest of {what} on the stage {folder}", why=str(error)) from error


def fence(folder: Path, epoch: int, what: str) -> None:
    """Record that incarnation `epoch` writes in a folder of weights, and refuse an older one.

    Raises:
        StaleEpoch: a newer one does.
    """
    descriptor = os.open(folder / "epoch", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        newest = int(os.read(descriptor, 32) or b"0")
        if newest > epoch:
            raise StaleEpoch(f"{what} {folder}", why=f"epoch {newest} writes here, this is {epoch}")
        if newest < epoch:
            os.pwrite(descriptor, str(epoch).encode(), 0)
    finally:
        os.close(descriptor)


class WeightStage:
    """The writing side, for one incarnation of the trainer.

    Raises:
        StaleEpoch: a newer incarnation of the trainer has opened the stage.
        OutOfSpace: it cannot be made.
    """

    def __init__(self, folder: Path, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _out_of_space(f"weight stage {folder}", error) from error
        self._fence()
        self._maps: dict[str, mmap.mmap] = {}

    def _fence(self) -> None:
        """Refuse to write after a newer incarnation, and record this one's epoch."""
        try:
            fence(self.folder, self.epoch, "weight stage")
        except OSError as error:
            raise _out_of_space(f"weight stage {self.folder}", error) from error

    @contextmanager
    def writing(self, layout: Layout, keep: int) -> Iterator[tuple[str, memoryview]]:
        """Lock a free buffer of the layout's size for writing, for the length of a block; version `keep` stays.

        Raises:
            OutOfSpace: every buffer is pinned by readers or there is no room for another.
        """
        self._fence()
        name, descriptor = self._free_buffer(layout.nbytes, keep)
        try:
            mapping = self._maps.get(name)
            if mapping is None or len(mapping) < layout.nbytes:
                mapping = self._maps[name] = mmap.mmap(descriptor, layout.nbytes)
            view = memoryview(mapping)[: layout.nbytes]
            try:
                yield name, view
            finally:
                with suppress(BufferError):  # where a traceback still holds an array of it
                    view.release()
        finally:
            # The mapping holds a duplicate of the descriptor, so closing this one alone would keep the lock.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def seal(
        self,
        version: int,
        layout: Layout,
        file: str,
        data: memoryview,
        wire: bytes = b"",
        adapters: bytes = b"",
        base_digest: str = "",
        *,
        buckets: tuple[str, ...] = (),
    ) -> Manifest:
        """Digest the written buffer and put its manifest on the stage (call it inside `writing`).

        Args:
            wire: the same version in the wire dtype, see payloads.wire_version; a file beside it.
            adapters: see payloads.encode_lora; a file beside it. base_digest: digest of their base.
            buckets: the digests of `data`, from a caller that has just verified it; computed here unless given.

        Raises:
            StaleEpoch: a newer incarnation of the trainer has opened the stage.
            OutOfSpace: there is no room for the manifest; the buffer is as it was, and may be sealed again.
        """
        self._fence()
        if wire:
            self._put_beside(wire_file(version), wire, f"policy version {version} in the wire dtype")
        if adapters:
            self._put_beside(adapters_file(version), adapters, f"adapters of policy version {version}")
        manifest = _make_manifest(version, self.epoch, layout, file, data, buckets)
        manifest = msgspec.structs.replace(
            manifest, wire_bytes=len(wire), adapter_bytes=len(adapters), base_digest=base_digest if adapters else ""
        )
        self._put(_manifest_path(self.folder, version), manifest)
        return manifest

    def _put_beside(self, name: str, content: bytes, what: str) -> None:
        path = self.folder / name
        try:
            with open(path, "wb", opener=_private) as file:
                file.write(content)
        except OSError as error:
            with suppress(OSError):
                path.unlink(missing_ok=True)
            raise _out_of_space(f"{what} in {self.folder}", error) from error

    def seal_base(self, layout: Layout, fill: Callable[[memoryview], None]) -> Manifest:
        """Put the model's own weights, which adapters are added to, on the stage as version ROOT, where they stay.

        They replace older ones by a rename when they are whole; readers of those keep what they have open.

        Args:
            fill: writes all bytes. It may find part of them there, if an earlier call raised.

        Raises:
            OutOfSpace: there is no room for them.
        """
        self._fence()
        path = self.folder / f"{BASE_FILE}.tmp"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                os.ftruncate(descriptor, layout.nbytes)
                os.posix_fallocate(descriptor, 0, layout.nbytes)
                mapping = mmap.mmap(descriptor, layout.nbytes)
            except OSError as error:
                path.unlink(missing_ok=True)
                raise _out_of_space(f"{layout.nbytes >> 20} MiB for the model's own weights", error) from error
        finally:
            os.close(descriptor)
        view = memoryview(mapping)
        try:
            fill(view)
            manifest = _make_manifest(ROOT, self.epoch, layout, BASE_FILE, view)
        finally:
            with suppress(BufferError):  # where a traceback still holds an array of it
                view.release()
                mapping.close()
        path.rename(self.folder / BASE_FILE)
        self._put(_manifest_path(self.folder, ROOT), manifest)
        return manifest

    def same_base(self, layout: Layout, fill: Callable[[memoryview], None], keep: int) -> Manifest | None:
        """Return the manifest of the base that is staged already; None: it is not what `fill` writes, or damaged.

        It is compared in a buffer of versions, so that no memory is needed for it a second time. Version `keep` stays;
        None as well if no other buffer is free.
        """
        try:
            found = read_manifest(self.folder, ROOT)
            check_manifest(found, VersionRecord(ROOT, ROOT, 0), f"the model's own weights in {self.folder}")
            if found.layout != layout:
                return None
            with pinned(self.folder, found) as held, self.writing(layout, keep) as (_, view):
                fill(view)
                verify(found, view)
                verify(found, held)
        except (Gone, Corrupt, OutOfSpace):
            return None
        # Left by an incarnation that died while writing.
        (self.folder / f"{BASE_FILE}.tmp").unlink(missing_ok=True)
        return found

    def seal_delta(self, manifest: Manifest, data: memoryview, base: int) -> Manifest:
        """Put what changed since version `base` beside the sealed version, and name it in the version's manifest,
        behind the deltas that lead to the base (call it inside `writing`). Returns the new manifest.

        It has no deltas, and `no_delta` says why, where the base is not on the stage or is of another layout, the
        delta would not be smaller than MAX_DELTA of the whole, or there is no room for it. A reader then takes the
        version in full. Deltas that lead elsewhere go: incarnations left them that died before their commit.

        Raises:
            StaleEpoch: a newer incarnation of the trainer has opened the stage; what is its own stays.
        """
        path = self.folder / delta_file(manifest.version, manifest.digest)
        try:
            self._fence()
            before = read_manifest(self.folder, base)
            for other in self.folder.glob("d*.bin"):
                if other.name not in _files_of(before.deltas):
                    other.unlink(missing_ok=True)
            if before.layout != manifest.layout:
                raise Gone(f"delta to policy version {manifest.version}", why=f"version {base} has other tensors")
            with pinned(self.folder, before) as old:
                nbytes = self._write_delta(path, manifest.layout, old, data)
            delta = Delta(manifest.version, manifest.digest, base, before.digest, nbytes)
            deltas = worth_applying((*before.deltas, delta), manifest.layout.nbytes)
            named = msgspec.structs.replace(manifest, deltas=deltas)
            self._fence()
            self._put(_manifest_path(self.folder, manifest.version), named)
            return named
        except (Gone, Corrupt, OutOfSpace, OSError) as error:
            why = str(error)
        path.unlink(missing_ok=True)
        without = msgspec.structs.replace(manifest, no_delta=why)
        with suppress(OutOfSpace):  # the version itself is there
            self._fence()
            self._put(_manifest_path(self.folder, manifest.version), without)
            return without
        return manifest

    def _write_delta(self, path: Path, layout: Layout, old: memoryview, new: memoryview) -> int:
        """Write the delta's blocks; return their size. Raises Gone: they would be too large."""
        size = 0
        with open(path, "wb", opener=_private) as file:
            for block in encode(old, new, layout):
                size += len(block)
                if size > MAX_DELTA * layout.nbytes:
                    raise Gone(f"a delta in {path.name}", why=f"more than {MAX_DELTA:g} of the version has changed")
                file.write(block)
        return size

    def retire(self, committed: int) -> None:
        """Remove the manifests of the versions before the committed one, and what lies beside them; buffers may be
        reused. The model's own weights stay, and the deltas that the committed version names. StaleEpoch: see seal."""
        self._fence()
        try:
            wanted = _files_of(read_manifest(self.folder, committed).deltas)
        except (Gone, Corrupt):
            wanted = set()
        for path in [*self.folder.glob("v*.json"), *self.folder.glob("[xad]*.bin")]:
            if not ROOT < _number(path) < committed or path.name in wanted:
                continue
            if path.suffix != ".bin":
                path.unlink(missing_ok=True)
                continue
            # A file that a reader keeps must still be found by its name; under the lock no other reader can come.
            with _exclusive(path) as free:
                if free:
                    path.unlink(missing_ok=True)

    def _put(self, path: Path, manifest: Manifest) -> None:
        temporary = path.with_suffix(".tmp")
        try:
            with open(temporary, "wb", opener=_private) as file:
                file.write(msgspec.json.encode(manifest))
            temporary.rename(path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise _out_of_space(f"the manifest of policy version {manifest.version} in {self.folder}", error) from error

    def evict(self, keep: int) -> str:
        """Make place for another buffer where readers pin all of them, by taking one's name away: its readers keep what
        they have, outside the stage, until they end. Answers with the name; empty if there was a free one.
        """
        self._fence()
        kept = self._file_of(keep)
        names = [name for number in range(MAX_BUFFERS) if (name := f"w{number}.buf") != kept]
        for name in names:
            with _exclusive(self.folder / name) as free:
                if free:  # or it does not exist, and can be made
                    return ""
        self._remove_manifests(names[0])
        (self.folder / names[0]).unlink(missing_ok=True)
        self._unmap(names[0])
        return names[0]

    def _unmap(self, name: str) -> None:
        mapping = self._maps.pop(name, None)
        if mapping is not None:
            with suppress(BufferError):  # it ends with the last view of it
                mapping.close()

    def _remove_manifests(self, name: str) -> None:
        """Remove the manifests of what a buffer held, and those that cannot be read."""
        for path in self.folder.glob("v*.json"):
            try:
                held = _decoded(path).file
            except _UNREADABLE:
                held = name
            if held == name:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap; the files stay with the node."""
        for name in list(self._maps):
            self._unmap(name)

    def _file_of(self, version: int) -> str:
        """The buffer that holds a version; empty if it is not here (a run resumed in new shared memory), or if nobody
        can tell."""
        try:
            return read_manifest(self.folder, version).file
        except (Gone, Corrupt):
            return ""

    def _free_buffer(self, nbytes: int, keep: int) -> tuple[str, int]:
        kept, full = self._file_of(keep), None
        for number in range(MAX_BUFFERS):
            name = f"w{number}.buf"
            if name == kept:
                continue
            descriptor = os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(descriptor, 0, nbytes)
            except OSError as error:
                os.close(descriptor)
                if not isinstance(error, BlockingIOError):
                    full = error  # one behind it may have its memory already, and be free
                continue
            self._remove_manifests(name)  # what the buffer held before is gone from here on
            return name, descriptor
        if full is not None:
            raise _out_of_space(f"{nbytes >> 20} MiB for weights in {self.folder}", full) from full
        raise OutOfSpace(
            f"a buffer for weights in {self.folder}", why=f"all {MAX_BUFFERS} are pinned by readers", hint="see `why`"
        )


def _files_of(deltas: Iterable[Delta]) -> set[str]:
    return {delta_file(delta.version, delta.digest) for delta in deltas}


def _make_manifest(
    version: int, epoch: int, layout: Layout, file: str, data: memoryview, buckets: tuple[str, ...] = ()
) -> Manifest:
    buckets = buckets or tuple(bucket_digest(data[part]) for part in bucket_slices(layout.nbytes))
    return Manifest(version, epoch, file, layout, buckets, total_digest(buckets))


def _out_of_space(what: str, error: OSError) -> OutOfSpace:
    return OutOfSpace(what, why=str(error), hint="enlarge /dev/shm")


@contextmanager
def pinned(folder: Path, manifest: Manifest) -> Iterator[memoryview]:
    """Map a staged version read-only; its buffer is not reused while a view of it is left in any process.

    Raises:
        Gone: the version was retired meanwhile; ask for the newest one.
        Corrupt: its buffer is too short, or its manifest is damaged by now.
    """
    what = f"weights of policy version {manifest.version}"
    try:
        descriptor = os.open(folder / manifest.file, os.O_RDONLY)
    except FileNotFoundError:
        raise Gone(what, why=f"{manifest.file} is not in {folder}") from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Gone(what, why="their buffer is being reused") from None
        # Read again under the lock: between the first read and the lock the writer may have reused the buffer; from
        # here on it cannot.
        if read_manifest(folder, manifest.version) != manifest:
            raise Gone(what, why="staged again by another incarnation")
        if os.fstat(descriptor).st_size < manifest.layout.nbytes:
            raise Corrupt(what, why=f"{manifest.file} is shorter than its {manifest.layout.nbytes} bytes")
        mapping = mmap.mmap(descriptor, manifest.layout.nbytes, prot=mmap.PROT_READ)
        view = memoryview(mapping)
        try:
            yield view
        finally:
            # A view that is still used keeps the mapping, whose duplicate of the descriptor keeps the lock: the pin
            # lasts as long as the last view of it.
            with suppress(BufferError):
                view.release()
                mapping.close()
    finally:
        os.close(descriptor)


@contextmanager
def _exclusive(path: Path) -> Iterator[bool]:
    """Lock a file exclusively for a block; gives False if another process holds it, True if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(descriptor)


@contextmanager
def keep_file(path: Path) -> Iterator[None]:
    """Keep a file beside a version in its place for a block, also if a newer version is committed meanwhile.

    Raises:
        Gone: it was retired before.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise Gone(path.name, why=f"not on the stage {path.parent}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        if not path.exists():
            raise Gone(path.name, why=f"retired from the stage {path.parent}")
        yield
    finally:
        os.close(descriptor)


def wire_view(folder: Path, manifest: Manifest) -> AbstractContextManager[memoryview]:
    """Map a staged version in the wire dtype, read-only. Raises Gone: it was retired meanwhile, or there is none."""
    what = f"policy version {manifest.version} in the wire dtype"
    return _mapped(folder / wire_file(manifest.version), manifest.wire_bytes, what)


def adapters_view(folder: Path, manifest: Manifest) -> AbstractContextManager[memoryview]:
    """Map the adapters of a staged version, read-only. Raises Gone: they were retired meanwhile, or there are none."""
    what = f"adapters of policy version {manifest.version}"
    return _mapped(folder / adapters_file(manifest.version), manifest.adapter_bytes, what)


def delta_view(folder: Path, version: int, digest: str) -> AbstractContextManager[memoryview]:
    """Map the delta that makes a version, read-only. Raises Gone: no version on the stage names it any more."""
    return _mapped(folder / delta_file(version, digest), None, f"delta to policy version {version}")


@contextmanager
def _mapped(path: Path, nbytes: int | None, what: str) -> Iterator[memoryview]:
    """Map a file that lies beside a version; None: all of it."""
    if nbytes == 0:
        raise Gone(what, why="it is not staged so")
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), nbytes or 0, prot=mmap.PROT_READ)
    except (OSError, ValueError) as error:
        raise Gone(what, why=str(error)) from error
    view = memoryview(mapping)
    try:
        yield view
    finally:
        with suppress(BufferError):  # a view that is still used keeps the mapping
            view.release()
            mapping.close()


def copy_verified(manifest: Manifest, source: memoryview, into: memoryview) -> None:
    """Copy a version's bytes and verify the copy, in pieces that fit into the cache.

    Raises:
        Corrupt: the copy does not match its digests; it must not be used.
    """
    # numpy and xxhash release the GIL on pieces of this size, so an engine in this process goes on decoding.
    to, fro = np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8)
    try:
        for part, expected in zip(bucket_slices(manifest.layout.nbytes), manifest.buckets, strict=True):
            hasher = xxhash.xxh3_128()
            for at in range(part.start, part.stop, PIECE_BYTES):
                piece = slice(at, min(at + PIECE_BYTES, part.stop))
                np.copyto(to[piece], fro[piece])
                hasher.update(into[piece])
            _compare(manifest, part, hasher.hexdigest(), expected)
    finally:
        del to, fro  # a traceback would keep them, and with them the pin


def verify(manifest: Manifest, data: memoryview) -> None:
    """Verify a version's bytes against its digests.

    Raises:
        Corrupt: they do not match.
    """
    for part, expected in zip(bucket_slices(manifest.layout.nbytes), manifest.buckets, strict=True):
        with data[part] as bucket:
            found = bucket_digest(bucket)
        _compare(manifest, part, found, expected)


def _compare(manifest: Manifest, part: slice, found: str, expected: str) -> None:
    if found != expected:
        raise Corrupt(
            f"weights of policy version {manifest.version}, bytes {part.start}-{part.stop}",
            why="the copy does not match the digest taken at stage",
        )
