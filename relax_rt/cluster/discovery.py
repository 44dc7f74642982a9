"""A run's members and actors, from any program::

    async with relax_rt.cluster.discovery.connect("runs/my-run") as discovery:
        reward = discovery.actor("reward", Reward)
        print(await reward.score("…"))
        async with discovery.watch("rollout") as members:
            async for now in members.changes():
                print([m.who.slot for m in now if m.state == "ready"])

Any program can hold such a connection: an environment, a notebook, a service. Members that restart are followed; while
the registry is away the last known members stay.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeVar

from relax_rt.actors.directory import CALL_TIMEOUT_S, Directory
from relax_rt.cluster.nodes.join_key import FILE, curve_keys, read_key
from relax_rt.cluster.nodes.links import AddressResolver
from relax_rt.cluster.nodes.membership import RECORD, read_keys, read_record
from relax_rt.interfaces.members import Members, watch_members
from relax_rt.interfaces.registry import REGISTRY_SLOT, Member, RegistryApi
from relax_rt.supervision.control import NoRun, find_run
from relax_rt.supervision.rundir import slot_file
from relax_rt.transport.rpc.client import DEFAULT_WINDOW
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient, make_hello

T = TypeVar("T")

FIND_S = 5.0

_Find = Callable[[str], Awaitable[str]]


class RunDiscovery:
    """A connection to a run; made by `connect`.

    Args:
        run_id: of the run; peers of another run refuse the connection.
        name: this program's name in the run.
        find: returns the address of a slot; called before every connect.
        curve: the key of a run over several nodes.
    """

    def __init__(self, run_id: str, name: str, find: _Find, curve: CurveKeys | None = None) -> None:
        self.run_id = run_id
        self._hello = make_hello(run_id, Incarnation(f"{name}/{os.getpid()}", 0))
        self._find = find
        self._curve = curve
        self._clients: dict[str, RpcClient] = {}
        self.registry = self._client(REGISTRY_SLOT).bind(RegistryApi, timeout_s=CALL_TIMEOUT_S)
        self._directory = Directory(self._client, self.registry)

    def actor(self, name: str, api: type[T], *, timeout_s: float = CALL_TIMEOUT_S, window: int = DEFAULT_WINDOW) -> T:
        """A reference to an actor, as Directory.actor makes it."""
        return self._directory.actor(name, api, timeout_s=timeout_s, window=window)

    def watch(self, role: str = "") -> AbstractAsyncContextManager[Members]:
        """Follow the members of a role, of all for the empty name, until the block ends."""
        return watch_members(self.registry, role)

    def known(self) -> Members:
        """All members, watched as long as the connection lasts."""
        return self._directory.members("the members")

    async def close(self) -> None:
        """End all connections."""
        await self._directory.close()
        for client in self._clients.values():
            await client.close()

    def _client(self, slot: str) -> RpcClient:
        if slot not in self._clients:

            async def find() -> str:
                return await self._find(slot)

            self._clients[slot] = RpcClient(find, self._hello, curve=self._curve)
        return self._clients[slot]


@asynccontextmanager
async def connect(
    where: str | Path,
    *,
    run_id: str = "",
    key: str | Path = "",
    name: str = "client",
    timeout_s: float = 10.0,
) -> AsyncIterator[RunDiscovery]:
    """Connect to a run.

    Args:
        where: its run directory, on the head or on a joined node; or its registry's address, ``tcp://host:port``.
        run_id: of the run, with an address.
        key: file with the run's key, with an address (`join.key` of the run directory on the head).
        name: this program's name in the run: a word without a slash.
        timeout_s: how long the registry may take to answer, seconds.

    Raises:
        NoRun: no run lives there. Unreachable: its registry does not answer.
        Refused: an address is given without a run id, or the key cannot be read.
    """
    if not name or "/" in name:
        raise Refused(f"connecting as {name!r}", why="a name is a word without a slash")
    by_address = isinstance(where, str) and "://" in where
    found, resolver = _at_address(str(where), run_id, key, name) if by_address else _at_run_dir(Path(where), name)
    try:
        # Call the registry now, so that a wrong directory or key fails here and not at the first use.
        try:
            await found._client(REGISTRY_SLOT).bind(RegistryApi, timeout_s=timeout_s).watch(0, 0.0)
        except Unreachable as error:
            hint = "is the run up, and has it a registry? see `relax-rt ps`"
            raise Unreachable(f"connecting to run {found.run_id} in {where}", why=str(error), hint=hint) from error
        yield found
    finally:
        await found.close()
        if resolver is not None:
            await resolver.close()


def _at_run_dir(run_dir: Path, name: str) -> tuple[RunDiscovery, AddressResolver | None]:
    run = find_run(run_dir)
    if not run.alive:
        status = run.record.get("status", "over")
        raise NoRun(
            f"no live run in {run_dir}", why=f"run {run.paths.run_id}: {status}", hint="`relax-rt up` resumes it"
        )
    paths = run.paths
    if not (paths.socket_dir / FILE).exists():

        async def on_this_node(slot: str) -> str:
            return f"unix://{paths.socket_dir / slot_file(slot, '.sock')}"

        return RunDiscovery(paths.run_id, name, on_this_node), None
    run_id = paths.run_id
    if (paths.socket_dir / RECORD).exists():
        # The directories of a joined node are named by an id of their own.
        run_id = read_record(paths).reply.membership.run_id
    resolver = AddressResolver(paths.socket_dir, make_hello(run_id, Incarnation(f"{name}/{os.getpid()}", 0)))
    return RunDiscovery(run_id, name, resolver.resolve, read_keys(paths)), resolver


def _at_address(address: str, run_id: str, key: str | Path, name: str) -> tuple[RunDiscovery, AddressResolver | None]:
    if not run_id:
        raise Refused(f"connecting to {address}", why="run_id is missing", hint="`relax-rt ps` shows it")
    curve = curve_keys(read_key(Path(key)), str(key)) if key else None

    async def find(slot: str) -> str:
        if slot == REGISTRY_SLOT:
            return address
        member = await _member(found.known(), slot)
        return member.address if _is_here(member.address) else member.remote or member.address

    found = RunDiscovery(run_id, name, find, curve)
    return found, None


async def _member(members: Members, slot: str) -> Member:
    """The slot's member, once it serves at an address."""

    def serves(known: Members) -> bool:
        member = known.by_slot.get(slot)
        return member is not None and bool(member.address) and member.state != "gone"

    try:
        await members.until(serves, f"{slot} to serve", timeout_s=FIND_S)
    except DeadlineExceeded as error:
        raise Unreachable(slot, why=f"it serves nowhere: {error.why}", hint="see `relax-rt ps`") from error
    return members.by_slot[slot]


def _is_here(address: str) -> bool:
    scheme, _, path = address.partition("://")
    return scheme == "unix" and Path(path).exists()
