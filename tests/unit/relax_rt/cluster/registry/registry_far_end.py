"""A registry in a process of its own, for tests that kill it: address, file and run id are its arguments."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from relax_rt.cluster.registry.role import RegistryService
from relax_rt.cluster.registry.store import Store
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcServer, make_hello


async def main(address: str, path: str, run_id: str) -> None:
    service = RegistryService(Store(Path(path), run_id))
    await service.start()
    server = RpcServer(make_hello(run_id, Incarnation("registry/0", 0)))
    server.offer(RegistryApi, service)
    await server.listen(address)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await service.serve()


if __name__ == "__main__":
    Path(sys.argv[1].removeprefix("unix://")).unlink(missing_ok=True)
    asyncio.run(main(*sys.argv[1:4]))
