"""How a role of a run over several nodes reaches the others, and they it: by variables that the agent sets.

Used by the host process and by roles that listen themselves (gateway, programs, weight publication).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
from pathlib import Path
from typing import Any, NamedTuple

import psutil  # type: ignore[import-untyped]

from relax_rt.cluster.nodes.join_key import FILE, curve_keys, read_key
from relax_rt.interfaces.agent import WhereApi
from relax_rt.supervision.rundir import AGENT_SOCKET, RunPaths
from relax_rt.transport.base.liveness import NODE_ENV
from relax_rt.transport.memory.payload_server import PayloadServer
from relax_rt.transport.memory.refs import owner_key
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc.errors import Unreachable
from relax_rt.transport.rpc.identity import Hello, Incarnation
from relax_rt.transport.rpc.rpc import CurveKeys, RpcClient

RUN_ENV, HOST_ENV, KEY_ENV = "RELAX_RUN", "RELAX_HOST", "RELAX_KEY"
COLLECTIVES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
RESOLVE_TIMEOUT_S = 2.0
PAYLOADS_PREFIX = "of-"


def role_environment(paths: RunPaths, *, run_id: str, node: str, host: str) -> dict[str, str]:
    """Variables of every role on a node of a run over several.

    Args:
        paths: the run's directories on this node; the key is in the private one.
        run_id: of the run, that peers greet with; `paths` may have another one, for this node alone.
        node, host: the node's name, and its address for others.
    """
    found = {NODE_ENV: node, HOST_ENV: host, RUN_ENV: run_id, KEY_ENV: str(paths.socket_dir / FILE)}
    if name := interface_of(host):
        # Left to itself, gloo listens where the host's own name points to, which often is loopback.
        found |= {variable: name for variable in COLLECTIVES if variable not in os.environ}
    return found


def interface_of(host: str) -> str:
    """The network interface that has this address; empty if none of this machine does."""
    try:
        own = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return ""
    addresses: dict[str, list[Any]] = psutil.net_if_addrs()
    return next((name for name, has in addresses.items() if any(one.address in own for one in has)), "")


class Links(NamedTuple):
    """A role's node, its address for other nodes, and the run's keys."""

    node: str
    host: str
    keys: CurveKeys

    @classmethod
    def from_environment(cls) -> Links | None:
        """None in a run of one node."""
        env = os.environ
        if HOST_ENV not in env:
            return None
        return cls(env[NODE_ENV], env[HOST_ENV], curve_keys(read_key(Path(env[KEY_ENV]))))

    @property
    def listen(self) -> str:
        """Where the role listens for other nodes: any free port."""
        return f"tcp://[{self.host}]:0" if ":" in self.host else f"tcp://{self.host}:0"


class AddressResolver:
    """Resolves slots by asking the agent of this node, anew before every connect: a slot moves between nodes.

    Args:
        socket_dir: where the agent answers.
        hello: who asks.
    """

    def __init__(self, socket_dir: Path, hello: Hello) -> None:
        self._client = RpcClient(f"unix://{socket_dir / AGENT_SOCKET}", hello)
        self._agent = self._client.bind(WhereApi, timeout_s=RESOLVE_TIMEOUT_S)

    async def resolve(self, slot: str) -> str:
        """The slot's address for this process. Raises Unreachable: it is nowhere at the moment."""
        address = await self._agent.where(slot)
        if not address:
            raise Unreachable(slot, why="it does not run on any node at the moment", hint="`relax-rt ps` shows why")
        return address

    async def close(self) -> None:
        """End the connection to the agent."""
        await self._client.close()


class NodePayloads:
    """A role's payloads on a node that joined: shared memory of its own, served to readers elsewhere, gone with it.

    Made when the role starts; served from its first use of the queue on. What earlier incarnations of the slot left
    here is removed: their end was reported to the queue, which has dropped what they held.

    Args:
        shm_dir: the run's directory in shared memory on this node.
        who: the incarnation.
        links: its node.
    """

    def __init__(self, shm_dir: Path, who: Incarnation, links: Links) -> None:
        self.directory = shm_dir / f"{PAYLOADS_PREFIX}{owner_key(who)}"
        self._links = links
        self._server: PayloadServer | None = None
        self._opening = asyncio.Lock()
        slot = who.slot.replace("/", "-")
        for old in shm_dir.glob(f"{PAYLOADS_PREFIX}{slot}-*"):
            if old.name.rpartition("-")[2].isdigit() and int(old.name.rpartition("-")[2]) < who.epoch:
                shutil.rmtree(old, ignore_errors=True)
        self.directory.mkdir(mode=0o700, exist_ok=True)

    async def announce(self, queue: QueueApi) -> None:
        """Serve the payloads and report the address to the broker; before any other call of this incarnation."""
        async with self._opening:
            if self._server is None:
                server = PayloadServer(self.directory, keys=self._links.keys, io_threads=1)
                await server.listen(self._links.listen)
                self._server = server
            await queue.register(self._links.node, self._server.address)

    async def close(self) -> None:
        """Stop serving and remove the payloads."""
        if self._server is not None:
            await self._server.close()
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)
