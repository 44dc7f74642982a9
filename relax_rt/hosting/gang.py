"""A role's rank in its gang, and the rendezvous store of the gang.

The agent binds the rendezvous socket before any rank starts and hands it to rank 0, so that no port is raced for; each
start of the gang has a new one, so that ranks of different generations cannot meet. The host serves the store on rank 0
before the role is set up: `Gang.here().store()` works, and so does a plain
``torch.distributed.init_process_group("gloo")``. In the former every key begins with one of the generation's own, so
that a rank of another one that found its way there (a port that was given out again) reads and spoils nothing; give it
to ``init_process_group`` with `rank` and `world_size`. Neither protects against an attacker: store and
collectives are plain TCP.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING

from relax_rt.supervision.executor import GangOrder
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

RENDEZVOUS_FD = "RELAX_RENDEZVOUS_FD"
STORE_TIMEOUT_S = 300.0

_serving: list[TCPStore] = []
"""Rank 0's store, served until the process ends."""


class Gang(GangOrder, frozen=True, kw_only=True):
    """This process's rank in its gang."""

    @classmethod
    def here(cls, env: Mapping[str, str] = os.environ) -> Gang:
        """The rank that the agent gave this process.

        Raises:
            RelaxError: it is no rank of a gang.
        """
        if "RELAX_GENERATION" not in env:
            why = "its slots are started one by one"
            raise RelaxError("this role is no gang", why=why, hint="set `gang = True` in the role's class")
        return cls(
            generation=int(env["RELAX_GENERATION"]),
            rank=int(env["RANK"]),
            world_size=int(env["WORLD_SIZE"]),
            local_rank=int(env["LOCAL_RANK"]),
            local_world_size=int(env["LOCAL_WORLD_SIZE"]),
            master_addr=env["MASTER_ADDR"],
            master_port=int(env["MASTER_PORT"]),
            key=env.get("RELAX_GANG_KEY", ""),
        )

    def store(self, timeout_s: float = STORE_TIMEOUT_S) -> Store:
        """This generation's key-value store: rank 0 serves it, the others are clients. Waits in it end after timeout_s.

        Raises:
            torch.distributed.DistStoreError: rank 0 cannot be reached.
        """
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        timeout = timedelta(seconds=timeout_s)
        if self.rank == 0:
            self.serve()
            store = _serving[0]
            store.set_timeout(timeout)
        else:
            store = TCPStore(self.master_addr, self.master_port, is_master=False, timeout=timeout)
        return PrefixStore(self.key, store)

    def serve(self) -> None:
        """On rank 0, serve the store on the inherited socket, until the process ends. Repeated calls do nothing."""
        if self.rank != 0 or _serving or find_spec("torch") is None:
            return
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        fd = int(os.environ[RENDEZVOUS_FD])
        os.set_inheritable(fd, False)
        _serving.append(
            TCPStore(
                self.master_addr,
                self.master_port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
                master_listen_fd=fd,
            )
        )
