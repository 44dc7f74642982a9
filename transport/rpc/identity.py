"""Who is speaking: slots, incarnations and their epochs, and the keys that encrypt connections between nodes."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Self

import msgspec

from relax_rt.transport.rpc.errors import Refused


class Incarnation(msgspec.Struct, frozen=True, array_like=True):
    """One process in one slot.

    Attributes:
        slot: the place it fills, as ``rollout/0``.
        epoch: issued by the registry, unique in the run, only grows. A lower epoch of the same slot is fenced.
    """

    slot: str
    epoch: Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]

    @property
    def role(self) -> str:
        """The role's name: ``rollout`` of ``rollout/0``."""
        return self.slot.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.slot}#{self.epoch}"


class Hello(msgspec.Struct, frozen=True):
    """First message of each side of a connection; versions are compared before anything else is read."""

    protocol: int
    run_id: str
    who: Incarnation
    pid: int


@dataclasses.dataclass(frozen=True)
class CurveKeys:
    """A key pair, and whom it talks to. With the defaults all processes of a run share one pair.

    Attributes:
        public, secret: z85 text, 40 bytes each.
        server: public key that a server must prove to hold; empty: this pair's own.
        clients: public keys that a server admits; empty: this pair's own only.
    """

    public: bytes
    secret: bytes = dataclasses.field(repr=False)
    server: bytes = b""
    clients: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        for name, key in (("public", self.public), ("secret", self.secret), ("server", self.server or self.public)):
            if len(key) != 40:
                raise Refused(f"CURVE {name} key", why=f"it has {len(key)} bytes, not 40", hint="use CurveKeys.make()")

    @classmethod
    def make(cls) -> Self:
        """A new key pair from the operating system's random numbers."""
        import zmq

        public, secret = zmq.curve_keypair()
        return cls(public, secret)

    @property
    def server_key(self) -> bytes:
        """The public key that a client expects of its server."""
        return self.server or self.public

    @property
    def admitted(self) -> frozenset[bytes]:
        """Public keys that a server lets in."""
        return self.clients or frozenset((self.public,))
