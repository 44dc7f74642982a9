"""Typed remote calls: one message layer over unix sockets on a node and ZeroMQ between nodes.

An interface is a class (or Protocol) of `async def` methods. A server offers implementations of interfaces, a
client binds an interface and gets an object of the same type::

    class Counter(Protocol):
        @idempotent
        async def total(self) -> int: ...
        async def add(self, n: int) -> int: ...

    server = RpcServer(hello)
    server.offer(Counter, implementation)
    address = await server.listen("unix:///run/x/counter.sock")

    client = RpcClient(address, hello)
    counter = client.bind(Counter, timeout_s=5.0)
    await counter.add(2)

What a caller sees when something goes wrong: `Unreachable` (no answer before the deadline), `ActorDied` (the server
ended in the middle of a call that must not be repeated), `DeadlineExceeded` (the handler took too long and was
cancelled), `ProtocolError` (other protocol, other run, message too large), the RelaxError that the handler raised, or
`RemoteError` for any other exception of the handler.
"""

from __future__ import annotations

from relax_rt.transport.rpc.client import ClientStatistics, RpcClient
from relax_rt.transport.rpc.identity import CurveKeys
from relax_rt.transport.rpc.interface import eager, idempotent, tell
from relax_rt.transport.rpc.server import RpcServer, ServerStatistics, caller
from relax_rt.transport.rpc.wire import PROTOCOL, make_hello

__all__ = [
    "PROTOCOL",
    "ClientStatistics",
    "CurveKeys",
    "RpcClient",
    "RpcServer",
    "ServerStatistics",
    "caller",
    "eager",
    "idempotent",
    "make_hello",
    "tell",
]
