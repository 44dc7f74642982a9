"""``python -m relax_rt.transport.queue FOLDER --task train=tokens,reward``: a broker in a process of its own."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path

import uvloop

from relax_rt.transport.queue.hosting import Host
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits, SamplerSpec
from relax_rt.transport.rpc.errors import RelaxError


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"'{text}' is not NAME=VALUE")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m relax_rt.transport.queue",
        description="Serve the TransferQueue of a folder until interrupted.",
        epilog="--task, --field and --sampler may be given several times. Dtypes are those of numpy with bf16,"
        " fp8_e4m3, fp8_e5m2, str, bytes and any; sizes are numbers or *, as int32[*], uint8[*,*,3], float32."
        " Samplers are fifo, whole_group, sequence_balanced, token_budget, freshest_first, priority,"
        " package.module:Class or file.py:Class (relative to here).",
    )
    parser.add_argument("folder", type=Path, help="of the journal; made if it is not there")
    parser.add_argument(
        "--task", type=_pair, action="append", default=[], metavar="NAME=FIELD,FIELD", help="a consumer task"
    )
    parser.add_argument(
        "--field", type=_pair, action="append", default=[], metavar="NAME=DTYPE[SIZES]", help="a declared column"
    )
    parser.add_argument(
        "--sampler", type=_pair, action="append", default=[], metavar="TASK=SAMPLER", help="who chooses for a task"
    )
    parser.add_argument("--capacity-mib", type=int, default=1024, help="payload in shared memory (default 1024)")
    parser.add_argument("--spill-mib", type=int, default=0, help="payload that may move to disk (default 0)")
    parser.add_argument("--durable", action="store_true", help="keep payloads in files of the folder")
    parser.add_argument("--lease-s", type=float, default=60.0, help="length of leases in seconds (default 60)")
    parser.add_argument(
        "--fsync-every-s", type=float, default=1.0, help="how often the journal is forced to disk (default 1)"
    )
    parser.add_argument("--listen", default="", metavar="tcp://HOST:PORT", help="also serve other nodes")
    return parser


async def _serve(host: Host) -> None:
    place = await host.open()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    sys.stdout.write(f"queue {host.folder}: {', '.join(place.addresses)}\n")
    sys.stdout.flush()
    assert host.broker is not None
    failed = asyncio.ensure_future(host.broker.run())
    stopped = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait([failed, stopped], return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
    finally:
        failed_first = failed.done()
        for one in (failed, stopped):
            one.cancel()
        await asyncio.gather(failed, stopped, return_exceptions=True)
        await host.close(keep_memory=failed_first)


def main(argv: list[str] | None = None) -> int:
    """Entry point; answers with the exit status to leave with."""
    parser = _parser()
    options = parser.parse_args(argv)
    for what, pairs in (("--task", options.task), ("--field", options.field), ("--sampler", options.sampler)):
        names = [name for name, _ in pairs]
        if len(set(names)) != len(names):
            parser.error(f"{what} names one thing twice: {', '.join(names)}")
    if not options.fsync_every_s > 0:
        parser.error(f"--fsync-every-s {options.fsync_every_s:g} is not a time")
    policy = LedgerPolicy(
        tasks={task: tuple(name for name in fields.split(",") if name) for task, fields in options.task},
        step_task="",
        samplers={task: SamplerSpec(path) for task, path in options.sampler},
        fields=dict(options.field),
    )
    limits = QueueLimits(
        lease_s=options.lease_s,
        capacity_bytes=options.capacity_mib << 20,
        spill_bytes=options.spill_mib << 20,
        durable=options.durable,
    )
    host = Host(options.folder, policy, limits, listen=options.listen, fsync_every_s=options.fsync_every_s)
    try:
        uvloop.run(_serve(host))
    except (RelaxError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
