"""The process of one rank: it owns a communicator, and may be killed at any moment.

Two threads. This one listens to the owner of the group and answers at once, whatever the library does; the other is
the only one to call the library, and may hang in it. The owner's death ends the process.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from typing import NoReturn

from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.weights.collective.communicator import Communicator, PeerLost, View, bucket_bounds
from relax_rt.transport.weights.collective.messages import (
    ERROR_CHARS,
    MAX_PACKET_BYTES,
    AbortedSaid,
    AbortOrder,
    BroadcastOrder,
    DoneSaid,
    FailedSaid,
    HeardSaid,
    HelloSaid,
    InitOrder,
    JoinedSaid,
    Order,
    ProgressSaid,
    Said,
    decode_order,
    encode,
)
from relax_rt.transport.weights.manifest import total_digest

MAX_ORDERS = 16


class Worker:
    """One rank. `run` returns never: the process ends with its owner."""

    def __init__(self, control: socket.socket, communicator: Communicator) -> None:
        self._control = control
        self._communicator = communicator
        self._orders: queue.Queue[Order] = queue.Queue(MAX_ORDERS)
        self._aborted = 0
        self._sending = threading.Lock()

    def run(self) -> NoReturn:
        """Serve until the owner is gone."""
        threading.Thread(target=self._collective, name="collective", daemon=True).start()
        self._say(HelloSaid(os.getpid(), self._communicator.device, self._communicator.software))
        while packet := self._control.recv(MAX_PACKET_BYTES):
            order = decode_order(packet)
            if isinstance(order, AbortOrder):
                self._aborted = order.generation
                self._say(HeardSaid(order.generation))
                self._communicator.abort()
            self._orders.put_nowait(order)  # full: the owner breaks the protocol, and the process ends
        os._exit(0)

    def _say(self, said: Said) -> None:
        try:
            with self._sending:
                self._control.send(encode(said))
        except OSError:
            os._exit(0)  # the owner is gone

    def _collective(self) -> None:
        """The only thread that calls the library."""
        while True:
            order = self._orders.get()
            try:
                self._carry_out(order)
            except PeerLost as error:
                self._failed(order.generation, error, own=False)
            except (RelaxError, OSError, RuntimeError, ValueError, ImportError, MemoryError) as error:
                self._failed(order.generation, error, own=True)
            except BaseException as error:  # noqa: BLE001 - a rank without this thread would look alive for ever
                self._failed(order.generation, error, own=True)
                os._exit(1)

    def _failed(self, generation: int, error: BaseException, *, own: bool) -> None:
        # What an aborted call says is our own doing. Once it is said, nothing of the library writes any more.
        if generation > self._aborted:
            self._communicator.close()
            self._say(FailedSaid(generation, own, f"{type(error).__name__}: {error}"[:ERROR_CHARS]))

    def _carry_out(self, order: Order) -> None:
        if isinstance(order, AbortOrder):
            self._communicator.close()
            self._say(AbortedSaid(order.generation))
        elif order.generation <= self._aborted:
            return
        elif isinstance(order, InitOrder):
            self._communicator.close()
            self._communicator.init(order.rank, order.world, order.rendezvous, order.timeout_s)
            self._say(JoinedSaid(order.generation))
        else:
            self._broadcast(order)

    def _broadcast(self, order: BroadcastOrder) -> None:
        bounds = bucket_bounds(order.memory.nbytes, order.bucket_bytes)
        with self._communicator.open(order.memory, writable=not order.root) as view:
            for number, (start, stop) in enumerate(bounds[order.first :], order.first + 1):
                self._communicator.broadcast(view.part(start, stop), 0, order.stall_s)
                if number < len(bounds):
                    self._say(ProgressSaid(order.generation, number))
            digest = digest_of(view, order.bucket_bytes)
        self._say(DoneSaid(order.generation, order.transfer, digest))


def digest_of(view: View, bucket_bytes: int) -> str:
    """The digest over all buckets, as a manifest has it."""
    bounds = bucket_bounds(view.nbytes, bucket_bytes)
    return total_digest(view.part(start, stop).digest() for start, stop in bounds)
