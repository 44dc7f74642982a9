"""What other processes of the TransferQueue's tests do: ``transfer_queue_far_end.py FUNCTION FOLDER ARGUMENTS``."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from relax_rt.transport import TransferQueue
from relax_rt.transport.memory.values import Bf16, Raw, Shared
from relax_rt.transport.queue.hosting import Host, QueueKeys
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.rpc.rpc import CurveKeys

SAMPLES = 7
PLAIN = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
BITS = {"bf16": np.uint16, "fp8_e4m3": np.uint8, "fp8_e5m2": np.uint8}


def tell(value: Any) -> None:
    """To the test."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def numbers(n: int, dtype: Any, *shape: int) -> Any:
    """Any bits, the same everywhere for the same n."""
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if dtype == "bool":
        return np.random.default_rng(n).integers(0, 2, shape).astype(bool)
    return np.random.default_rng(n).integers(0, 256, nbytes, np.uint8).view(dtype).reshape(shape)


def image(n: int) -> Any:
    """Larger than the bound from which on equal values are stored once; two in turn."""
    return numbers(n % 2, np.uint8, 40, 40, 3)


def sample(n: int) -> dict[str, Any]:
    """Every kind of value there is; each of another size in every sample."""
    row: dict[str, Any] = {f"ragged_{dtype}": numbers(n, dtype, n + 1) for dtype in PLAIN}
    row |= {f"fixed_{dtype}": numbers(n, dtype, 2, 3) for dtype in PLAIN}
    row |= {f"number_{dtype}": numbers(n, dtype, 1)[0] for dtype in PLAIN}
    row |= {f"ragged_{name}": Raw(name, numbers(n, bits, n, 2)) for name, bits in BITS.items()}
    row |= {
        "fixed_bf16": Bf16(numbers(n, np.uint16, 5)),
        "empty": np.zeros(0, np.float32),
        "grid": numbers(n, np.float32, n, 3, n + 1),
        "strided": numbers(n, np.int32, 6, 8)[::2, 1::3],
        "big_endian": numbers(n, np.int32, 4).astype(">i4"),
        "text": "größer ☃ " * n,
        "data": bytes(range(n)) * 100,
        "object": {"n": n, "list": [None, True, 1.5, "x"], "deep": {"er": [n]}},
        "number": n / 2,
        "image": image(n),
        "shared": Shared(image(n)),
    }
    return row


def columns() -> dict[str, Any]:
    """The same samples, column by column."""
    rows = [sample(n) for n in range(SAMPLES)]
    found: dict[str, Any] = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name.startswith(("fixed_", "number_")) and name != "fixed_bf16":
            found[name] = np.stack(values)
        elif name == "fixed_bf16":
            found[name] = Bf16(np.stack([value.bits for value in values]))
        else:
            found[name] = values
    return found


def plain(value: Any) -> Any:
    """A value as it is read: bits, and what is shared."""
    value = value.value if isinstance(value, Shared) else value
    return value.bits if isinstance(value, Raw) else value


async def values(folder: str, how: str) -> None:
    """Put all kinds of values."""
    async with TransferQueue.connect(folder) as queue:
        if how == "rows":
            keys = await queue.put([sample(n) for n in range(SAMPLES)])
        else:
            keys = await queue.put(columns())
        tell([[key.group, key.member] for key in keys])
        await asyncio.to_thread(sys.stdin.readline)


async def tensors(folder: str) -> None:
    """Take tensors, put what they are multiplied with."""
    import torch

    async with TransferQueue.connect(folder) as queue:
        batch = await queue.lease("judge", samples=8, wait_s=30)
        doubled = {}
        for one in batch.samples:
            tensor, half = one.tensor("tokens"), one.tensor("half")
            assert tensor.dtype == torch.int32 and half.dtype == torch.bfloat16
            doubled[one.key] = {
                "doubled": tensor * 2,
                "half_doubled": half * 2,
                "scores": torch.rand(3).to(torch.float16),
            }
        await queue.complete(batch, doubled)
        tell(len(batch))


FLOOD_TOKENS = 6000


async def flood(folder: str) -> None:
    """Put as fast as memory comes free, of which there is little: each sample is its number, over and over."""
    async with TransferQueue.connect(folder, capacity_bytes=1 << 20, slab_bytes=1 << 18) as queue:
        tell("putting")
        for n in range(1 << 30):
            await queue.put([{"tokens": np.full(FLOOD_TOKENS, n, np.int32), "n": n, "text": str(n) * 2000}])


async def hold(folder: str) -> None:
    """Finish a batch and keep an array of it."""
    async with TransferQueue.connect(folder) as queue:
        batch = await queue.lease("train", samples=1, wait_s=30)
        kept = batch.samples[0]["tokens"]
        await queue.complete(batch)
        tell(int(kept[0]))
        await asyncio.to_thread(sys.stdin.readline)
        assert (kept == kept[0]).all()


CHAIN = {"judge": ("tokens",), "train": ("tokens", "reward")}
"""What each task of the broker that tests start needs."""


async def host(
    folder: str, limits: str = "{}", listen: str = "", segment_bytes: str = "32768", column: str = "reward"
) -> None:
    """A broker whose journal begins anew often; ends with its standard input."""
    policy = LedgerPolicy(tasks={**CHAIN, "train": ("tokens", column)}, step_task="")
    given = msgspec.json.decode(limits, type=QueueLimits)
    made = Host(Path(folder), policy, given, listen=listen, fsync_every_s=0.02, segment_bytes=int(segment_bytes))
    place = await made.open()
    tell(place.addresses)
    await asyncio.to_thread(sys.stdin.readline)
    await made.close()


def chained(n: int) -> Any:
    """What sample n holds: some fit into a message, some do not."""
    return np.arange(n, n + (40 if n % 3 else 700), dtype=np.int32)


async def produce(folder: str, first: str) -> None:
    """Put samples one after the other, from number `first` on, until there is a line; tells how many were taken."""
    stop = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    n = int(first)
    async with TransferQueue.connect(folder) as queue:
        while not stop.done():
            keys = await queue.put([{"tokens": chained(n), "n": n}, {"tokens": chained(n + 1), "n": n + 1}])
            assert len(keys) == len(set(keys)) == 2
            n += 2
        tell(n - int(first))


async def fill(folder: str, first: str, samples: str) -> None:
    """Put samples of 100 KiB; tells why it had to wait, and when it is done."""
    reasons: asyncio.Queue[str] = asyncio.Queue()
    async with TransferQueue.connect(folder, on_wait=reasons.put_nowait) as queue:

        async def put() -> None:
            for n in range(int(first), int(first) + int(samples)):
                await queue.put([{"tokens": np.full(25 << 10, n, np.int32), "n": n}])

        putting = asyncio.create_task(put())
        tell(await reasons.get())
        await putting
        tell("done")
        # What was put lies in memory of this process's name.
        await asyncio.to_thread(sys.stdin.readline)


FAR_SAMPLES, FAR_TOKENS = 12, 20_000


async def far_produce(folder: str, address: str, keys: str) -> None:
    """On another node: put samples whose payload stays here, and leave."""
    async with TransferQueue.connect(address, keys=keys, capacity_bytes=1 << 20, slab_bytes=1 << 20) as queue:
        for n in range(FAR_SAMPLES):
            await queue.put([{"tokens": np.full(FAR_TOKENS, n, np.int32), "n": n}])
        memory = queue.client.arena._dir
        tell([str(memory), memory != Path(queue.membership.shm_dir)])  # type: ignore[union-attr]
    tell(memory.exists())


async def far_take(folder: str, address: str, keys: str, task: str, column: str) -> None:
    """Take what another process put, wherever that was; to each sample goes a column of this process's own."""
    seen: list[int] = []
    async with TransferQueue.connect(address or folder, keys=keys or None) as queue:
        while len(seen) < FAR_SAMPLES:
            batch = await queue.lease(task, samples=5, wait_s=30)
            kept = [(sample["n"], sample["tokens"]) for sample in batch.samples]
            for sample in batch.samples:
                if "rewards" in sample:
                    assert (sample["rewards"] == sample["n"] / 2).all() and len(sample["rewards"]) == FAR_TOKENS
            new = {sample.key: {column: np.full(FAR_TOKENS, sample["n"] / 2)} for sample in batch.samples if column}
            await queue.complete(batch, new)
            assert all((tokens == n).all() and len(tokens) == FAR_TOKENS for n, tokens in kept)
            seen += [n for n, _ in kept]
        fetcher = queue.client._fetcher
        tell([seen, fetcher.statistics().bytes_in if fetcher is not None else 0])


async def far_stranger(folder: str, address: str, keys: str) -> None:
    """One with keys of its own, and one with none."""
    own = CurveKeys.make()
    Path(keys).write_bytes(msgspec.json.encode(QueueKeys(own.public.decode(), own.secret.decode())))  # noqa: ASYNC240
    for given in (keys, None):
        try:
            async with TransferQueue.connect(address, keys=given, patience_s=1.0):
                tell("it was let in")
        except RelaxError as error:
            tell(type(error).__name__)


def main(function: str, *arguments: str) -> None:
    """Entry of the other processes."""
    asyncio.run(globals()[function](*arguments))


if __name__ == "__main__":
    main(*sys.argv[1:])
