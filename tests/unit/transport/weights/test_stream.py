"""Weights from one node's stage to another's: whole and once, whatever breaks on the way, and nothing to strangers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from netns import Nodes, cut
from server_process import told
from stream_far_end import KEYS, MIB, far_server, layout_of_mib, publish, reader, serving
from weight_versions import fill, version_of

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory import payload_wire
from relax_rt.transport.memory.payload_wire import GetRanges, Range
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Gone, ProtocolError, Unreachable
from relax_rt.transport.weights.manifest import BUCKET_BYTES, Layout, check_manifest, layout_of
from relax_rt.transport.weights.stage import WeightStage, wire_file
from relax_rt.transport.weights.stream import (
    IDLE_S,
    LOCK_FILE,
    MANIFEST_HEAD,
    MANIFEST_MAGIC,
    MAX_PINNED,
    StagedVersions,
    StageMirror,
    decode_manifest,
    manifest_bytes,
    served_name,
)

LAYOUT = layout_of_mib(28)
BUCKETS = -(-LAYOUT.nbytes // BUCKET_BYTES)
assert BUCKETS == 2


def mirror_of(folder: pathlib.Path, locate: Callable[[], str], window_bytes: int = 8 * MIB) -> StageMirror:
    return StageMirror(folder, locate, KEYS, window_bytes=window_bytes, chunk_bytes=window_bytes // 8, connections=1)


def content(mirror: StageMirror, record: VersionRecord, timeout_s: float = 20.0) -> bytearray:
    source = mirror.source(record, timeout_s)
    into = bytearray(source.manifest.layout.nbytes)
    source.copy_into(memoryview(into))
    return into


def begun(buffer: pathlib.Path) -> bool:
    """Whether the second bucket has begun to come."""
    with buffer.open("rb") as file:
        file.seek(BUCKET_BYTES)
        return file.read(4096).strip(b"\0") != b""


def eventually(condition: Callable[[], bool], timeout_s: float = 120) -> None:
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def test_a_version_comes_whole_and_what_did_not_change_is_not_sent_again(tmp_path: pathlib.Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    data = fill(LAYOUT)
    first = publish(home, LAYOUT, 1, data)
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        assert content(mirror, first) == data
        assert LAYOUT.nbytes <= mirror.bytes_in < LAYOUT.nbytes + 20_000
        # The same again, by any process of the node: nothing is sent.
        again = mirror_of(away, lambda: "tcp://127.0.0.1:1")
        assert content(again, first) == data and again.bytes_in == 0
        data[BUCKET_BYTES + 5] ^= 1
        for version in (2, 3):
            record = publish(home, LAYOUT, version, data)
            assert content(mirror, record) == data
        # Version 3 came into the buffer that held version 1: one bucket differed.
        assert mirror.bytes_in < 2 * LAYOUT.nbytes + 2 * BUCKET_BYTES + 60_000
        assert sorted(p.name for p in away.glob("v*.json")) == ["v00000003.json"]
        with pytest.raises(Gone, match="policy version 1"):
            mirror_of(away, lambda: address).source(first, 20.0)


def narrowed(folder: pathlib.Path, version: int, seed: int) -> tuple[VersionRecord, bytearray]:
    """A version that is sent as float8, and what it is."""
    torch = pytest.importorskip("torch")
    from relax_rt.transport.weights.payloads import wire_version

    count = 20 * MIB // 4
    layout = layout_of([("w", "float32", (1024, count // 1024), count * 4)])
    stage = WeightStage(folder, 1)
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    with stage.writing(layout, version - 1) as (file, view):
        torch.frombuffer(view, dtype=torch.float32).copy_(values)
        manifest = stage.seal(version, layout, file, view, wire_version(layout, view, "float8_e4m3fn"))
        data = bytearray(view)
    stage.retire(version)
    stage.close()
    return VersionRecord(version, version - 1, version, manifest.digest), data


def test_fewer_bits_are_sent_and_what_arrives_is_the_version(tmp_path: pathlib.Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    record, data = narrowed(home, 1, 1)
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        assert content(mirror, record) == data
        assert mirror.bytes_in < len(data) / 3.9
        assert not list(away.glob("x*")), "the node needs it no further"
        before = mirror.bytes_in
        record, data = narrowed(home, 2, 2)
        assert content(mirror, record) == data
        assert mirror.bytes_in - before < len(data) / 3.9


@pytest.mark.parametrize("damage", ["missing", "another"])
def test_where_fewer_bits_do_not_make_the_version_it_comes_as_it_is(tmp_path: pathlib.Path, damage: str) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    record, data = narrowed(home, 1, 1)
    path = home / wire_file(1)
    path.unlink() if damage == "missing" else path.write_bytes(os.urandom(path.stat().st_size))
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        assert content(mirror, record) == data
        assert mirror.bytes_in > len(data)


def test_what_is_damaged_on_the_stage_of_a_node_is_fetched_again(tmp_path: pathlib.Path) -> None:
    home, away, layout = tmp_path / "home", tmp_path / "away", layout_of_mib(1)
    data = fill(layout)
    record = publish(home, layout, 1, data)
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        assert content(mirror, record) == data
        (away / "v00000001.json").write_bytes(b"{")
        assert content(mirror, record) == data


def test_a_server_that_dies_in_the_middle_and_comes_back_elsewhere_is_found_and_the_rest_is_fetched(
    tmp_path: pathlib.Path,
) -> None:
    data = fill(LAYOUT)
    record = publish(tmp_path / "home", LAYOUT, 1, data)
    with far_server(tmp_path / "home") as far:
        mirror = mirror_of(tmp_path / "away", far.locate, window_bytes=64 << 10)
        got: list[bytearray] = []
        thread = threading.Thread(target=lambda: got.append(content(mirror, record)))
        thread.start()
        # bytes_in of the mirror is counted at the end of a fetch: look at what arrived in the buffer.
        buffer = tmp_path / "away" / "w0.buf"
        eventually(lambda: buffer.exists() and begun(buffer))
        before = far.address
        far.kill()
        time.sleep(0.1)
        far.start()
        assert far.address != before
        thread.join(120)
        assert got == [data]
        # The bucket that was whole was not fetched again; of the broken one all.
        assert mirror.bytes_in < LAYOUT.nbytes + (LAYOUT.nbytes - BUCKET_BYTES) + 200_000


def test_a_reader_that_is_killed_is_followed_by_another_of_its_node_where_it_was(tmp_path: pathlib.Path) -> None:
    data = fill(LAYOUT)
    record = publish(tmp_path / "home", LAYOUT, 1, data)
    away = tmp_path / "away"
    with far_server(tmp_path / "home") as far:
        first = reader([], far.locate(), away, record, "halfway")
        try:
            assert told(first) == "halfway"
            mirror = mirror_of(away, far.locate)
            with pytest.raises(DeadlineExceeded, match="another process of this node fetches them"):
                mirror.source(record, 0.1)
            first.kill()
            assert content(mirror, record) == data
            assert mirror.bytes_in <= LAYOUT.nbytes - BUCKET_BYTES + 20_000
        finally:
            first.kill()
            first.wait()
            assert first.stdout is not None
            first.stdout.close()


def test_many_engines_of_a_node_cost_one_transfer(tmp_path: pathlib.Path) -> None:
    data = fill(LAYOUT)
    record = publish(tmp_path / "home", LAYOUT, 1, data)
    with serving(tmp_path / "home") as address:
        mirrors = [mirror_of(tmp_path / "away", lambda: address) for _ in range(4)]
        got: list[bytearray] = []
        threads = [threading.Thread(target=lambda m=mirror: got.append(content(m, record))) for mirror in mirrors]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert got == [data] * 4
        assert sum(mirror.bytes_in for mirror in mirrors) < LAYOUT.nbytes + 20_000


def test_a_reader_that_stops_holds_neither_the_sender_nor_others_nor_the_stage(tmp_path: pathlib.Path) -> None:
    home = tmp_path / "home"
    data = fill(LAYOUT)
    record = publish(home, LAYOUT, 1, data)
    with far_server(home) as far:
        stopped = reader([], far.locate(), tmp_path / "stopped", record, "halfway")
        try:
            assert told(stopped) == "halfway"
            assert content(mirror_of(tmp_path / "away", far.locate), record) == data
            # The trainer goes on publishing; at most two versions are held for readers.
            small = layout_of_mib(1)
            for version in range(2, 8):
                data = fill(small, version)
                record = publish(home, small, version, data)
                assert content(mirror_of(tmp_path / "away", far.locate), record) == data
        finally:
            stopped.kill()
            stopped.wait()
            assert stopped.stdout is not None
            stopped.stdout.close()


def test_a_stopped_server_ends_at_the_deadline(tmp_path: pathlib.Path) -> None:
    record = publish(tmp_path / "home", LAYOUT, 1, fill(LAYOUT))
    with far_server(tmp_path / "home") as far:
        far.signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(Unreachable, match=r"manifest-1-.*missing, 0 bytes came"):
            mirror_of(tmp_path / "away", far.locate).source(record, 0.5)
        assert time.monotonic() - began < 30
        far.signal(signal.SIGCONT)


def test_where_nothing_is_served_ends_at_the_deadline_with_the_reason(tmp_path: pathlib.Path) -> None:
    waits: list[str] = []
    record = VersionRecord(1, 0, 0, "00")

    def nowhere() -> str:
        raise Unreachable("queue/0", why="it does not run")

    mirror = StageMirror(tmp_path, nowhere, KEYS, on_wait=waits.append)
    with pytest.raises(Unreachable, match="where it is served is not known: queue/0: it does not run"):
        mirror.source(record, 0.3)
    assert waits == ["weights from another node: where it is served is not known: queue/0: it does not run", ""]


def test_who_waits_for_another_of_its_node_says_so_once(tmp_path: pathlib.Path) -> None:
    waits: list[str] = []
    record = publish(tmp_path / "home", layout_of_mib(1), 1, fill(layout_of_mib(1)))
    (tmp_path / "away").mkdir()
    with (tmp_path / "away" / LOCK_FILE).open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        mirror = StageMirror(tmp_path / "away", lambda: "", KEYS, on_wait=waits.append)
        with pytest.raises(DeadlineExceeded, match="another process of this node"):
            mirror.source(record, 0.2)
    assert len(waits) == 2 and "another process of this node" in waits[0] and waits[1] == ""


def test_bytes_that_are_not_the_version_are_never_sealed(tmp_path: pathlib.Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    record = publish(home, LAYOUT, 1, fill(LAYOUT))
    with (home / "w0.buf").open("r+b") as file:
        file.seek(BUCKET_BYTES + 9)
        file.write(b"\0\0\0\0\0\0")
    with serving(home) as address:
        with pytest.raises(Corrupt, match=f"bytes {BUCKET_BYTES}-{LAYOUT.nbytes}: they do not match"):
            mirror_of(away, lambda: address).source(record, 20.0)
        assert not list(away.glob("v*.json"))
        with pytest.raises(Gone, match="it has digest"):
            mirror_of(away, lambda: address).source(msgspec.structs.replace(record, digest="ab"), 20.0)


# Between nodes.


def test_another_node_gets_every_byte_once_and_a_stranger_none(nodes: Nodes, tmp_path: pathlib.Path) -> None:
    data = fill(LAYOUT)
    record = publish(tmp_path / "home", LAYOUT, 1, data)
    with far_server(tmp_path / "home", nodes.host, nodes.first) as far:
        readers = [reader(nodes.second, far.locate(), tmp_path / "away", record) for _ in range(2)]
        stranger = reader(nodes.second, far.locate(), tmp_path / "stranger", record, "stranger", 1.0)
        answers = [told(process).split() for process in readers]
        assert [digest for digest, _ in answers] == [record.digest] * 2
        assert sorted(int(n) > 0 for _, n in answers) == [False, True]
        refusal = told(stranger)
        assert refusal.startswith("Unreachable: ") and "does not admit this process's key" in refusal
        assert refusal.endswith("; 0 bytes came") and not list((tmp_path / "stranger").glob("w*"))
        cut(nodes.second)
        lost = reader(nodes.second, far.locate(), tmp_path / "lost", record, "read", 1.0)
        assert told(lost).startswith("Unreachable: ")
        for process in (*readers, stranger, lost):
            process.wait(120)
            assert process.stdout is not None
            process.stdout.close()


# Hostile ends.


@contextlib.contextmanager
def impostor(answer: Callable[[Range], list[bytes]]) -> Iterator[str]:
    """Something with the right key that answers each range in its own way."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.ROUTER)
    sock.curve_secretkey, sock.curve_publickey, sock.curve_server = KEYS.secret, KEYS.public, True
    port = sock.bind_to_random_port("tcp://127.0.0.1")
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            if sock.poll(20):
                who, frame = sock.recv_multipart()
                for wanted in payload_wire.decode_get(frame).ranges:
                    sock.send_multipart([who, *answer(wanted)])

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join()
        sock.close(linger=0)
        context.term()


def honest(wanted: Range, body: bytes) -> list[bytes]:
    import xxhash

    return [
        payload_wire.encode_head(
            payload_wire.BYTES, [payload_wire.RangeHead(wanted.id, len(body), xxhash.xxh3_64_intdigest(body))]
        ),
        body,
    ]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (
            lambda w: [
                b"RLXQ" + payload_wire.encode_head(payload_wire.BYTES, [payload_wire.RangeHead(w.id, 1, 0)])[4:],
                b"x",
            ],
            "begins with b'RLXQ'",
        ),
        (
            lambda w: [
                payload_wire.encode_head(payload_wire.BYTES, [payload_wire.RangeHead(w.id, w.nbytes + 1, 0)]),
                b"x",
            ],
            "another size",
        ),
        (
            lambda w: [payload_wire.encode_head(payload_wire.BYTES, [payload_wire.RangeHead(w.id + 99, 1, 0)]), b"x"],
            "not asked for",
        ),
        (lambda w: [b"nothing"], "is no head"),
        (lambda w: honest(w, MANIFEST_HEAD.pack(b"RLXWMAN9", 5)), "begins with b'RLXWMAN9'"),
        (lambda w: honest(w, MANIFEST_HEAD.pack(MANIFEST_MAGIC, 1 << 62)), "it would have 4611686018427387904 bytes"),
        (
            lambda w: honest(w, (MANIFEST_HEAD.pack(MANIFEST_MAGIC, 4) + b"null")[w.offset :][: w.nbytes]),
            "Expected `object`",
        ),
    ],
)
def test_a_hostile_server_is_a_typed_error_at_once(
    tmp_path: pathlib.Path, answer: Callable[[Range], list[bytes]], error: str
) -> None:
    with impostor(answer) as address:
        began = time.monotonic()
        with pytest.raises(ProtocolError, match=error):
            mirror_of(tmp_path, lambda: address).source(VersionRecord(1, 0, 0, "00"), 600.0)
        assert time.monotonic() - began < 120
    assert not list(tmp_path.glob("w*"))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 8}, "is of version 8"),
        ({"buckets": ()}, "0 digests are not those"),
        ({"layout": Layout((), 1 << 50)}, f"it has {1 << 50} bytes"),
        ({"layout": Layout((), 0)}, "it has 0 bytes"),
        ({"buckets": ("00",)}, "do not make that of the whole"),
        ({"digest": "00"}, "committed with digest"),
    ],
)
def test_a_manifest_that_cannot_be_true_is_refused(change: dict[str, object], why: str) -> None:
    record, manifest = version_of(fill(layout_of_mib(1)), layout_of_mib(1))
    check_manifest(manifest, record, "v")
    with pytest.raises(Corrupt, match=why):
        check_manifest(msgspec.structs.replace(manifest, **change), record, "v")


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_bytes_are_understood_or_refused(data: bytes) -> None:
    for prefix in (b"", b"{", MANIFEST_MAGIC, b'{"version":1,"epoch":1,"file":"","layout":'):
        with contextlib.suppress(ProtocolError):
            decode_manifest(prefix + data, "v")
        with contextlib.suppress(ProtocolError):
            assert 0 < manifest_bytes(prefix + data, "v") <= 64 << 20


@given(st.text(max_size=60), st.integers(-(2**63), 2**63), st.integers(-(2**63), 2**63))
@settings(deadline=None)
def test_the_stage_gives_out_nothing_but_versions(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, n: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "stage"
    if not folder.exists():
        publish(folder, layout_of_mib(1), 1, fill(layout_of_mib(1)))
    served = StagedVersions(folder)
    record, _ = version_of(fill(layout_of_mib(1)), layout_of_mib(1), 1)
    for asked in (name, f"weights-{name}", f"../{name}", "epoch", "w0.buf", "v00000001.json"):
        with pytest.raises((Corrupt, Gone)):
            served.range(asked, 0, 1)
    for asked in (served_name("weights", 1, record.digest), served_name("manifest", 1, record.digest)):
        try:
            assert len(served.range(asked, at, n)) == n
        except Corrupt as error:
            assert "bytes" in error.why
    served.clear()


def test_a_version_that_is_read_stays_after_it_was_retired_and_goes_when_nobody_does(tmp_path: pathlib.Path) -> None:
    now = [0.0]
    layout = layout_of_mib(1)
    served = StagedVersions(tmp_path, clock=lambda: now[0])
    one = served_name("weights", 1, publish(tmp_path, layout, 1, fill(layout, 1)).digest)
    first = bytes(served.range(one, 0, 100))
    two = served_name("weights", 2, publish(tmp_path, layout, 2, fill(layout, 2)).digest)
    assert served.range(one, 0, 100) == first
    served.range(two, 0, 1)
    served.sweep()
    assert len(served) == MAX_PINNED
    now[0] = IDLE_S + 1
    served.range(two, 0, 1)
    served.sweep()
    assert len(served) == 1
    with pytest.raises(Gone):
        served.range(one, 0, 1)
    served.clear()
    assert len(served) == 0


def test_requests_of_hostile_readers_do_not_disturb_the_server(tmp_path: pathlib.Path) -> None:
    layout = layout_of_mib(1)
    data = fill(layout)
    record = publish(tmp_path / "home", layout, 1, data)
    name = served_name("weights", 1, record.digest)
    with serving(tmp_path / "home") as address:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.curve_secretkey, sock.curve_publickey, sock.curve_serverkey = KEYS.secret, KEYS.public, KEYS.public
        sock.connect(address)
        for frame in (b"", b"RLXP", struct.pack("<4sBB", b"XXXX", 1, 1), os.urandom(200)):
            sock.send(frame)
        for wanted in (Range(1, name, 1 << 60, 10), Range(2, "../../etc/passwd", 0, 10), Range(3, name, MIB, 2 * MIB)):
            sock.send(payload_wire.encode_get(GetRanges(True, [wanted])))
        faults: list[str] = []
        while len(faults) < 3:
            assert sock.poll(5000)
            head, body = sock.recv_multipart()
            kind, parts = payload_wire.decode_head(head)
            if kind == payload_wire.FAULT and parts[0].id:
                faults.append(payload_wire.decode_fault(body).kinds[0].rpartition(":")[2])
        assert faults == ["Corrupt"] * 3
        sock.close(linger=0)
        context.term()
        assert content(mirror_of(tmp_path / "away", lambda: address), record) == data
