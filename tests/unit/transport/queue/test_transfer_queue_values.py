"""Every kind of value through the standalone queue: a broker, a producer and a consumer, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transfer_queue_far_end import SAMPLES, plain, sample
from transfer_queue_world import World

from relax_rt.transport import TransferQueue
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.rpc.errors import Refused


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with World(tmp_path) as made:
        yield made


TASKS = ("--task", "judge=text", "--task", "train=text,score")


def check(read: Any, put: Any, name: str) -> None:
    expected = plain(put)
    if isinstance(expected, np.ndarray | np.generic):
        assert read.dtype == expected.dtype.newbyteorder("<"), name
        np.testing.assert_array_equal(read, expected, err_msg=name)
        assert not isinstance(read, np.ndarray) or not read.flags.writeable, name
    else:
        assert type(read) is type(expected) and read == expected, name


@pytest.mark.parametrize("how", ["rows", "columns"])
async def test_every_kind_of_value_arrives(world: World, how: str) -> None:
    world.broker(*TASKS)
    producer = world.far("values", how)
    keys = [SampleKey(*key) for key in producer.told()]
    async with TransferQueue.connect(world.folder) as queue:
        batch = await queue.lease("judge", samples=100, wait_s=30)
        assert batch.keys == keys and len(batch) == SAMPLES
        for n, one in enumerate(batch.samples):
            expected = sample(n)
            assert set(one.names) == set(expected)
            for name, value in expected.items():
                check(one[name], value, f"{name} of {n}")
        for name in expected:
            stacks = name.startswith(("fixed_", "number", "big_", "empty", "strided", "image", "shared"))
            values = [plain(sample(n)[name]) for n in range(SAMPLES)]
            if stacks:
                np.testing.assert_array_equal(batch.column(name), np.stack(values), err_msg=name)
            else:
                with pytest.raises(Refused, match=f"column '{name}' of {SAMPLES} samples as one array"):
                    batch.column(name)
            if isinstance(values[0], np.ndarray) and values[0].ndim == 1:
                flat, offsets = batch.packed(name)
                np.testing.assert_array_equal(flat, np.concatenate(values), err_msg=name)
                assert offsets.tolist() == [0, *np.cumsum([len(value) for value in values])]
        # The equal ones of the images and of what was said to be shared are there once.
        stats = (await queue.statistics())["broker"]
        assert stats["memory"]["blobs"] == 2
        await queue.complete(batch)
    producer.tell()
    assert producer.wait() == 0


async def test_new_columns_and_tensors_in_and_out(world: World) -> None:
    torch = pytest.importorskip("torch")
    world.broker("--task", "judge=tokens,half", "--task", "train=doubled")
    async with TransferQueue.connect(world.folder) as queue:
        judge = world.far("tensors")
        half = torch.arange(4, dtype=torch.bfloat16) / 2
        tokens = [torch.arange(n + 1000, dtype=torch.int32) for n in range(3)]
        await queue.put([{"tokens": one, "half": half, "grad": torch.zeros(2, requires_grad=True)} for one in tokens])
        batch = await queue.lease("train", samples=3, wait_s=30)
        while len(batch) < 3:
            await queue.release(batch, "all at once, please")
            batch = await queue.lease("train", samples=3, wait_s=30)
        for one, put in zip(batch.samples, tokens, strict=True):
            assert torch.equal(one.tensor("doubled"), put * 2)
            assert one.tensor("half_doubled").dtype == torch.bfloat16
            assert torch.equal(one.tensor("half_doubled"), half * 2)
            assert one["scores"].dtype == np.float16 and one["half"].dtype == np.uint16
        assert judge.told() == 3 and judge.wait() == 0
        await queue.complete(batch)


PROGRAM = """
import sys
import numpy as np
from relax_rt.transport import TransferQueue
with TransferQueue.serve(sys.argv[1], {"train": ["tokens"]}).blocking() as queue:
    queue.put([{"tokens": np.arange(9000, dtype=np.int32), "text": "x"}])
    batch = queue.lease("train", samples=1, wait_s=10)
    assert batch.samples[0]["tokens"].sum() == 9000 * 8999 // 2
    queue.complete(batch, {batch.keys[0]: {"reward": 1.0}})
for name in sorted(sys.modules.keys() - {"relax_rt.config", "relax_rt.config.version"}):
    if name.startswith("relax_rt.") and not name.startswith("relax_rt.transport"):
        print(name)
print("torch" in sys.modules, "ray" in sys.modules, "pydantic" in sys.modules)
"""


def test_neither_torch_nor_the_runtime_is_imported(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout == "False False False\n" and done.stderr == ""
