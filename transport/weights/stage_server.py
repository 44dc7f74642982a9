"""Serve the stage of a node to other nodes: versions by name, through a payload server.

A version that is being read stays pinned for a while after it was retired, because a slow link would never finish one
otherwise. At most two are pinned, so that remote readers cannot hold the trainer's buffers. Deltas and adapters, which
lie beside the buffers, are counted apart: up to the size of one version together, so that they displace no version.
"""

from __future__ import annotations

import contextlib
import math
import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.rpc.errors import Corrupt, Gone
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.weights.manifest import Manifest
from relax_rt.transport.weights.stage import adapters_view, delta_view, pinned, read_manifest, wire_view

MANIFEST_HEAD = struct.Struct("<8sQ")
MANIFEST_MAGIC = b"RLXWMAN1"
MAX_MANIFEST_BYTES = 64 << 20
MAX_PINNED = 2
MAX_SIDE_VERSIONS, MAX_SIDE_FILES = 1, 32
"""Limits of pinned deltas and adapters, in versions' worth of bytes and in number (each costs a file descriptor)."""
IDLE_S = 5.0
_SIDE_FILES = ("adapters", "delta")
_NAME = re.compile(r"(manifest|weights|wire|adapters|delta)-(\d{1,18})-([0-9a-f]{0,64})")


def manifest_name(version: int, digest: str) -> str:
    """Name a version's manifest: its length in front (MANIFEST_HEAD), then JSON."""
    return f"manifest-{version}-{digest}"


def weights_name(version: int, digest: str) -> str:
    """Name a version's flat buffer."""
    return f"weights-{version}-{digest}"


def wire_name(version: int, digest: str) -> str:
    """Name a version in the wire dtype, if its manifest has `wire_bytes`."""
    return f"wire-{version}-{digest}"


def adapters_name(version: int, digest: str) -> str:
    """Name a version's adapters, if its manifest has `adapter_bytes`; their base is version ROOT."""
    return f"adapters-{version}-{digest}"


def delta_name(version: int, digest: str) -> str:
    """Name the delta that makes a version, as long as a manifest names it."""
    return f"delta-{version}-{digest}"


def stage_server(folder: Path, keys: CurveKeys | None, *, io_threads: int = 2) -> PayloadServer:
    """Serve the stage in `folder`, which need not exist yet. Readers without the key get nothing."""
    return PayloadServer(folder, keys=keys, served=StagedVersions(folder), io_threads=io_threads)


class _Pinned(NamedTuple):
    kind: str
    view: memoryview
    release: contextlib.ExitStack


class StagedVersions:
    """The versions on a stage, by name, for a payload server."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._pins: OrderedDict[str, _Pinned] = OrderedDict()
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
        whole = self._text(name, version, digest) if kind == "manifest" else self._bytes(name, kind, version, digest)
        if offset < 0 or nbytes < 0 or offset + nbytes > len(whole):
            raise Corrupt(f"{name} on the weight stage", why=f"bytes {offset} to {offset + nbytes} of {len(whole)}")
        return whole[offset : offset + nbytes]

    def sweep(self) -> None:
        """Unpin versions that were not read for IDLE_S."""
        for name in list(self._pins):
            if self._clock() - self._used[name] > IDLE_S:
                self._unpin(name)

    def clear(self) -> None:
        """Unpin all."""
        for name in list(self._pins):
            self._unpin(name)

    def _bytes(self, name: str, kind: str, version: int, digest: str) -> memoryview:
        if name not in self._pins:
            with contextlib.ExitStack() as entering:
                try:
                    view = self._map(entering, kind, version, digest)
                except OSError as error:
                    raise Gone(f"weights of policy version {version}", why=str(error)) from error
                self._make_room(kind, len(view))
                self._pins[name] = _Pinned(kind, view, entering.pop_all())
        self._used[name] = self._clock()
        self._pins.move_to_end(name)
        return self._pins[name].view

    def _make_room(self, kind: str, nbytes: int) -> None:
        """Unpin the least recently read of the same kind until another one is within the limits."""
        beside = kind in _SIDE_FILES
        alike = [name for name, pinned in self._pins.items() if (pinned.kind in _SIDE_FILES) == beside]
        most = MAX_SIDE_FILES if beside else MAX_PINNED
        most_bytes = MAX_SIDE_VERSIONS * _version_bytes(self._folder) if beside else math.inf
        total = nbytes + sum(len(self._pins[name].view) for name in alike)
        while alike and (len(alike) >= most or total > most_bytes):
            oldest = alike.pop(0)
            total -= len(self._pins[oldest].view)
            self._unpin(oldest)

    def _map(self, entering: contextlib.ExitStack, kind: str, version: int, digest: str) -> memoryview:
        if kind == "delta":
            # The manifests of later versions name it as well; that of its own version may be retired.
            return entering.enter_context(delta_view(self._folder, version, digest))
        manifest = self._read(version, digest)
        if kind == "adapters":
            return entering.enter_context(adapters_view(self._folder, manifest))
        view = entering.enter_context(pinned(self._folder, manifest))
        return entering.enter_context(wire_view(self._folder, manifest)) if kind == "wire" else view

    def _text(self, name: str, version: int, digest: str) -> memoryview:
        if self._manifest[0] != name:
            text = msgspec.json.encode(self._read(version, digest))
            self._manifest = (name, MANIFEST_HEAD.pack(MANIFEST_MAGIC, len(text)) + text)
        return memoryview(self._manifest[1])

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


def _version_bytes(folder: Path) -> int:
    """Size of a version on a stage, by its buffers; 0: there is none."""
    found = 0
    for path in folder.glob("w*.buf"):
        with contextlib.suppress(FileNotFoundError):
            found = max(found, path.stat().st_size)
    return found
