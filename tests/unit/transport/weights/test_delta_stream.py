"""Deltas from one node's stage to another's: they cross alone, and whatever is wrong costs bytes, never bits."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from stream_far_end import KEYS, compared, far_server, mirror_of, serving
from weight_context import Context
from weight_versions import fill

from relax_rt.cluster.nodes.links import Links
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.rollout.engines.weight_sources import source_for
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone
from relax_rt.transport.weights import stream
from relax_rt.transport.weights.delta import apply
from relax_rt.transport.weights.manifest import BUCKET_BYTES, MAX_DELTAS, layout_of
from relax_rt.transport.weights.source import StageSource
from relax_rt.transport.weights.stage import WeightStage, delta_file, read_manifest
from relax_rt.transport.weights.stream import StagedVersions, StageMirror, served_name

ELEMENTS = 400_000
LAYOUT = layout_of([("w", "bfloat16", (ELEMENTS,), 2 * ELEMENTS), ("norm", "bfloat16", (50,), 100)])
CHANGED = 500
SMALL = 20_000
"""More than a delta and manifests have, and much less than a version."""


class Home:
    """The trainer's stage: each version has some elements of the one before changed."""

    def __init__(self, folder: Path, layout: Any = LAYOUT) -> None:
        self.folder, self.layout, self.version = folder, layout, 0
        self.data = fill(layout)
        self.retires = True

    def publish(self, changed: int = CHANGED, *, epoch: int = 1, base: int | None = None) -> VersionRecord:
        """Stage and commit the next one as a trainer does."""
        stage, before = WeightStage(self.folder, epoch), self.version
        self.version += 1
        rng = random.Random(self.version)
        for place in rng.sample(range(self.layout.entries[0].nbytes // 2), changed):
            self.data[2 * place] ^= rng.randrange(1, 256)
        try:
            with stage.writing(self.layout, before) as (file, view):
                view[:] = self.data
                manifest = stage.seal(self.version, self.layout, file, view)
                if before:
                    stage.seal_delta(manifest, view, before if base is None else base)
                view.release()
            if self.retires:
                stage.retire(self.version)
        finally:
            stage.close()
        return VersionRecord(self.version, before, self.version, manifest.digest)

    def delta(self, record: VersionRecord) -> Path:
        return self.folder / delta_file(record.version, record.digest)


def came(mirror: StageMirror) -> tuple[str, str]:
    """As what a version came, and why in full."""
    return mirror.payload, mirror.why_full


def content(home: Home, mirror: StageMirror, record: VersionRecord, timeout_s: float = 20.0) -> tuple[bool, int]:
    return compared(home.folder, home.layout.nbytes, mirror, record, timeout_s)


HELD = "held"


@contextlib.contextmanager
def held_at(some: int) -> Iterator[tuple[threading.Event, threading.Event]]:
    """A reader in the thread HELD takes nothing more when so many bytes of one name came; yields that it was reached,
    and what lets it go on."""
    reached, go_on = threading.Event(), threading.Event()
    arrived = stream._StageReader.arrived

    def counted(self: Any, entry: Any, nbytes: int) -> None:
        arrived(self, entry, nbytes)
        there = entry.extent.nbytes - entry.missing_bytes
        if threading.current_thread().name == HELD and there >= some and not reached.is_set():
            reached.set()
            assert go_on.wait(120)

    stream._StageReader.arrived = counted  # type: ignore[method-assign]
    try:
        yield reached, go_on
    finally:
        go_on.set()
        stream._StageReader.arrived = arrived  # type: ignore[method-assign]


def test_deltas_cross_alone_behind_the_first_version(tmp_path: Path) -> None:
    home, away = Home(tmp_path / "home"), tmp_path / "away"
    with serving(home.folder) as address:
        mirror = mirror_of(away, lambda: address)
        same, crossed = content(home, mirror, home.publish())
        assert same and crossed > LAYOUT.nbytes and came(mirror) == ("full", "")
        for version in range(2, 2 * MAX_DELTAS):
            # From 5 on the trainer is another incarnation.
            same, crossed = content(home, mirror, home.publish(epoch=1 + version // 5))
            assert same and crossed < SMALL and came(mirror) == ("delta", "")
        other = mirror_of(away, lambda: "tcp://127.0.0.1:1")
        assert (
            content(home, other, VersionRecord(home.version, 0, 0, read_manifest(home.folder, home.version).digest))[1]
            == 0
        ), "for the others of the node it is there"
        # Two versions, the node's; no deltas: whoever uses the version copies it.
        assert sorted(path.suffix for path in away.glob("*.*")) == [".buf", ".buf", ".json"]


def test_a_node_that_comes_late_applies_what_it_has_missed(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with serving(home.folder) as address:
        mirror = mirror_of(tmp_path / "away", lambda: address)
        content(home, mirror, home.publish())
        for _ in range(4):
            record = home.publish()
        same, crossed = content(home, mirror, record)
        assert same and crossed < 2 * SMALL and came(mirror)[0] == "delta"
        # One that was away for longer takes the version in full, and is on deltas from there.
        for _ in range(MAX_DELTAS + 1):
            record = home.publish()
        same, crossed = content(home, mirror, record)
        assert same and crossed > LAYOUT.nbytes and came(mirror)[0] == "full"
        assert "its deltas are of version 21 with digest" in mirror.why_full
        assert "and 6 to 20; none is whole on this node's stage" in mirror.why_full
        same, crossed = content(home, mirror, home.publish())
        assert same and crossed < SMALL and came(mirror)[0] == "delta"


def no_base(home: Home, away: Path, _: VersionRecord) -> None:
    (away / "v00000001.json").unlink()


def another_base(home: Home, away: Path, _: VersionRecord) -> None:
    """As after a folder was left by another run."""
    data = fill(LAYOUT, 9)
    stage = WeightStage(away, 1)
    with stage.writing(LAYOUT, 0) as (file, view):
        view[:] = data
        stage.seal(1, LAYOUT, file, view)
    stage.close()


def damaged_base(home: Home, away: Path, _: VersionRecord) -> None:
    with (away / read_manifest(away, 1).file).open("r+b") as file:
        file.seek(999)
        file.write(b"\xee" * 9)


def damaged(home: Home, away: Path, record: VersionRecord) -> None:
    path = home.delta(record)
    path.write_bytes(path.read_bytes()[:-3] + b"\x55\xaa\x55")


def cut_short(home: Home, away: Path, record: VersionRecord) -> None:
    path = home.delta(record)
    path.write_bytes(path.read_bytes()[:-3])


def no_delta(home: Home, away: Path, record: VersionRecord) -> None:
    path = home.delta(record)
    path.write_bytes(b"\x07" * path.stat().st_size)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (no_base, "its deltas are of version 1 with digest"),
        (another_base, "none is whole on this node's stage"),
        (damaged_base, "weights of policy version 1, bytes 0-"),
        (damaged, "bytes of the result do not match"),
        (cut_short, "delta-2-"),
        (no_delta, "delta from policy version 1 to 2: a block of kind 7"),
        (lambda home, _, record: home.delta(record).unlink(), "delta to policy version 2"),
    ],
)
def test_where_a_delta_does_not_make_the_version_it_comes_in_full(
    harm: Callable[[Home, Path, VersionRecord], None], says: str, tmp_path: Path
) -> None:
    home, away = Home(tmp_path / "home"), tmp_path / "away"
    with serving(home.folder) as address:
        mirror = mirror_of(away, lambda: address)
        content(home, mirror, home.publish())
        record = home.publish()
        harm(home, away, record)
        same, crossed = content(home, mirror, record)
        assert same and crossed > LAYOUT.nbytes and came(mirror)[0] == "full" and says in mirror.why_full
        same, crossed = content(home, mirror, home.publish())
        assert same and crossed < SMALL and came(mirror) == ("delta", "")


def test_why_there_is_no_delta_at_home_is_told(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    with serving(home.folder) as address:
        mirror = mirror_of(tmp_path / "away", lambda: address)
        content(home, mirror, home.publish())
        assert content(home, mirror, home.publish(ELEMENTS))[0] and came(mirror)[0] == "full"
        assert "more than 0.5 of the version has changed" in mirror.why_full
        # A resume in new shared memory.
        home.version += 3
        assert content(home, mirror, home.publish(base=5))[0] and "version 5: not on the stage" in mirror.why_full
        assert content(home, mirror, home.publish())[0] and came(mirror) == ("delta", "")


def test_only_the_part_that_is_wrong_is_fetched_again(tmp_path: Path) -> None:
    count = BUCKET_BYTES  # two buckets
    home = Home(tmp_path / "home", layout_of([("w", "bfloat16", (count,), 2 * count)]))
    with serving(home.folder) as address:
        mirror = mirror_of(tmp_path / "away", lambda: address)
        content(home, mirror, home.publish())
        record = home.publish()
        damaged(home, tmp_path, record)
        same, crossed = content(home, mirror, record)
        assert same and BUCKET_BYTES < crossed < BUCKET_BYTES + 2 * SMALL and came(mirror)[0] == "full"
        assert mirror.why_full == f"{BUCKET_BYTES} bytes of the result do not match their digests"


def test_what_is_not_applied_in_time_is_fetched_and_tried_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path / "home")
    monkeypatch.setattr(stream, "SLOW_VERSIONS", 2)
    with serving(home.folder) as address:
        mirror = mirror_of(tmp_path / "away", lambda: address)
        content(home, mirror, home.publish())
        with monkeypatch.context() as patched:
            patched.setattr(stream, "MERGE_PART", -1.0)
            same, crossed = content(home, mirror, home.publish())
        assert same and crossed > LAYOUT.nbytes and came(mirror)[0] == "full"
        assert "delta from policy version 1 to 2 was not applied in time" in mirror.why_full
        for _ in range(2):
            same, crossed = content(home, mirror, home.publish())
            assert same and LAYOUT.nbytes < crossed < LAYOUT.nbytes + 3000, "not even the delta"
            assert came(mirror)[0] == "full" and "a version before" in mirror.why_full
        same, crossed = content(home, mirror, home.publish())
        assert same and crossed < SMALL and came(mirror) == ("delta", "")


def test_the_base_is_not_written_over_and_what_is_made_is_not_announced_before_it_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of the node go on reading the version before, whatever becomes of the next."""
    home, away = Home(tmp_path / "home"), tmp_path / "away"
    seen: list[tuple[str, bool]] = []

    def died(*_: Any, **__: Any) -> None:
        raise Corrupt("version 6", why="died")

    def watched(*args: Any, **more: Any) -> None:
        base = read_manifest(away, home.version - 1)
        source = StageSource(away, VersionRecord(home.version - 1, 0, 0, base.digest))
        source.copy_into(memoryview(bytearray(LAYOUT.nbytes)))
        with pytest.raises(Gone):
            read_manifest(away, home.version)
        apply(*args, **more)
        source.copy_into(memoryview(bytearray(LAYOUT.nbytes)))
        seen.append((base.file, (away / f"v{home.version:08d}.json").exists()))

    monkeypatch.setattr(stream, "apply", watched)
    with serving(home.folder) as address:
        mirror = mirror_of(away, lambda: address)
        for _ in range(5):
            assert content(home, mirror, home.publish())[0]
        # As when the process died between making it and saying so.
        record = home.publish()
        with monkeypatch.context() as patched:
            patched.setattr(WeightStage, "seal", died)
            with pytest.raises(Corrupt, match="died"):
                mirror.source(record, 5.0)
            assert [path.name for path in away.glob("v*")] == ["v00000005.json"]
        # What it had made lies there: little is missing, and nothing is fetched that is there.
        same, crossed = content(home, mirror, record)
        assert same and crossed < 3000 and "no more of it is missing" in mirror.why_full
    assert seen == [("w0.buf", False), ("w1.buf", False)] * 2 + [("w0.buf", False)]


def test_fewer_bits_are_sent_where_the_delta_is_larger(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from relax_rt.transport.weights.payloads import wire_version

    home, layout = Home(tmp_path / "home"), layout_of([("w", "float32", (500, 800), 1_600_000)])
    stage = WeightStage(home.folder, 1)

    def publish(version: int, changed: int) -> VersionRecord:
        values = torch.randn(400_000, generator=torch.Generator().manual_seed(1))
        values[1 : changed + 1] = torch.randn(changed, generator=torch.Generator().manual_seed(version))
        values[0] = 9.0  # so that the scale is the same
        with stage.writing(layout, version - 1) as (file, view):
            torch.frombuffer(view, dtype=torch.float32).copy_(values)
            manifest = stage.seal(version, layout, file, view, wire_version(layout, view, "float8_e4m3fn"))
            if version > 1:
                assert stage.seal_delta(manifest, view, version - 1).deltas
        stage.retire(version)
        return VersionRecord(version, version - 1, version, manifest.digest)

    home.layout = layout
    with serving(home.folder) as address:
        mirror = mirror_of(tmp_path / "away", lambda: address)
        for version, changed, payload, most in (
            (1, 0, "full", 410_000),
            (2, 1000, "delta", 20_000),
            (3, 130_000, "full", 410_000),
        ):
            same, crossed = content(home, mirror, publish(version, changed))
            assert same and crossed < most and came(mirror)[0] == payload
    stage.close()


def test_a_large_delta_that_is_gone_leaves_nothing_behind_on_the_connection(tmp_path: Path) -> None:
    """Each part of it that was asked for is answered with that."""
    count = 4 << 20
    home = Home(tmp_path / "home", layout_of([("w", "bfloat16", (count,), 2 * count)]))
    with serving(home.folder) as address:
        mirror = StageMirror(tmp_path / "away", lambda: address, KEYS, chunk_bytes=64 << 10, connections=1)
        content(home, mirror, home.publish())
        record = home.publish(count // 6)
        assert home.delta(record).stat().st_size > 20 * (64 << 10)
        home.delta(record).unlink()
        same, crossed = content(home, mirror, record)
        assert same and crossed > home.layout.nbytes and "delta to policy version 2" in mirror.why_full


@pytest.mark.long
def test_a_server_that_dies_while_a_delta_crosses_is_found_again(tmp_path: Path) -> None:
    count = 24 << 20
    home = Home(tmp_path / "home", layout_of([("w", "bfloat16", (count,), 2 * count)]))
    home.publish()
    with far_server(home.folder) as far:
        waits: list[str] = []
        mirror = StageMirror(
            tmp_path / "away", far.locate, KEYS, window_bytes=256 << 10, chunk_bytes=32 << 10, on_wait=waits.append
        )
        content(home, mirror, VersionRecord(1, 0, 0, read_manifest(home.folder, 1).digest))
        rng = random.Random(5)
        for place in range(0, count, 12):  # megabytes of delta
            home.data[2 * place] ^= rng.randrange(1, 256)
        record = home.publish()
        nbytes = read_manifest(home.folder, 2).deltas[-1].nbytes
        assert nbytes > 4 << 20
        waits.clear()
        found: list[tuple[bool, int]] = []
        with held_at(nbytes // 2) as (reached, go_on):
            thread = threading.Thread(target=lambda: found.append(content(home, mirror, record)), name=HELD)
            thread.start()
            assert reached.wait(120)
            far.kill()
            go_on.set()
            while not any(waits):
                assert thread.is_alive(), "all of it had crossed before"
                time.sleep(0.01)
            far.start()
            thread.join(120)
        assert found and found[0][0] and came(mirror) == ("delta", "")
        # What was there of it crossed again.
        assert nbytes + nbytes // 2 <= found[0][1] < 2 * nbytes + SMALL


def test_a_delta_is_served_as_long_as_a_version_leads_over_it(tmp_path: Path) -> None:
    """Who reads it goes on when its version is retired; nothing is held for good."""
    home, now = Home(tmp_path), [0.0]
    served = StagedVersions(tmp_path, clock=lambda: now[0])
    home.publish()
    second, third = home.publish(), home.publish()
    name = served_name("delta", 2, second.digest)
    whole = home.delta(second).read_bytes()
    assert bytes(served.range(name, 0, len(whole))) == whole, "its version is retired, the next one needs it"
    for wrong in (served_name("delta", 2, third.digest), served_name("delta", 9, second.digest)):
        with pytest.raises(Gone):
            served.range(wrong, 0, 1)
    with pytest.raises(Corrupt, match="of "):
        served.range(name, 0, len(whole) + 1)
    for _ in range(MAX_DELTAS):
        home.publish()
    assert not home.delta(second).exists()
    assert bytes(served.range(name, 0, len(whole))) == whole, "it is still being read"
    now[0] += 60.0
    served.sweep()
    assert len(served) == 0
    with pytest.raises(Gone):
        served.range(name, 0, 1)


def test_deltas_push_no_version_out_from_under_its_reader(tmp_path: Path) -> None:
    """Two nodes: one is slow with its first version, the other keeps up by deltas meanwhile."""
    count = 4 << 20
    home = Home(tmp_path / "home", layout_of([("w", "bfloat16", (count,), 2 * count)]))
    with serving(home.folder) as address:
        slow = StageMirror(
            tmp_path / "slow", lambda: address, KEYS, window_bytes=256 << 10, chunk_bytes=64 << 10, connections=1
        )
        quick = mirror_of(tmp_path / "quick", lambda: address)
        record = home.publish()
        content(home, quick, record)
        whole, came_whole = bytes(home.data), []
        with held_at(1 << 20) as (reached, go_on):

            def read() -> None:
                into = bytearray(home.layout.nbytes)
                slow.source(record, 20.0).copy_into(memoryview(into))
                came_whole.append(into == whole)

            thread = threading.Thread(target=read, name=HELD)
            thread.start()
            assert reached.wait(120)
            for _ in range(4):
                assert content(home, quick, home.publish())[0] and came(quick) == ("delta", "")
            go_on.set()
            thread.join(120)
        assert came_whole == [True] and slow.bytes_in < home.layout.nbytes + SMALL, "not a byte twice"


def test_what_is_served_beside_the_buffers_is_bounded_by_bytes_and_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(tmp_path, layout_of([("w", "bfloat16", (ELEMENTS,), 2 * ELEMENTS)]))
    served = StagedVersions(tmp_path, clock=lambda: 0.0)
    home.publish()
    large = []
    for _ in range(4):
        large.append(home.publish(ELEMENTS // 5))
        served.range(served_name("delta", large[-1].version, large[-1].digest), 0, 1)
    size = sum(len(pin.view) for pin in served._pins.values())
    assert len(served) == 3 and 3 * 200_000 < size <= home.layout.nbytes, "together no more than a version"
    with pytest.raises(Gone):
        served.range(served_name("delta", large[0].version, large[0].digest), 0, 1)
    monkeypatch.setattr(stream, "MAX_SIDE_FILES", 2)
    small = home.publish()
    served.range(served_name("delta", small.version, small.digest), 0, 1)
    assert len(served) == 2


async def test_the_event_says_as_what_a_version_crossed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, ctx = Home(tmp_path / "home"), Context(tmp_path)
    monkeypatch.setattr(Links, "from_environment", lambda: Links("b", "127.0.0.1", KEYS))
    with serving(home.folder) as address:

        class Peer:
            async def where(self) -> str:
                return address

        async def peer(*_: object, **__: object) -> Peer:
            return Peer()

        ctx.peer = peer  # type: ignore[attr-defined]
        make = source_for(cast(RoleContext, ctx))
        await asyncio.to_thread(make, home.publish(), None)
        record = home.publish()
        source = await asyncio.to_thread(make, record, None)
        assert (source.carrier, source.payload) == ("stream", "delta") and source.nbytes < SMALL
        assert source.manifest.payload == "full", "the engine copies it whole from the stage of its node"
        other = await asyncio.to_thread(source_for(cast(RoleContext, ctx)), record, None)
        assert (other.carrier, other.payload, other.nbytes) == ("stream", "full", 0), "nothing crossed: it was here"
        third = home.publish()
        home.delta(third).unlink()
        await asyncio.to_thread(make, third, None)
    told = [fields for kind, fields in ctx.events if kind == "weights_streamed"]
    assert [event["payload"] for event in told] == ["full", "delta", "full"]
    assert told[1]["bytes"] == source.nbytes and "why_full" not in told[1]
    assert "delta to policy version 3" in told[2]["why_full"]


def test_a_manifest_of_deltas_that_is_a_lie_is_no_reason_to_reserve_memory(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    home.publish()
    record = home.publish()
    manifest = read_manifest(home.folder, 2)
    (delta,) = manifest.deltas
    lie = msgspec.structs.replace(manifest, deltas=(msgspec.structs.replace(delta, nbytes=1 << 50),))
    (home.folder / "v00000002.json").write_bytes(msgspec.json.encode(lie))
    with serving(home.folder) as address, pytest.raises(Corrupt, match="its deltas have"):
        mirror_of(tmp_path / "away", lambda: address).source(record, 5.0)
