"""Adapters from one node's stage to another's: the base crosses once, and whatever is wrong costs bytes, never bits."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import xxhash

torch = pytest.importorskip("torch")

from adapter_versions import LAYOUT, fill_base, publish  # noqa: E402
from stream_far_end import KEYS, compared, far_server, mirror_of, serving  # noqa: E402
from weight_context import Context  # noqa: E402

from relax_rt.cluster.nodes.links import Links  # noqa: E402
from relax_rt.interfaces.role import RoleContext  # noqa: E402
from relax_rt.roles.rollout.engines.weight_sources import source_for  # noqa: E402
from relax_rt.transport.base.versions import VersionRecord  # noqa: E402
from relax_rt.transport.rpc.errors import OutOfSpace, Unreachable  # noqa: E402
from relax_rt.transport.weights import manifest, stream  # noqa: E402
from relax_rt.transport.weights.stage import BASE_FILE, WeightStage, adapters_file  # noqa: E402
from relax_rt.transport.weights.stream import StageMirror  # noqa: E402

SMALL = 40_000
"""More than adapters and manifests have, and much less than a version."""


def content(folder: Path, mirror: StageMirror, record: VersionRecord) -> tuple[bool, int]:
    return compared(folder, LAYOUT.nbytes, mirror, record)


def test_the_base_crosses_once_and_then_adapters_alone(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        same, crossed = content(home, mirror, publish(home, 1))
        assert same and LAYOUT.nbytes < crossed < LAYOUT.nbytes + SMALL
        for version in (2, 3, 4):
            # In 4 the trainer is another incarnation: its base is the same.
            same, crossed = content(home, mirror, publish(home, version, epoch=1 + version // 4))
            assert same and crossed < SMALL and (mirror.payload, mirror.why_full) == ("adapters", "")
        other = mirror_of(away, lambda: "tcp://127.0.0.1:1")
        assert content(home, other, publish(home, 4, epoch=2)) == (True, 0)
        assert not list(away.glob("a*.bin")), "the node's engines copy the version"
        # Another model: its base crosses, too.
        same, crossed = content(home, mirror, publish(home, 5, epoch=3, seed=4))
        assert same and LAYOUT.nbytes < crossed < LAYOUT.nbytes + SMALL and mirror.payload == "adapters"


def another_base(home: Path, away: Path) -> None:
    WeightStage(home, 1).seal_base(LAYOUT, lambda view: fill_base(view, seed=9))
    (away / "v00000000.json").unlink()


def wrong(home: Path, away: Path) -> None:
    path = home / adapters_file(2)
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\x80?")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda home, away: (home / adapters_file(2)).unlink(), "adapters of policy version 2"),
        (wrong, "bytes of the result do not match"),
        (lambda home, away: (home / adapters_file(2)).write_bytes(os.urandom(1 << 14)), "adapters"),
        (another_base, "on the stage it has digest"),
    ],
    ids=["gone", "damaged", "no adapters", "another base"],
)
def test_where_adapters_do_not_make_the_version_it_comes_in_full(
    harm: Callable[[Path, Path], None], says: str, tmp_path: Path
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        content(home, mirror, publish(home, 1))
        record = publish(home, 2)
        harm(home, away)
        same, crossed = content(home, mirror, record)
        assert same and crossed > LAYOUT.nbytes and mirror.payload == "full" and says in mirror.why_full
        assert content(home, mirror, publish(home, 3))[0] and mirror.payload == "adapters"


def test_a_base_that_was_harmed_here_is_fetched_again(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        content(home, mirror, publish(home, 1))
        with (away / BASE_FILE).open("r+b") as file:
            file.write(b"\xee" * 9)
        same, crossed = content(home, mirror, publish(home, 2))
        assert same and crossed > LAYOUT.nbytes and mirror.payload == "adapters"
        assert content(home, mirror, publish(home, 3))[1] < SMALL


def test_without_room_for_the_base_versions_come_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise OutOfSpace("1 MiB for the model's own weights", why="No space left on device")

    home, away = tmp_path / "home", tmp_path / "away"
    with serving(home) as address:
        mirror, records = mirror_of(away, lambda: address), []
        records.append(publish(home, 1))
        with monkeypatch.context() as patched:
            patched.setattr(WeightStage, "seal_base", full)
            assert content(home, mirror, records[0])[0]
        assert mirror.payload == "full" and "No space left" in mirror.why_full


def test_what_is_not_added_in_time_is_fetched_and_then_tried_again_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    monkeypatch.setattr(stream, "SLOW_VERSIONS", 2)
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        content(home, mirror, publish(home, 1))
        with monkeypatch.context() as patched:
            patched.setattr(stream, "MERGE_PART", 0.0)
            same, crossed = content(home, mirror, publish(home, 2))
        assert same and crossed > LAYOUT.nbytes and mirror.payload == "full"
        assert "adapters were not added in time" in mirror.why_full and "in 0.0 s" in mirror.why_full
        for version in (3, 4):
            same, crossed = content(home, mirror, publish(home, version))
            assert same and LAYOUT.nbytes < crossed < LAYOUT.nbytes + 8000, "not even the adapters"
            assert mirror.payload == "full" and "a version before" in mirror.why_full
        same, crossed = content(home, mirror, publish(home, 5))
        assert same and crossed < SMALL and (mirror.payload, mirror.why_full) == ("adapters", "")


def test_few_bytes_are_digested_more_than_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base as it is copied, and what is made of it; whoever uses the version does it once more."""
    home, away = tmp_path / "home", tmp_path / "away"
    hashed = [0]

    def digested(data: memoryview | bytes) -> str:
        hashed[0] += len(data)
        return str(digest(data))

    class Hasher:
        def __init__(self) -> None:
            self._one = hasher()

        def update(self, data: memoryview) -> None:
            hashed[0] += len(data)
            self._one.update(data)

        def hexdigest(self) -> str:
            return str(self._one.hexdigest())

    # Of many buckets, so that one look at the first of them is no pass.
    monkeypatch.setattr(manifest, "BUCKET_BYTES", 1 << 14)
    digest, hasher = xxhash.xxh3_128_hexdigest, xxhash.xxh3_128
    with serving(home) as address:
        mirror = mirror_of(away, lambda: address)
        mirror.source(publish(home, 1), 20.0)
        record = publish(home, 2)
        monkeypatch.setattr(xxhash, "xxh3_128_hexdigest", digested)
        monkeypatch.setattr(xxhash, "xxh3_128", Hasher)
        mirror.source(record, 20.0)
    assert mirror.payload == "adapters" and 2 * LAYOUT.nbytes <= hashed[0] < 2.2 * LAYOUT.nbytes


@pytest.mark.long
def test_a_server_that_dies_while_the_base_crosses_is_found_again(tmp_path: Path) -> None:
    home, away = tmp_path / "home", tmp_path / "away"
    record = publish(home, 1)
    with far_server(home) as far:
        mirror = StageMirror(away, far.locate, KEYS, window_bytes=64 << 10, chunk_bytes=8 << 10, connections=1)
        found: list[tuple[bool, int]] = []
        thread = threading.Thread(target=lambda: found.append(content(home, mirror, record)))
        thread.start()
        until = time.monotonic() + 120
        while not (away / f"{BASE_FILE}.tmp").exists():
            assert time.monotonic() < until
            time.sleep(0.001)
        far.kill()
        time.sleep(0.1)
        far.start()
        thread.join(120)
        assert found and found[0][0] and mirror.payload == "adapters"


def test_what_never_comes_is_not_waited_for_longer_than_its_time(tmp_path: Path) -> None:
    home = tmp_path / "home"
    record = publish(home, 1)
    mirror = mirror_of(tmp_path / "away", lambda: "tcp://127.0.0.1:1")
    with pytest.raises(Unreachable):
        mirror.source(record, 0.3)


async def test_the_event_says_as_what_a_version_crossed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, ctx = tmp_path / "home", Context(tmp_path)
    monkeypatch.setattr(Links, "from_environment", lambda: Links("b", "127.0.0.1", KEYS))
    with serving(home) as address:

        class Peer:
            async def where(self) -> str:
                return address

        async def peer(*_: object, **__: object) -> Peer:
            return Peer()

        ctx.peer = peer  # type: ignore[attr-defined]
        make = source_for(cast(RoleContext, ctx))
        await asyncio.to_thread(make, publish(home, 1), None)
        record = publish(home, 2)
        source = await asyncio.to_thread(make, record, None)
        assert (source.carrier, source.payload) == ("stream", "adapters") and source.nbytes < SMALL
        again = await asyncio.to_thread(make, record, None)
        other = await asyncio.to_thread(source_for(cast(RoleContext, ctx)), record, None)
        for one in (again, other):
            assert (one.carrier, one.payload, one.nbytes) == ("stream", "full", 0), "nothing crossed: it was here"
        third = publish(home, 3)
        (home / adapters_file(3)).unlink()
        await asyncio.to_thread(make, third, None)
    told = [fields for kind, fields in ctx.events if kind == "weights_streamed"]
    assert [event["payload"] for event in told] == ["adapters", "adapters", "full"]
    assert told[1]["bytes"] == source.nbytes and "adapters of policy version 3" in told[2]["why_full"]
