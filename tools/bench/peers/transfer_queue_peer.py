"""TransferQueue 0.1.11 (SimpleStorage) and Ray's object store on the cases of tools/bench/transfer_queue.py.

Run by the interpreter of the peers' environment; the last line of stdout is one JSON object of lists of seconds. Writer
and reader are Ray actors, each a process of its own. TransferQueue runs on its own transport (ZeroMQ); Ray starts it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib.metadata
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from queue_cases import BATCHED, BATCHES, KEPT, TASK, UNDER_WAY, PlainCopy, chunks, single, touch, touch_all
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

STORE_BYTES = 4 << 30


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def column(values: Any) -> Any:
    """A column the way TransferQueue takes it."""
    if isinstance(values, np.ndarray):
        return torch.from_numpy(values)
    if isinstance(values[0], np.ndarray):
        return torch.nested.as_nested_tensor([torch.from_numpy(v) for v in values], layout=torch.jagged)
    return NonTensorStack(*values)


def touch_column(values: Any) -> float:
    """First and last element: of a fixed column once, of any other for each sample."""
    if isinstance(values, np.ndarray):
        return touch(values)
    if isinstance(values, torch.Tensor):
        return touch_all(iter(values.unbind())) if values.is_nested else touch(values)
    return touch_all(iter(values.tolist() if hasattr(values, "tolist") else values))


@ray.remote(num_cpus=0.1)
class Worker:
    """A writer or a reader. Times are taken in it, around the peer's own call."""

    def __init__(self, conf: Any) -> None:
        tq.init(conf)

    def load(self, name: str) -> None:
        case = BATCHES[name]()
        self.columns, self.samples = case.columns, case.samples
        columns = {name: column(values) for name, values in case.columns.items()}
        self.batch = TensorDict(columns, batch_size=(case.samples,))
        self.plain = PlainCopy(case)

    def copy(self) -> float:
        """Plain memcpy of the arrays into warm shared pages: tells whether the machine is as quiet as for ours."""
        return self.plain.run()

    def keys(self, i: int) -> list[str]:
        return [f"{i}-{k}" for k in range(self.samples)]

    def tq_put(self, i: int) -> float:
        keys = self.keys(i)
        return timed(lambda: tq.kv_batch_put(keys=keys, partition_id=TASK, fields=self.batch))[0]

    def tq_get(self, i: int) -> float:
        keys = self.keys(i)

        def read() -> None:
            batch = tq.kv_batch_get(keys=keys, partition_id=TASK)
            for name in batch.keys():  # noqa: SIM118 - a TensorDict iterates over its rows
                touch_column(batch.get(name))

        return timed(read)[0]

    def tq_clear(self, i: int) -> float:
        keys = self.keys(i)
        return timed(lambda: tq.kv_clear(keys=keys, partition_id=TASK))[0]

    def ray_put(self) -> tuple[float, list[Any]]:
        seconds, ref = timed(lambda: ray.put(self.columns))
        return seconds, [ref]

    def ray_get(self, refs: list[Any]) -> float:
        return timed(lambda: [touch_column(values) for values in ray.get(refs[0]).values()])[0]

    # --- 8 KiB samples

    def tq_put_each(self, n: int) -> float:
        data = torch.from_numpy(single())[0]

        def put() -> None:
            for i in range(n):
                tq.kv_put(key=f"e{i}", partition_id=TASK, fields={"x": data}, tag={"v": 1})

        return timed(put)[0]

    def tq_get_each(self, n: int) -> float:
        def get() -> None:
            for i in range(n):
                touch(tq.kv_batch_get(keys=[f"e{i}"], partition_id=TASK)["x"])

        return timed(get)[0]

    def tq_clear_each(self, n: int) -> None:
        tq.kv_clear(keys=[f"e{i}" for i in range(n)], partition_id=TASK)

    def tq_put_batched(self, n: int) -> float:
        data = TensorDict({"x": torch.from_numpy(single(BATCHED))}, batch_size=(BATCHED,))

        def put() -> None:
            for part in chunks(n, BATCHED):
                keys = [f"e{i}" for i in part]
                tq.kv_batch_put(keys=keys, partition_id=TASK, fields=data[: len(keys)])

        return timed(put)[0]

    def tq_get_batched(self, n: int) -> float:
        def get() -> None:
            for part in chunks(n, BATCHED):
                touch(tq.kv_batch_get(keys=[f"e{i}" for i in part], partition_id=TASK)["x"])

        return timed(get)[0]

    def tq_put_pipelined(self, n: int) -> float:
        data = torch.from_numpy(single())[0]

        async def put(key: str) -> None:
            await tq.async_kv_put(key=key, partition_id=TASK, fields={"x": data}, tag={"v": 1})

        return timed(lambda: asyncio.run(pipelined(n, put)))[0]

    def tq_get_pipelined(self, n: int) -> float:
        async def get(key: str) -> None:
            touch((await tq.async_kv_batch_get(keys=[key], partition_id=TASK))["x"])

        return timed(lambda: asyncio.run(pipelined(n, get)))[0]

    def ray_put_each(self, n: int) -> tuple[float, list[Any]]:
        data = single()[0]
        return timed(lambda: [ray.put(data) for _ in range(n)])

    def ray_get_each(self, refs: list[Any]) -> float:
        return timed(lambda: touch_all(ray.get(ref) for ref in refs))[0]

    def ray_get_batched(self, refs: list[Any]) -> float:
        def get() -> None:
            for part in chunks(len(refs), BATCHED):
                touch_all(iter(ray.get(refs[part.start : part.stop])))

        return timed(get)[0]


async def pipelined(n: int, call: Callable[[str], Any]) -> None:
    """n calls, UNDER_WAY of them at once."""
    todo = iter(range(n))

    async def run() -> None:
        for i in todo:
            await call(f"e{i}")

    await asyncio.gather(*(run() for _ in range(UNDER_WAY)))


class Record:
    """Seconds of each operation, by system, case and operation, in the order in which they were taken."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, dict[str, list[float]]]] = {}

    def add(self, system: str, case: str, **seconds: float) -> None:
        ops = self.seconds.setdefault(system, {}).setdefault(case, {})
        for op, value in seconds.items():
            ops.setdefault(op, []).append(value)


def run_batches(writer: Any, reader: Any, record: Record, rounds: dict[str, int]) -> None:
    """Each round: copy, TransferQueue, Ray, one after the other. What the first rounds store is kept until they end."""
    for name, count in rounds.items():
        ray.get([writer.load.remote(name), reader.load.remote(name)])
        kept: list[tuple[int, Any]] = []
        for i in range(count):
            record.add("memcpy", name, put=ray.get(writer.copy.remote()))
            put, get = ray.get(writer.tq_put.remote(i)), ray.get(reader.tq_get.remote(i))
            record.add("transferqueue", name, put=put, get=get)
            put, refs = ray.get(writer.ray_put.remote())
            record.add("ray", name, put=put, get=ray.get(reader.ray_get.remote(refs)))
            kept.append((i, refs))
            del refs
            while i + 1 >= KEPT and kept:
                record.add("transferqueue", name, free=ray.get(writer.tq_clear.remote(kept.pop(0)[0])))
            gc.collect()
        print(f"peers: {name} done", file=sys.stderr, flush=True)


def run_singles(writer: Any, reader: Any, record: Record, rounds: int, count: int) -> None:
    """8 KiB samples: in turn, batched, pipelined. The first round warms up and does not count."""
    forms = {
        "in turn": (writer.tq_put_each, reader.tq_get_each),
        "batched": (writer.tq_put_batched, reader.tq_get_batched),
        "pipelined": (writer.tq_put_pipelined, reader.tq_get_pipelined),
    }
    for warm in [False] + [True] * rounds:
        kept = record if warm else Record()
        for form, (put, get) in forms.items():
            took = ray.get(put.remote(count)), ray.get(get.remote(count))
            ray.get(writer.tq_clear_each.remote(count))
            kept.add("transferqueue", form, put=took[0] / count, get=took[1] / count)
        for form, read in {"in turn": reader.ray_get_each, "batched": reader.ray_get_batched}.items():
            seconds, refs = ray.get(writer.ray_put_each.remote(count))
            kept.add("ray", form, get=ray.get(read.remote(refs)) / count)
            if form == "in turn":
                kept.add("ray", form, put=seconds / count)
            del refs
            gc.collect()
    print("peers: 8 KiB samples done", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=json.loads, required=True, help="rounds by name of the batch, as JSON")
    parser.add_argument("--single-rounds", type=int, default=5)
    parser.add_argument("--singles", type=int, default=512)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="peer-"))
    record = Record()
    try:
        ray.init(
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            object_store_memory=STORE_BYTES,
            _temp_dir=str(folder),
        )
        storage = {"total_storage_size": 200_000, "num_data_storage_units": 2}
        backend = {"storage_backend": "SimpleStorage", "SimpleStorage": storage}
        conf = OmegaConf.create({"backend": backend}, flags={"allow_objects": True})
        writer = Worker.remote(conf)
        ray.get(writer.__ray_ready__.remote())
        reader = Worker.remote(conf)
        run_batches(writer, reader, record, options.rounds)
        run_singles(writer, reader, record, options.single_rounds, options.singles)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
    versions = {name: importlib.metadata.version(name) for name in ("transferqueue", "ray", "torch")}
    print(json.dumps({"versions": versions, "seconds": record.seconds}))


if __name__ == "__main__":
    main()
