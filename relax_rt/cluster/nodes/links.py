"""How a role of a run over several nodes reaches the others, and they it. Its orders come with its environment."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, NamedTuple

from relax_rt.cluster.nodes.keys import FILE, curve_keys, read_key
from relax_rt.supervision.api import WhereApi
from relax_rt.supervision.rundir import AGENT_SOCKET, RunPaths
from relax_rt.transport.base.watch import NODE_ENV
from relax_rt.transport.rpc.errors import Unreachable
from relax_rt.transport.rpc.identity import Hello
from relax_rt.transport.rpc.rpc import Client, CurveKeys

RUN_ENV, HOST_ENV, KEY_ENV = "RELAX_RUN", "RELAX_HOST", "RELAX_KEY"
COLLECTIVES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ASK_TIMEOUT_S = 2.0


def role_environment(paths: RunPaths, *, run_id: str, node: str, host: str) -> dict[str, str]:
    """Variables of every role on a node of a run over several.

    Args:
        paths: the run's directories on this node; the key lies in the private one.
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
    import psutil  # type: ignore[import-untyped]

    try:
        own = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return ""
    addresses: dict[str, list[Any]] = psutil.net_if_addrs()
    return next((name for name, has in addresses.items() if any(one.address in own for one in has)), "")


class Links(NamedTuple):
    """A role's node, the address at which it is to listen for other nodes, and the run's keys."""

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


class Finder:
    """Finds slots by asking the agent of this node. A slot's address is asked for anew before every connect.

    Args:
        socket_dir: where the agent answers.
        hello: who asks.
    """

    def __init__(self, socket_dir: Path, hello: Hello) -> None:
        self._client = Client(f"unix://{socket_dir / AGENT_SOCKET}", hello)
        self._agent = self._client.bind(WhereApi, timeout_s=ASK_TIMEOUT_S)

    async def find(self, slot: str) -> str:
        """The slot's address for this process.

        Raises:
            Unreachable: it is nowhere at the moment.
        """
        address = await self._agent.where(slot)
        if not address:
            raise Unreachable(slot, why="it does not run on any node at the moment", hint="`relax-rt ps` shows why")
        return address

    async def close(self) -> None:
        """End the connection to the agent."""
        await self._client.close()
