"""Finding a run by its registry's address, as a program on a machine of its own does."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import AsyncIterator

import pytest
from actor_far_end import RUN, Judge, Text, living

import relax_rt.cluster.discovery
from relax_rt.cluster.nodes.join_key import curve_keys, make_key, read_key
from relax_rt.cluster.registry.role import RegistryService
from relax_rt.cluster.registry.store import Store
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.transport.rpc.errors import Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, RpcServer, make_hello


@contextlib.asynccontextmanager
async def registry(folder: pathlib.Path, keys: CurveKeys) -> AsyncIterator[tuple[RegistryService, str]]:
    """A registry on an encrypted port, as on the head: (service, address)."""
    service = RegistryService(Store(folder / "registry.sqlite", RUN))
    await service.start()
    server = RpcServer(make_hello(RUN, Incarnation("registry/0", 0)), curve=keys)
    server.offer(RegistryApi, service)
    try:
        yield service, await server.listen("tcp://127.0.0.1:0")
    finally:
        await server.close(grace_s=0.0)
        await service.close()


async def test_by_address_and_key(tmp_path: pathlib.Path) -> None:
    """The registry and an actor are found and spoken to over tcp, both encrypted with the run's key."""
    key = make_key(tmp_path)
    keys = curve_keys(read_key(key))
    async with (
        registry(tmp_path, keys) as (service, address),
        living("tcp://127.0.0.1:0", curve=keys) as (actor, real),
        relax_rt.cluster.discovery.connect(address, run_id=RUN, key=key) as discovery,
    ):
        judge = discovery.actor("judge", Judge)
        who = Incarnation("judge/0", await service.issue_epoch("judge/0"))
        assert who == actor.ctx.who
        own = RpcClient(address, make_hello(RUN, who), curve=keys)
        lease = own.bind(RegistryApi, timeout_s=60.0)
        # The socket is of another node: what counts is where it can be reached from elsewhere.
        await lease.announce(1, f"unix://{tmp_path}/elsewhere.sock", 60.0, "n1", real)
        await lease.renew("ready", 0, "", 0)
        assert await judge.score(Text(["a", "b"])) == 2.0
        assert [i async for i in judge.count(100)] == list(range(100))
        assert await discovery.actor("judge/0", Judge).who_asks() == discovery._hello.who.slot
        await discovery.known().until(lambda m: len(m.ready_of("judge")) == 1, "it", timeout_s=60)
        await own.close()


async def test_another_key_gets_nothing(tmp_path: pathlib.Path) -> None:
    keys = curve_keys(read_key(make_key(tmp_path)))
    (tmp_path / "other").mkdir()
    async with registry(tmp_path, keys) as (_, address):
        with pytest.raises(Unreachable, match=f"connecting to run {RUN} in tcp://"):
            async with relax_rt.cluster.discovery.connect(
                address, run_id=RUN, key=make_key(tmp_path / "other"), timeout_s=1.0
            ):
                pass
