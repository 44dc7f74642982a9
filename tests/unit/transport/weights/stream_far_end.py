"""The far end of the tests of the weight stream: a stage that is served, and readers in processes of their own."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import msgspec
from server_process import ServerProcess, environment, given_keys, tell

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.weights import stream
from relax_rt.transport.weights.manifest import Layout, layout_of
from relax_rt.transport.weights.source import StageSource
from relax_rt.transport.weights.stage import WeightStage
from relax_rt.transport.weights.stream import StageMirror, stage_server

KEYS = CurveKeys.make()
MIB = 1 << 20


@contextlib.contextmanager
def serving(folder: pathlib.Path) -> Iterator[str]:
    server = stage_server(folder, KEYS)
    try:
        yield server.start("tcp://127.0.0.1:0")
    finally:
        server.stop()


def mirror_of(folder: pathlib.Path, locate: Callable[[], str]) -> StageMirror:
    return StageMirror(folder, locate, KEYS, connections=1)


def compared(
    folder: pathlib.Path, nbytes: int, mirror: StageMirror, record: VersionRecord, timeout_s: float = 20.0
) -> tuple[bool, int]:
    """Whether a version came as it is at home, and how many bytes crossed."""
    before = mirror.bytes_in
    mine, theirs = bytearray(nbytes), bytearray(nbytes)
    mirror.source(record, timeout_s).copy_into(memoryview(mine))
    StageSource(folder, record).copy_into(memoryview(theirs))
    return mine == theirs, mirror.bytes_in - before


def layout_of_mib(mib: int) -> Layout:
    """One tensor of a MiB after the other, and an odd one at the end."""
    return layout_of([*((f"t{n}", "uint8", (MIB,), MIB) for n in range(mib)), ("odd", "float32", (3,), 12)])


def publish(
    folder: pathlib.Path, layout: Layout, version: int, data: bytes | bytearray, epoch: int = 1
) -> VersionRecord:
    """Stage and commit a version as a trainer does."""
    stage = WeightStage(folder, epoch)
    try:
        with stage.writing(layout, version - 1) as (file, view):
            view[:] = data
            manifest = stage.seal(version, layout, file, view)
            view.release()
        stage.retire(version)
    finally:
        stage.close()
    return VersionRecord(version, version - 1, version, manifest.digest)


def far_server(folder: pathlib.Path, host: str = "127.0.0.1", node: list[str] | None = None) -> ServerProcess:
    """A server of a stage in a process of its own, each time at another address."""
    command = [*(node or []), sys.executable, __file__, "serve", str(folder)]
    return ServerProcess(command, KEYS, host, keeps_port=False)


def reader(
    node: list[str],
    address: str,
    folder: pathlib.Path,
    record: VersionRecord,
    how: str = "read",
    timeout_s: float = 20.0,
) -> subprocess.Popen[str]:
    """A process on another node that gets a version and tells digest and bytes fetched, or the error."""
    arguments = [how, str(folder), address, msgspec.json.encode(record).decode(), str(timeout_s)]
    return subprocess.Popen(
        [*node, sys.executable, __file__, *arguments], env=environment(KEYS), stdout=subprocess.PIPE, text=True
    )


def stop_halfway() -> None:
    """This process stops itself when the first of a version's two buckets has come."""
    digest, calls = stream.bucket_digest, 0

    def counted(data: memoryview) -> str:
        nonlocal calls
        calls += 1
        if calls == 3:  # both were looked at before anything was asked for
            tell("halfway")
            os.kill(os.getpid(), signal.SIGSTOP)
        return digest(data)

    stream.bucket_digest = counted


def main(how: str, folder: str, address: str, *more: str) -> None:
    """Entry of the other processes."""
    keys = given_keys()
    if how == "serve":
        tell(stage_server(pathlib.Path(folder), keys).start(address))
        time.sleep(60)
        return
    if how == "stranger":
        other = CurveKeys.make()
        keys = CurveKeys(other.public, other.secret, server=keys.public)
    if how == "halfway":
        stop_halfway()
    window = 8 * MIB
    mirror = StageMirror(
        pathlib.Path(folder), lambda: address, keys, window_bytes=window, chunk_bytes=window // 8, connections=1
    )
    try:
        source = mirror.source(msgspec.json.decode(more[0], type=VersionRecord), float(more[1]))
        into = bytearray(source.manifest.layout.nbytes)
        source.copy_into(memoryview(into))
        tell(f"{source.manifest.digest} {mirror.bytes_in}")
    except RelaxError as error:
        tell(f"{type(error).__name__}: {error}; {mirror.bytes_in} bytes came")


if __name__ == "__main__":
    main(*sys.argv[1:])
