"""The registry's file: what comes back, and what happens when it cannot be used."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from relax_rt.cluster.registry.core import Counters, Dropped, Entry, Issued
from relax_rt.cluster.registry.role import RegistryService
from relax_rt.cluster.registry.store import Store
from relax_rt.interfaces.registry import IncarnationEnd, Member
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, RelaxError
from relax_rt.transport.rpc.identity import Incarnation

WHO = Incarnation("trainer/0", 3)


async def test_everything_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    entry = Entry(
        Member(WHO, 7, "unix:///x", "ready", 4, detail="é", before=IncarnationEnd(2, "killed: by SIGKILL")), 2.5
    )
    version = VersionRecord(1, 0, 1, "d", changed=False)
    store = Store(path, "a")
    assert (await store.open()).generation == 1
    store.put([entry, Entry(Member(Incarnation("x/0", 1))), Counters(3, 2), Issued(1, WHO), Issued(2, WHO)])
    store.put([version, Dropped("x/0")])
    await store.durable()
    await store.close()
    again = Store(path, "a")
    stored = await again.open()
    assert stored.generation == 2
    assert stored.entries == [entry]
    assert stored.counters == Counters(3, 2)
    assert stored.issued == [Issued(2, WHO)]
    assert stored.versions == [version]
    await again.close()


@pytest.mark.parametrize("turns", range(5))
async def test_a_watch_that_is_cancelled_as_a_change_comes_ends_so(tmp_path: Path, turns: int) -> None:
    """Else whoever watches again and again could not be ended."""
    service = RegistryService(Store(tmp_path / "registry.sqlite", "a"), identity=lambda: WHO)
    await service.start()
    watching = asyncio.create_task(watch_for_ever(service))
    for _ in range(20):
        await asyncio.sleep(0)
    told = asyncio.create_task(service._changed.wait())
    entering = asyncio.create_task(service.enter_self("registry/0", 1, "unix:///x"))
    await told
    for _ in range(turns):
        await asyncio.sleep(0)
    watching.cancel()
    done, _ = await asyncio.wait([watching], timeout=5.0)
    assert done and watching.cancelled()
    await entering
    await service.close()


async def test_what_a_caller_who_is_gone_has_told_wakes_the_watchers(tmp_path: Path) -> None:
    service = RegistryService(Store(tmp_path / "registry.sqlite", "a"), identity=lambda: WHO)
    await service.start()
    before = service.core.revision
    watching = asyncio.create_task(service.watch(before, 60.0))
    entering = asyncio.create_task(service.enter_self("registry/0", 1, "unix:///x"))
    await asyncio.sleep(0)
    assert service.core.revision > before and not entering.done()
    entering.cancel()
    async with asyncio.timeout(120):
        found = await watching
    assert entering.cancelled() and [member.who.slot for member in found.members] == ["registry/0"]
    await service.close()
    again = Store(tmp_path / "registry.sqlite", "a")
    assert [entry.member.who.slot for entry in (await again.open()).entries] == ["registry/0"]
    await again.close()


async def test_a_write_that_fails_for_no_reason_of_sqlite_ends_the_registry(tmp_path: Path) -> None:
    store = Store(tmp_path / "registry.sqlite", "a")
    await store.open()
    store.put([Entry(Member(WHO, 1 << 63))])
    for _ in range(2):
        with pytest.raises(RelaxError, match=r"registry\.sqlite cannot be written: OverflowError"):
            async with asyncio.timeout(120):
                await store.durable()
    with pytest.raises(RelaxError, match="OverflowError"):
        await store.close()


async def watch_for_ever(service: RegistryService) -> None:
    revision = 0
    while True:
        revision = (await service.watch(revision, 60.0)).revision


async def test_callers_share_transactions_and_a_cancelled_one_disturbs_nobody(tmp_path: Path) -> None:
    store = Store(tmp_path / "registry.sqlite", "a")
    await store.open()

    async def write(n: int) -> None:
        store.put([Entry(Member(Incarnation(f"a/{n}", n)))])
        await store.durable()

    tasks = [asyncio.create_task(write(n)) for n in range(200)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    tasks[100].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert sum(isinstance(r, asyncio.CancelledError) for r in results) == 2
    assert sum(r is None for r in results) == 198
    await store.close()
    with sqlite3.connect(tmp_path / "registry.sqlite") as db:
        assert db.execute("SELECT count(*) FROM member").fetchone() == (200,)
    db.close()


@pytest.mark.parametrize("content", [b"no database at all" * 100, b"SQLite format 3\0" + bytes(2000)])
async def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "registry.sqlite"
    path.write_bytes(content)
    store = Store(path, "a")
    with pytest.raises(Corrupt, match=str(path)):
        await store.open()
    await store.close()


async def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    store = Store(path, "a")
    await store.open()
    await store.close()
    with sqlite3.connect(path) as db:
        db.execute("UPDATE meta SET value = '99' WHERE key = 'schema'")
    db.close()
    store = Store(path, "a")
    with pytest.raises(RelaxError, match="schema is 99"):
        await store.open()
    await store.close()


async def test_nothing_is_acknowledged_once_a_write_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    store = Store(path, "a")
    service = RegistryService(store, identity=lambda: WHO)
    await service.start()
    first = await service.issue_epoch("a/0")
    # A second writer that holds the file stands for any reason why a write fails.
    with sqlite3.connect(path, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        assert store._db is not None
        store._db.execute("PRAGMA busy_timeout = 20")
        with pytest.raises(RelaxError, match="locked"):
            await service.issue_epoch("a/0")
        other.execute("ROLLBACK")
    other.close()
    # The state in memory is ahead of the file: the service says so until it is started again.
    for call in (service.issue_epoch("b/0"), service.versions(), service.serve()):
        with pytest.raises(RelaxError, match="locked"):
            await call
    with pytest.raises(RelaxError, match="locked"):
        await service.close()
    again = RegistryService(Store(path, "a"), identity=lambda: WHO)
    await again.start()
    assert await again.issue_epoch("a/0") == first + 1
    await again.close()


async def test_an_asking_that_comes_twice_fences_nobody(tmp_path: Path) -> None:
    told: list[str] = []
    service = RegistryService(
        Store(tmp_path / "registry.sqlite", "a"),
        identity=lambda: WHO,
        event=lambda kind, /, **fields: told.append(kind),
    )
    await service.start()
    answers = await asyncio.gather(*(service.issue_epoch("a/0", "t") for _ in range(3)))
    assert len(set(answers)) == 1 and told.count("epoch_issued") == 1
    assert await service.issue_epoch("a/0", "u") == answers[0] + 1
    await service.close()


async def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(RelaxError, match="cannot be used"):
        await Store(tmp_path / "nothing" / "registry.sqlite", "a").open()


async def test_every_field_of_a_member_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "registry.sqlite"
    store = Store(path, "a")
    await store.open()
    member = Member(
        WHO, pid=7, address="unix:///x", node="b", remote="tcp://10.0.0.2:7", before=IncarnationEnd(2, "hang: none")
    )
    store.put([Entry(member, 1.0)])
    await store.close()
    again = Store(path, "a")
    assert (await again.open()).entries == [Entry(member, 1.0)]
    await again.close()
