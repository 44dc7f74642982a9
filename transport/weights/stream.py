"""Versions between nodes over ZeroMQ: serve the stage of the trainer's node, and mirror it on another node.

The protocol is that of the payload servers: the reader asks for ranges of a name and has a window of bytes in flight,
so that a slow or stopped reader costs the sender nothing.

The server keeps a version that is being read pinned for a while after it was retired, because a slow link would never
finish one otherwise. At most two are pinned, so that remote readers cannot hold the trainer's buffers. Deltas and
adapters, which lie beside the buffers, are counted apart: up to the size of one version together.

On the other node one engine fetches; the others wait and read the version from the node's own stage. Buckets that the
buffer already holds, from a broken attempt or an earlier version, are recognised by their digests and skipped.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import math
import os
import random
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import zmq

from relax_rt.transport.base.versions import ROOT, VersionRecord
from relax_rt.transport.memory.payload_cache import CacheEntry, Region
from relax_rt.transport.memory.payload_fetcher import FetchSettings, Peer, PeerConnection
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.rpc.errors import (
    Corrupt,
    DeadlineExceeded,
    Gone,
    OutOfSpace,
    ProtocolError,
    Refused,
    RelaxError,
    StaleEpoch,
    Unreachable,
)
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.weights.delta import apply
from relax_rt.transport.weights.manifest import Delta, Manifest, Sent, bucket_digest, bucket_slices, check_manifest
from relax_rt.transport.weights.payloads import decode_wire, merge_lora
from relax_rt.transport.weights.source import StageSource, base_of, bases_of, lora_for
from relax_rt.transport.weights.stage import (
    WeightStage,
    adapters_view,
    copy_verified,
    delta_view,
    pinned,
    read_manifest,
    wire_view,
)

MANIFEST_HEAD = struct.Struct("<8sQ")
MANIFEST_MAGIC = b"RLXWMAN1"
MAX_MANIFEST_BYTES = 64 << 20
MAX_PINNED = 2
MAX_SIDE_VERSIONS, MAX_SIDE_FILES = 1, 32
"""Limits of pinned deltas and adapters, in versions' worth of bytes and in number (each costs a file descriptor)."""
IDLE_S = 5.0
_SIDE_FILES = ("adapters", "delta")
_NAME = re.compile(r"(manifest|weights|wire|adapters|delta)-(\d{1,18})-([0-9a-f]{0,64})")


def served_name(kind: Literal["manifest", "weights", "wire", "adapters", "delta"], version: int, digest: str) -> str:
    """Name what the server gives out: a version's manifest or flat buffer, or what its manifest says lies beside them.

    A manifest is served with its length in front (MANIFEST_HEAD). A delta is served as long as any manifest names it.
    """
    return f"{kind}-{version}-{digest}"


def stage_server(folder: Path, keys: CurveKeys | None, *, io_threads: int = 2) -> PayloadServer:
    """Serve the stage in `folder`, which need not exist yet. Readers without the key get nothing."""
    return PayloadServer(folder, keys=keys, served=StagedVersions(folder), io_threads=io_threads)


class _ServedVersion(NamedTuple):
    kind: str
    view: memoryview
    release: contextlib.ExitStack


class StagedVersions:
    """The versions on a stage, by name, for a payload server."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._pins: OrderedDict[str, _ServedVersion] = OrderedDict()
        self._used: dict[str, float] = {}
        self._manifest = ("", b"")

    def __len__(self) -> int:
        return len(self._pins)

    def range(self, name: str, offset: int, nbytes: int) -> memoryview:
        """Return a range of what has this name. Implements PayloadSource.

        Raises:
            Gone: that version is not on the stage (any more).
            Corrupt: the name is none of ours, or the range is not inside.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise Corrupt(f"{name[:64]!r} on the weight stage", why="that is no name of a version")
        kind, version, digest = found[1], int(found[2]), found[3]
        if kind == "manifest":
            if self._manifest[0] != name:
                text = msgspec.json.encode(self._read(version, digest))
                self._manifest = (name, MANIFEST_HEAD.pack(MANIFEST_MAGIC, len(text)) + text)
            whole = memoryview(self._manifest[1])
        else:
            if name not in self._pins:
                self._pin(name, kind, version, digest)
            self._used[name] = self._clock()
            self._pins.move_to_end(name)
            whole = self._pins[name].view
        if offset < 0 or nbytes < 0 or offset + nbytes > len(whole):
            raise Corrupt(f"{name} on the weight stage", why=f"bytes {offset} to {offset + nbytes} of {len(whole)}")
        return whole[offset : offset + nbytes]

    def sweep(self) -> None:
        """Unpin versions that were not read for IDLE_S."""
        for name in list(self._pins):
            if self._clock() - self._used[name] > IDLE_S:
                self._unpin(name)

    def clear(self) -> None:
        for name in list(self._pins):
            self._unpin(name)

    def _pin(self, name: str, kind: str, version: int, digest: str) -> None:
        """Map what has this name, and unpin the least recently read of its kind until all are within the limits."""
        with contextlib.ExitStack() as entering:
            try:
                if kind == "delta":
                    # The manifests of later versions name it as well; that of its own version may be retired.
                    view = entering.enter_context(delta_view(self._folder, version, digest))
                elif kind == "adapters":
                    view = entering.enter_context(adapters_view(self._folder, self._read(version, digest)))
                else:
                    manifest = self._read(version, digest)
                    view = entering.enter_context(pinned(self._folder, manifest))
                    if kind == "wire":
                        view = entering.enter_context(wire_view(self._folder, manifest))
            except OSError as error:
                raise Gone(f"weights of policy version {version}", why=str(error)) from error
            beside = kind in _SIDE_FILES
            alike = [name for name, pinned in self._pins.items() if (pinned.kind in _SIDE_FILES) == beside]
            most = MAX_SIDE_FILES if beside else MAX_PINNED
            most_bytes = MAX_SIDE_VERSIONS * self._version_bytes() if beside else math.inf
            total = len(view) + sum(len(self._pins[name].view) for name in alike)
            while alike and (len(alike) >= most or total > most_bytes):
                oldest = alike.pop(0)
                total -= len(self._pins[oldest].view)
                self._unpin(oldest)
            self._pins[name] = _ServedVersion(kind, view, entering.pop_all())

    def _version_bytes(self) -> int:
        """Size of a version on the stage, by its buffers; 0: there is none."""
        found = 0
        for path in self._folder.glob("w*.buf"):
            with contextlib.suppress(FileNotFoundError):
                found = max(found, path.stat().st_size)
        return found

    def _read(self, version: int, digest: str) -> Manifest:
        what = f"weights of policy version {version}"
        try:
            manifest = read_manifest(self._folder, version)
        except (OSError, Corrupt) as error:
            raise Gone(what, why=f"its manifest cannot be read: {error}") from error
        if manifest.digest != digest:
            raise Gone(what, why=f"on the stage it has digest {manifest.digest}")
        return manifest

    def _unpin(self, name: str) -> None:
        # A message that ZeroMQ still sends keeps the mapping, and so the pin, until it is sent or dropped.
        self._used.pop(name)
        self._pins.pop(name).release.close()


CHUNK_BYTES, WINDOW_BYTES = 1 << 20, 16 << 20
CONNECT_TIMEOUT_S = 3.0
LOCK_FILE = "fetching"
_POLL_MS = 100
_LOCK_RETRY_S = 0.02
_ROOM_RETRY_S = 0.1
_FRESH_S = 1.0
"""The far end counts as slow, not as lost, if bytes came within this time."""
MERGE_PART = 0.5
"""Share of the time left for applying a delta or adapters; the rest is for fetching in full if that fails."""
SLOW_VERSIONS = 16
"""Versions that are fetched in full without another try, after applying a delta or adapters took too long."""
_VERSION = re.compile(r"v(\d{8,18})\.json")

Locate = Callable[[], str]
"""Returns the current address of the stage's server; blocks. It may raise Unreachable and is then called again."""

_Make = Callable[[float], None]
"""Applies what was fetched, until a deadline by time.monotonic()."""


class _Held(NamedTuple):
    """A version on the stage of this node, and the deltas that lead from it to the wanted one."""

    base: Manifest
    deltas: tuple[Delta, ...]

    @property
    def nbytes(self) -> int:
        return sum(delta.nbytes for delta in self.deltas)


class _BufferRegion(Region):
    """A range of the stage's buffer that arriving bytes are written to."""

    __slots__ = ()

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory

    def __del__(self) -> None:
        """Release nothing: the buffer belongs to the stage."""


class StageMirror:
    """The private stage of a node without the trainer. Its calls block; any number of processes may use it at once.

    Args:
        folder: of this node's stage, in its shared memory.
        locate: returns the address of the stage's server.
        keys: CURVE keys that authenticate this process; None: for a server on loopback.
        chunk_bytes, window_bytes: size of one answer, and of all that is asked for at a time.
        on_wait: called with what is waited for whenever that changes, and with "" at the end.
        connections: to the server; each is encrypted by one thread (0: one for every four cores, four at most).
    """

    def __init__(
        self,
        folder: Path,
        locate: Locate,
        keys: CurveKeys | None,
        *,
        chunk_bytes: int = CHUNK_BYTES,
        window_bytes: int = WINDOW_BYTES,
        connections: int = 0,
        on_wait: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.folder = folder
        self.bytes_in = 0
        """Bytes fetched since this object was made."""
        self.payload: Sent = "full"
        """Form of the version fetched last; `why_full` says why it was not a delta or adapters, if there are any."""
        self.why_full = ""
        self._in_full = 0
        """Versions for which neither is tried."""
        self._locate, self._keys, self._on_wait, self._waiting_for = locate, keys, on_wait, ""
        connections = connections or min(4, max(1, len(os.sched_getaffinity(0)) // 4))
        self._settings = FetchSettings(chunk_bytes, window_bytes, connections, True, CONNECT_TIMEOUT_S, 60.0)

    def source(self, record: VersionRecord, timeout_s: float) -> StageSource:
        """Return the version on this node's stage; fetch it first if it is missing.

        Raises:
            Gone: it was retired; a newer one is, or soon will be.
            Corrupt: what came is not that version, again and again.
            Unreachable: nothing comes from the other node. DeadlineExceeded: it still came when the time was over.
            OutOfSpace: no room, or every buffer is pinned by engines of this node.
            ProtocolError: the far end is no weight server of this version.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        until = time.monotonic() + timeout_s
        # A copy that is damaged here is fetched again.
        with contextlib.suppress(Gone, Corrupt):
            return StageSource(self.folder, record)
        try:
            with self._exclusive(record, until):
                with contextlib.suppress(Gone, Corrupt):
                    return StageSource(self.folder, record)
                self._fetch(record, until)
        finally:
            self._report_wait("")
        return StageSource(self.folder, record)

    def _report_wait(self, why: str) -> None:
        if why != self._waiting_for:
            self._waiting_for = why
            self._on_wait(why)

    @contextlib.contextmanager
    def _exclusive(self, record: VersionRecord, until: float) -> Iterator[None]:
        """Lock the fetching for this node. The kernel drops the lock of a dead process, and the next one resumes."""
        descriptor = os.open(self.folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    what = f"weights of policy version {record.version}"
                    why = "another process of this node fetches them"
                    self._report_wait(f"{what}: {why}")
                    if time.monotonic() > until:
                        raise DeadlineExceeded(what, why=why) from None
                    time.sleep(_LOCK_RETRY_S)
            yield
        finally:
            os.close(descriptor)

    def _fetch(self, record: VersionRecord, until: float) -> None:
        with _StageReader(self._locate, self._keys, self._settings, until, self._report_wait) as reader:
            try:
                manifest = _read_manifest(reader, record)
                stage = WeightStage(self.folder, manifest.epoch)
                try:
                    self._fill(reader, stage, manifest, until)
                    stage.retire(record.version)
                finally:
                    stage.close()
            except StaleEpoch as error:
                raise Gone(f"weights of policy version {record.version}", why=str(error)) from error
            finally:
                self.bytes_in += reader.bytes_in

    def _fill(self, reader: _StageReader, stage: WeightStage, manifest: Manifest, until: float) -> None:
        keep = max(
            (int(found[1]) for path in self.folder.iterdir() if (found := _VERSION.fullmatch(path.name))), default=0
        )
        while True:
            try:
                with stage.writing(manifest.layout, keep) as (file, view):
                    try:
                        self._make(reader, stage, manifest, view, until)
                        # The digests were verified a moment ago, and are verified again by whoever uses the version.
                        stage.seal(manifest.version, manifest.layout, file, view, buckets=manifest.buckets)
                    finally:
                        view.release()
                return
            except OutOfSpace as error:
                # Engines of this node pin every buffer until they have copied or died.
                if time.monotonic() + _ROOM_RETRY_S > until:
                    raise
                self._report_wait(str(error))
                time.sleep(_ROOM_RETRY_S)

    def _make(
        self, reader: _StageReader, stage: WeightStage, manifest: Manifest, into: memoryview, until: float
    ) -> None:
        """Fill `into` with the version: by a delta, the wire dtype or adapters where that saves bytes, else in full.

        Buckets that do not match their digest afterwards are fetched in full."""
        self.why_full = manifest.no_delta
        made = self._make_from_less(reader, stage, manifest, into, until)
        wrong = _missing(manifest, into)
        if wrong and made != "full":
            nbytes = sum(part.stop - part.start for part in wrong.values())
            self.why_full, made = f"{nbytes} bytes of the result do not match their digests", "full"
        self.payload = made
        reader.read_weights(manifest, into, wrong)

    def _make_from_less(
        self, reader: _StageReader, stage: WeightStage, manifest: Manifest, into: memoryview, until: float
    ) -> Sent:
        """Make the version from deltas, the wire dtype or adapters, as far as possible; the result is not verified."""
        held, narrow = self._find_held(manifest), manifest.wire_bytes
        if held is not None and not 0 < narrow < held.nbytes:
            if not _missing_exceeds(manifest, into, held.nbytes):
                self.why_full = f"no more of it is missing here than the {held.nbytes} bytes of its delta"
                return "full"
            if self._apply_in_time(reader, lambda: self._fetch_deltas(reader, manifest, held, into), until):
                return "delta"
        if narrow and _missing_exceeds(manifest, into, narrow):
            blob = bytearray(narrow)
            try:
                reader.read_all(served_name("wire", manifest.version, manifest.digest), memoryview(blob))
                decode_wire(memoryview(blob), manifest.layout, into)
            except (Gone, Corrupt, Refused):
                reader.reset()
        adapters = manifest.adapter_bytes
        if not adapters or not _missing_exceeds(manifest, into, adapters):
            return "full"
        adapted = self._apply_in_time(reader, lambda: self._fetch_adapters(reader, stage, manifest, into), until)
        return "adapters" if adapted else "full"

    def _apply_in_time(self, reader: _StageReader, fetch: Callable[[], _Make], until: float) -> bool:
        """Fetch and apply; return whether that succeeded in time. `why_full` says why not."""
        if self._in_full:
            self._in_full -= 1
            self.why_full = "a version before was not made in time"
            return False
        try:
            make, given_s = fetch(), MERGE_PART * (until - time.monotonic())
            try:
                make(time.monotonic() + given_s)
            except DeadlineExceeded as error:
                self._in_full = SLOW_VERSIONS
                self.why_full = f"{error} in {given_s:.1f} s"
                return False
        except (Gone, Corrupt, Refused, OutOfSpace) as error:
            self.why_full = str(error)
            reader.reset()
            return False
        return True

    def _find_held(self, manifest: Manifest) -> _Held | None:
        """Find the newest version on this node's stage from which deltas lead to the wanted one."""
        for delta in reversed(manifest.deltas):
            with contextlib.suppress(Gone, Corrupt):
                base = read_manifest(self.folder, delta.base)
                record = VersionRecord(delta.base, ROOT, 0, delta.base_digest)
                check_manifest(base, record, f"policy version {delta.base} on the stage")
                if base.layout == manifest.layout:
                    return _Held(base, manifest.since(base.version, base.digest))
        if manifest.deltas:
            self.why_full = f"its deltas are of {bases_of(manifest)}; none is whole on this node's stage"
        return None

    def _fetch_deltas(self, reader: _StageReader, manifest: Manifest, held: _Held, into: memoryview) -> _Make:
        """Copy the version that is here into `into` and fetch the deltas that lead on from it."""
        # Pinned only for the copy: nothing may overwrite it meanwhile.
        with pinned(self.folder, held.base) as view:
            copy_verified(held.base, view, into)
        blobs = [memoryview(bytearray(delta.nbytes)) for delta in held.deltas]
        for delta, blob in zip(held.deltas, blobs, strict=True):
            reader.read_all(served_name("delta", delta.version, delta.digest), blob)
        named = manifest.as_delta(held.base.version, held.base.digest)
        return lambda by: apply(blobs, into, named, verified=False, until=by)

    def _fetch_adapters(self, reader: _StageReader, stage: WeightStage, manifest: Manifest, into: memoryview) -> _Make:
        """Fill `into` with the base, which is fetched once, and fetch the adapters."""
        base = self._base(reader, stage, manifest, into)
        blob = memoryview(bytearray(manifest.adapter_bytes))
        reader.read_all(served_name("adapters", manifest.version, manifest.digest), blob)
        lora = lora_for(blob, base)
        return lambda by: merge_lora(lora, base.layout, into, until=by)

    def _base(self, reader: _StageReader, stage: WeightStage, manifest: Manifest, into: memoryview) -> Manifest:
        """Copy the base of the version's adapters from this node's stage; fetch it first if it is missing or damaged.

        A broken attempt is resumed."""
        with contextlib.suppress(Gone, Corrupt, Refused):
            return self._copy_base(manifest, into)
        base = _read_manifest(reader, VersionRecord(ROOT, ROOT, 0, manifest.base_digest))
        stage.seal_base(base.layout, lambda view: reader.read_weights(base, view, _missing(base, view)))
        return self._copy_base(manifest, into)

    def _copy_base(self, manifest: Manifest, into: memoryview) -> Manifest:
        base = base_of(self.folder, manifest)
        with pinned(self.folder, base) as view:
            copy_verified(base, view, into)
        return base


class _StageReader:
    """Reads named bytes from a stage's server in the calling thread; reconnects when connections are lost."""

    def __init__(
        self,
        locate: Locate,
        keys: CurveKeys | None,
        settings: FetchSettings,
        until: float,
        on_wait: Callable[[str], None],
    ) -> None:
        self._locate, self._keys, self._settings, self._until, self._on_wait = locate, keys, settings, until, on_wait
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(settings.connections)
        self._poller = zmq.Poller()
        self._numbers = itertools.count(1)
        self._peer: Peer | None = None
        self._trouble = "not connected yet"
        self._attempts = 0
        self._error: RelaxError | None = None
        self._protocol_error: ProtocolError | None = None
        self._arrived: list[CacheEntry] = []
        self.bytes_in = 0
        self._last_at = float("-inf")

    def __enter__(self) -> _StageReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._disconnect()
        self._context.term()

    def read(self, name: str, offset: int, into: memoryview) -> None:
        for _ in self._fetch_ranges({(offset, len(into)): into}, name):
            pass

    def read_all(self, name: str, into: memoryview) -> None:
        """Fill `into` with all the bytes of `name`."""
        places = {(p.start, p.stop - p.start): into[p] for p in bucket_slices(len(into))}
        for _ in self._fetch_ranges(places, name):
            pass

    def reset(self) -> None:
        """Drop the connections, and with them every answer that is still to come."""
        self._disconnect()
        self._arrived.clear()

    def read_weights(self, manifest: Manifest, into: memoryview, missing: dict[int, slice]) -> None:
        """Fill `into` with the buckets of a version that are missing there, by where they begin."""
        name, what = (
            served_name("weights", manifest.version, manifest.digest),
            f"weights of policy version {manifest.version}",
        )
        parts = bucket_slices(manifest.layout.nbytes)
        expected = {part.start: digest for part, digest in zip(parts, manifest.buckets, strict=True)}
        for attempt in range(2):
            wrong: dict[int, slice] = {}
            places = {(p.start, p.stop - p.start): into[p] for p in missing.values()}
            try:
                with contextlib.closing(self._fetch_ranges(places, name)) as arriving:
                    for start in arriving:
                        if bucket_digest(into[missing[start]]) != expected[start]:
                            wrong[start] = missing[start]
            finally:
                # Neither a traceback nor a pending request may keep the stage's buffer mapped.
                for place in places.values():
                    place.release()
            if not wrong:
                return
            missing = wrong
            part = next(iter(wrong.values()))
            if attempt:
                raise Corrupt(f"{what}, bytes {part.start}-{part.stop}", why="they do not match their digest")

    def _fetch_ranges(self, places: dict[tuple[int, int], memoryview], name: str) -> Generator[int]:
        """Fetch ranges of a name into their places; yield the offset of each when it is complete.

        All that is left is requested anew after the loss of all connections, and the address is asked for again: a
        restarted server listens on another port.
        """
        left = dict(places)
        while left:
            self._check_time(name, left)
            if self._peer is None:
                try:
                    address = self._locate()
                except RelaxError as error:
                    self._pause(f"where it is served is not known: {error}")
                    continue
                if not address:
                    self._pause("it is served nowhere at the moment")
                    continue
                self._peer = Peer(address, self._settings, self._numbers, random.Random())
            peer = self._peer
            entries = [CacheEntry(peer.address, Extent(name, at, n), _BufferRegion(m)) for (at, n), m in left.items()]
            for entry in entries:
                peer.want(entry)
            while left and self._peer is not None:
                before = set(peer.links)
                closed = peer.step(self._context, self._keys, time.monotonic())
                for link in peer.links:
                    if link not in before:
                        self._poller.register(link.sock, zmq.POLLIN)
                        self._poller.register(link.monitor, zmq.POLLIN)
                for link in closed:
                    self._end(link)
                self._poller.poll(max(0, min(_POLL_MS, int((self._until - time.monotonic()) * 1000))))
                peer.receive(self, time.monotonic())
                if self._error is not None:
                    failure, self._error = self._error, None
                    raise failure
                if peer.trouble and not any(link.up for link in peer.links):
                    self._trouble = peer.trouble
                    for entry in entries:
                        entry.region = None
                    self._disconnect()
                    self._pause(self._trouble)
                self._check_time(name, left)
                for entry in self._arrived:
                    del left[(entry.extent.offset, entry.extent.nbytes)]
                    yield entry.extent.offset
                self._arrived.clear()

    def arrived(self, entry: CacheEntry, nbytes: int) -> None:
        self.bytes_in += nbytes
        self._last_at = time.monotonic()
        self._attempts = 0
        entry.missing_bytes -= nbytes
        if entry.missing_bytes == 0:
            self._arrived.append(entry)

    def failed(self, entry: CacheEntry, error: RelaxError) -> None:
        self._error = self._error or error

    def protocol_error(self, peer: str, error: ProtocolError) -> None:
        """For `FetchSink`. An error, because what was dropped would be waited for until the deadline."""
        self._error = self._error or ProtocolError(f"{error.what} from {peer}", why=error.why)

    def _check_time(self, name: str, left: dict[tuple[int, int], memoryview]) -> None:
        if time.monotonic() <= self._until:
            return
        what = f"{name} from {self._peer.address if self._peer else 'the weight stage'}"
        why = f"{len(left)} buckets are missing, {self.bytes_in} bytes came"
        if time.monotonic() - self._last_at < _FRESH_S:
            raise DeadlineExceeded(what, why=why, hint="give it more time")
        reason = self._trouble if self._peer is None or not self._peer.links else "connected, nothing comes"
        raise Unreachable(what, why=f"{why}; {reason}")

    def _pause(self, trouble: str) -> None:
        self._trouble, self._attempts = trouble, self._attempts + 1
        self._on_wait(f"weights from another node: {trouble}")
        time.sleep(min(0.05 * 2 ** min(self._attempts, 5), max(0.0, self._until - time.monotonic()) + 0.001))

    def _end(self, link: PeerConnection) -> None:
        self._poller.unregister(link.sock)
        self._poller.unregister(link.monitor)
        link.close()

    def _disconnect(self) -> None:
        if self._peer is not None:
            for link in self._peer.links:
                self._end(link)
        self._peer = None


def _mismatches(manifest: Manifest, data: memoryview) -> Iterator[slice]:
    parts = zip(bucket_slices(manifest.layout.nbytes), manifest.buckets, strict=True)
    return (part for part, digest in parts if bucket_digest(data[part]) != digest)


def _missing(manifest: Manifest, data: memoryview) -> dict[int, slice]:
    """Collect the buckets that do not match the version's digests, by their start."""
    return {part.start: part for part in _mismatches(manifest, data)}


def _missing_exceeds(manifest: Manifest, data: memoryview, nbytes: int) -> bool:
    """Return whether more than `nbytes` are missing; stops digesting as soon as that is known."""
    missing = itertools.accumulate(part.stop - part.start for part in _mismatches(manifest, data))
    return any(sofar > nbytes for sofar in missing)


def _read_manifest(reader: _StageReader, record: VersionRecord) -> Manifest:
    name, what = served_name("manifest", record.version, record.digest), f"weights of policy version {record.version}"
    head = bytearray(MANIFEST_HEAD.size)
    reader.read(name, 0, memoryview(head))
    text = bytearray(manifest_bytes(bytes(head), what))
    reader.read(name, len(head), memoryview(text))
    manifest = decode_manifest(bytes(text), what)
    check_manifest(manifest, record, what)
    return manifest


def manifest_bytes(head: bytes, what: str) -> int:
    """Return the length of the manifest that follows this head.

    Raises:
        ProtocolError: it is no head, or the length is over the bound.
    """
    if len(head) != MANIFEST_HEAD.size:
        raise ProtocolError(f"manifest of {what}", why=f"its head has {len(head)} bytes")
    magic, length = MANIFEST_HEAD.unpack(head)
    if magic != MANIFEST_MAGIC:
        raise ProtocolError(f"manifest of {what}", why=f"it begins with {magic!r}, not {MANIFEST_MAGIC!r}")
    if not 0 < length <= MAX_MANIFEST_BYTES:
        raise ProtocolError(f"manifest of {what}", why=f"it would have {length} bytes; at most {MAX_MANIFEST_BYTES}")
    return int(length)


def decode_manifest(text: bytes, what: str) -> Manifest:
    """Decode a manifest.

    Raises:
        ProtocolError: it cannot be decoded.
    """
    try:
        return msgspec.json.decode(text, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"manifest of {what}", why=str(error)) from error
