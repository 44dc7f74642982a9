"""What is wrong is refused by a typed error that says what and why, and the broker goes on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relax_rt.transport import TransferQueue
from relax_rt.transport.base.folder import RUN_ID, SHM_PREFIX, SHM_ROOT
from relax_rt.transport.memory.refs import BlockRef, Extent, slab_name
from relax_rt.transport.memory.values import Bf16
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.hosting import QueueKeys
from relax_rt.transport.queue.ledger.messages import BlockPut, Failure, RowPut, SampleKey
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc import rpc, wire
from relax_rt.transport.rpc.errors import Corrupt, ProtocolError, Refused, RelaxError, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.wire import RequestFrame, encode_frame

FIELDS = {"tokens": "int32[*]", "image": "uint8[*,*,3]", "reward": "float32", "half": "bf16[2]", "text": "str"}
TASKS = {"train": ["tokens"], "judge": ["tokens"]}


@contextlib.asynccontextmanager
async def serving(folder: Path, **settings: Any) -> AsyncIterator[TransferQueue]:
    """A queue that still works in the end."""
    async with TransferQueue.serve(folder / "queue", TASKS, **settings) as queue:
        yield queue
        keys = await queue.put([{"tokens": np.arange(3, dtype=np.int32)}])
        while (batch := await queue.lease("judge", samples=100, wait_s=5)).keys[-1:] != keys:
            assert batch, batch.waiting_on
            await queue.complete(batch)
        assert batch.samples[-1]["tokens"].tolist() == [0, 1, 2]
        assert queue.host is not None and queue.host.broker is not None
        assert queue.host.broker._ledger.audit() == []


def row(**values: Any) -> dict[str, Any]:
    return {"tokens": np.zeros(3, np.int32), **values}


@pytest.mark.parametrize(
    ("sample", "what", "why"),
    [
        (row(tokens=np.zeros(3)), "field 'tokens'", "declared int32[*], its value is float64[3]"),
        (row(tokens=np.zeros((3, 1), np.int32)), "field 'tokens'", "its value has shape [3, 1]"),
        (row(image=np.zeros((4, 4, 4), np.uint8)), "field 'image'", "its value has shape [4, 4, 4]"),
        (row(reward="high"), "field 'reward'", "its value is str"),
        (row(half=Bf16(np.zeros(3, np.uint16))), "field 'half'", "its value has shape [3]"),
        (row(text=b"bytes"), "field 'text'", "declared str, not bytes"),
        (row(rewards=1.0), "field 'rewards'", "it is not declared; did you mean 'reward'?"),
    ],
)
async def test_values_that_are_not_as_declared(tmp_path: Path, sample: dict[str, Any], what: str, why: str) -> None:
    async with serving(tmp_path, fields=FIELDS) as queue:
        (name,) = {what.split("'")[1]} & set(sample)
        columns = {key: [value] for key, value in sample.items()}
        for put in ([sample], columns):
            with pytest.raises(Refused) as caught:
                await queue.put(put)
            assert caught.value.what.startswith(what) and why in caught.value.why
        if name != "tokens":
            await queue.put([row()])
            batch = await queue.lease("train", samples=1, wait_s=5)
            with pytest.raises(Refused) as caught:
                await queue.complete(batch, {batch.keys[0]: {name: sample[name]}})
            assert caught.value.what.startswith(what) and why in caught.value.why
            await queue.complete(batch)


async def test_the_broker_checks_names_of_fields_itself(tmp_path: Path) -> None:
    async with serving(tmp_path, fields=FIELDS) as queue:
        put = BlockPut(BlockRef(None, 1, ("tokens", "rewards"), b"\1"), [RowPut(SampleKey(0, 0), 0)])
        with pytest.raises(Refused, match=r"field 'rewards' put by .*: the declared fields are half, image"):
            await queue.client.api.put_groups(100, [put], [1], 0.0)


async def test_a_sample_over_the_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=QueueLimits(max_sample_bytes=100_000)) as queue:
        small = {"tokens": np.zeros(10, np.int32), "text": "x"}
        large = {"tokens": np.zeros(10, np.int32), "image": np.zeros((200, 200, 3), np.uint8), "text": "x"}
        error = r"field 'image' of 120000 bytes: its sample has 120041 bytes in all, max_sample_bytes is 100000"
        for put in ([large], [small, large, small], {"tokens": [small["tokens"]] * 2, "image": [large["image"]] * 2}):
            with pytest.raises(Refused, match=error.replace("120041", r"1200\d\d")):
                await queue.put(put)
        # Together they have more, and may.
        keys = await queue.put([{"tokens": np.zeros(20_000, np.int32)} for _ in range(4)])
        batch = await queue.lease("train", samples=4, wait_s=5)
        with pytest.raises(Refused, match="field 'image'"):
            await queue.complete(batch, {keys[0]: {"image": large["image"]}})
        await queue.complete(batch)
        # A client that does not look is told by the broker.
        owner = queue.client.who
        block = BlockRef(Extent(slab_name(owner, 1), 1 << 20, 1 << 18), 1, ("tokens",))
        with pytest.raises(Refused, match=r"a sample has 262144 bytes, max_sample_bytes is 100000"):
            await queue.client.api.put_groups(100, [BlockPut(block, [RowPut(SampleKey(0, 0), 0)])], [1], 0.0)


async def test_tasks_and_batches_that_are_not_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as queue:
        with pytest.raises(Refused, match=r"task 'jugde' .*: tasks are judge, train \(did you mean 'judge'\?\)"):
            await queue.lease("jugde", samples=1)
        with pytest.raises(Refused, match="neither samples nor groups"):
            await queue.lease("train")
        for samples in (-1, 2**63, 2**64 - 1):
            with pytest.raises(Refused, match=r"QueueApi\.lease: Expected `int` [<>]= "):
                await queue.lease("train", samples=samples)
        await queue.put([row()])
        batch = await queue.lease("train", samples=1, wait_s=5)
        with pytest.raises(Refused, match=r"column 'reward' of sample 1\.0: it has tokens"):
            batch.samples[0]["reward"]
        with pytest.raises(Refused, match=r"sample 7\.0 is not part of it"):
            await queue.complete(batch, failures=[Failure(SampleKey(7, 0), "broken")])


async def test_memory_that_does_not_hold_what_was_said(tmp_path: Path) -> None:
    """Whoever puts may lie; whoever reads is told what is wrong, and can say that the sample failed."""
    async with serving(tmp_path) as queue, TransferQueue.connect(tmp_path / "queue") as liar:
        await liar.put([{"tokens": np.arange(5000, dtype=np.int32)}])
        (slab,) = liar.client.arena._slabs.values()
        nowhere = slab_name(liar.client.who, 9)
        lies = [
            (BlockRef(None, 1, ("tokens",), b"RLXB" + b"\xff" * 60), "not a block of ours"),
            (BlockRef(None, 1, ("tokens",), b"short"), "a block's header alone has"),
            (BlockRef(Extent(nowhere, 0, 4096), 1, ("tokens",)), "No such file"),
            (BlockRef(Extent(slab.name, 1 << 40, 4096), 1, ("tokens",)), "end beyond the slab's"),
            (BlockRef(Extent(slab.name, 1 << 20, 64), 1, ("tokens",)), "not a block of ours"),
        ]
        for seq, (block, _) in enumerate(lies, 1000):
            await liar.client.api.put_groups(seq, [BlockPut(block, [RowPut(SampleKey(0, 0), 0)])], [1], 0.0)
        batch = await queue.lease("train", samples=10, wait_s=5)
        assert len(batch) == 6
        failures = []
        for (_, why), sample in zip(lies, batch.samples[1:], strict=True):
            with pytest.raises(Corrupt, match=why) as caught:
                sample["tokens"]
            failures.append(Failure(sample.key, str(caught.value)))
        # The honest one is overwritten now: offsets and lengths beyond the memory, 2^63, negative ones.
        reader, ref = queue.client.reader, batch.refs[0]
        before = bytes(slab.memory[:512])
        at, wrong = before.index(b"tokens"), 0
        for junk in (b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x80" + b"\x00" * 7, struct.pack(">Q", 1 << 40)):
            for offset in range(0, at + 40, 3):
                slab.memory[offset : offset + 8] = np.frombuffer(junk, np.uint8)
                try:
                    reader.block(ref).value("tokens", 0)
                except Corrupt:
                    wrong += 1
                slab.memory[:512] = np.frombuffer(before, np.uint8)
        assert wrong > 50
        assert batch.samples[0]["tokens"].sum() == 4999 * 2500
        await queue.complete(batch, failures=failures)
        batch = await queue.lease("judge", samples=10, wait_s=5)
        assert len(batch) == 1
        await queue.complete(batch)


async def talk(path: str, *messages: bytes) -> bytes:
    """What a stranger hears who sends these bytes and nothing more."""
    reader, writer = await asyncio.open_unix_connection(path)
    with contextlib.suppress(ConnectionError):
        for message in messages:
            writer.write(message)
            await writer.drain()
        writer.write_eof()
    heard = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(120):
            heard = await reader.read(1 << 20)
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return heard


def hello(run_id: str = RUN_ID, **changes: Any) -> bytes:
    known = msgspec.to_builtins(rpc.make_hello(run_id, Incarnation("stranger/0", 1)))
    return encode_frame(msgspec.msgpack.encode({**known, "max_message_bytes": 1, "max_inflight": 1, **changes}))


def request(method: str, *args: Any, timeout_s: float = 5.0) -> bytes:
    raw = msgspec.Raw(msgspec.msgpack.encode(args))
    return encode_frame(wire.encode_message(RequestFrame(1, "QueueApi", method, timeout_s, raw)))


async def test_hostile_bytes_on_the_brokers_socket(tmp_path: Path) -> None:
    async with serving(tmp_path) as queue:
        path = str(queue.host.folder / "queue.sock")  # type: ignore[union-attr]
        dice = random.Random(5)
        greeting = await talk(path, hello())
        assert len(greeting) > 20
        rude = [
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\xff\xff\xff\xff",
            struct.pack("<I", 2**31) + b"x" * 100,
            struct.pack("<I", 0),
            struct.pack("<I", 10) + b"x" * 5,
            struct.pack("<I", 10) + b"\xc1" * 10,
            hello()[:-3],
            *(dice.randbytes(dice.randint(1, 200)) for _ in range(30)),
        ]
        for data in rude:
            assert await talk(path, data) in (b"", greeting)
        for other in (hello("another-run"), hello(protocol=99), hello(protocol=-1), hello(who=["x", 2**63])):
            await talk(path, other)
            assert await talk(path, other + request("account")) in (b"", greeting)
        for data in [
            b"\xff\xff\xff\xff",
            struct.pack("<I", 1 << 20),
            encode_frame(b"\xc1"),
            encode_frame(msgspec.msgpack.encode([99, 1, 2, 3])),
            encode_frame(msgspec.msgpack.encode([1, -1, "QueueApi", "lease", float("nan"), []])),
            *(encode_frame(dice.randbytes(dice.randint(0, 100))) for _ in range(30)),
        ]:
            await talk(path, hello(), data)
        # Arguments that are not what they should be are answered.
        for data in [
            request("lease", 2**63, "train", [1], 0.0),
            request("lease", 1, "train", [2**63], 0.0),
            request("lease", 1, "train", [1], "soon"),
            request("lease", 1),
            request("put_groups", 1, [[[["a-1-1.slab", -1, 5], 1, ["x"]], []]], [1], 0.0),
            request("join", "x" * 300, "node", 1, ""),
            request("join", "../../etc", "node", 1, ""),
            request("nonsense", 1),
        ]:
            heard = await talk(path, hello(max_message_bytes=1 << 20, max_inflight=8), data)
            fault = msgspec.msgpack.decode(heard[len(greeting) + 4 :])
            assert fault[0] == 5 and fault[2][0].startswith("relax_rt.transport.rpc.errors:Refused"), fault
        # One whose duration is no number is as one that is too late.
        await talk(path, hello(), request("lease", 1, "train", [1], float("nan"), timeout_s=float("nan")))
        assert queue.host is not None and queue.host._server is not None
        numbers = queue.host._server.statistics()
        assert numbers.protocol_errors > 40 and numbers.connections <= 2


async def test_a_name_that_was_taken_by_a_newer_process(tmp_path: Path) -> None:
    async with serving(tmp_path) as queue:
        folder = queue.host.folder  # type: ignore[union-attr]
        async with TransferQueue.connect(folder, name="reader/0") as older:
            await older.put([row()])
            batch = await older.lease("train", samples=1, wait_s=5)
            async with TransferQueue.connect(folder, name="reader/0") as newer:
                assert newer.client.who.epoch > older.client.who.epoch
                with pytest.raises(StaleEpoch, match=r"call of reader/0#\d+: the slot's epoch is \d+ or higher"):
                    await older.put([row()])
                with pytest.raises(StaleEpoch):
                    await older.lease("train", samples=1)
                with pytest.raises(StaleEpoch):
                    await older.complete(batch)
                again = await newer.lease("train", samples=1, wait_s=5)
                assert again.keys == batch.keys
                await newer.complete(again)
        for name in ("spill/0", "no slash", "a/b/c d", "x" * 250 + "/0", "../x/0"):
            with pytest.raises(Refused, match="joining as"):
                async with TransferQueue.connect(folder, name=name):
                    pass


async def test_two_hosts_of_one_folder(tmp_path: Path) -> None:
    async with serving(tmp_path) as queue:
        folder = queue.host.folder  # type: ignore[union-attr]
        with pytest.raises(Refused, match=r"hosting the queue in .*: another process does \(connect to it instead\)"):
            async with TransferQueue.serve(folder, TASKS):
                pass
        command = [sys.executable, "-m", "relax_rt.transport.queue", str(folder), "--task", "train=tokens"]
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 2 and done.stdout == "" and "another process does" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tasks": {}}, "no consumer task is named"),
        ({"tasks": {"train": "tokens"}}, "give a list of field names"),
        ({"fields": {"tokens": "int23[*]"}}, "did you mean int32"),
        ({"fields": {"reward": "float32"}}, "task 'judge' needs tokens|task 'train' needs tokens"),
        ({"samplers": {"train": "fifoo"}}, "did you mean 'fifo'"),
        ({"samplers": {"train": "no.such.module:Sampler"}}, "no.such.module"),
        ({"samplers": {"trian": "fifo"}}, "a sampler is set for 'trian'"),
        ({"listen": "tcp://nowhere"}, "no host and port"),
        ({"listen": "tcp://256.0.0.1:0"}, "256.0.0.1"),
    ],
)
async def test_settings_that_cannot_work(tmp_path: Path, settings: dict[str, Any], why: str) -> None:
    folder = tmp_path / "queue"
    with pytest.raises(RelaxError, match=why):
        async with TransferQueue.serve(folder, **{"tasks": TASKS, **settings}):
            pass
    memory = folder / "memory"
    assert not memory.exists() or not (SHM_ROOT / f"{SHM_PREFIX}{memory.read_text()}").exists()
    async with serving(tmp_path):
        pass


async def test_a_journal_of_another_version(tmp_path: Path) -> None:
    folder = tmp_path / "queue"
    async with serving(tmp_path):
        pass
    (segment,) = (folder / "journal").glob("segment-*.log")
    good = segment.read_bytes()
    for data, why in [
        (good[:7] + b"\1" + good[8:], "it is of version 1, this process reads 2 .relax-rt 0.1 wrote version 1"),
        (b"SQLite format 3\0" + good, "it does not begin as one"),
    ]:
        segment.write_bytes(data)
        with pytest.raises(Corrupt, match=why):
            async with TransferQueue.serve(folder, TASKS):
                pass
    segment.write_bytes(good)
    snapshot = msgspec.msgpack.encode({"n": 1, "groups": "none"})
    frame = struct.pack("<II", len(snapshot), zlib.crc32(snapshot)) + snapshot
    last = folder / "journal" / "snapshot-1.bin"
    last.write_bytes(frame)
    with pytest.raises(Corrupt, match=r"journal snapshot 1: .*\(was it written by another version of relax-rt\?\)"):
        async with TransferQueue.serve(folder, TASKS):
            pass
    last.unlink()
    with pytest.raises(Refused, match=r"with durable=True: its payloads lie in shared memory"):
        async with TransferQueue.serve(folder, TASKS, durable=True):
            pass
    async with serving(tmp_path):
        pass


async def test_a_folder_without_a_broker(tmp_path: Path) -> None:
    folder = tmp_path / "queue"

    async def enter(where: Path | str, **settings: Any) -> None:
        async with TransferQueue.connect(where, patience_s=0.2, **settings):
            pass

    with pytest.raises(Unreachable, match=r"queue .*: no broker serves it, after 0\.2 s \(start one with `python -m"):
        await enter(folder)
    async with serving(tmp_path):
        place = (folder / "queue.json").read_bytes()
    # As after kill -9: the way there is known, and nobody is at its end.
    (folder / "queue.json").write_bytes(place)
    with pytest.raises(Unreachable, match=r"queue .*: call of QueueApi\.join .* not connected for"):
        await enter(folder)
    (folder / "queue.json").write_bytes(b"{")
    with pytest.raises(Corrupt, match=r"queue\.json"):
        await enter(folder)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(Refused, match="it is a file, not the folder of a queue"):
        await enter(tmp_path / "file")
    # One that comes meanwhile is found.
    (folder / "queue.json").unlink()
    connected = TransferQueue.connect(folder, patience_s=30)
    entering = asyncio.create_task(connected.__aenter__())
    await asyncio.sleep(0.1)
    async with serving(tmp_path):
        await entering
        await connected.__aexit__()


async def test_keys_and_addresses(tmp_path: Path) -> None:
    async with serving(tmp_path, listen="tcp://127.0.0.1:0") as queue:
        assert queue.host is not None and queue.host.location is not None
        address, keys = queue.host.location.addresses[1], queue.host.folder / "keys.json"
        assert keys.stat().st_mode & 0o777 == 0o600

        async def enter(where: str, **settings: Any) -> None:
            async with TransferQueue.connect(where, patience_s=3.0, **settings) as other:
                await other.put([row()])

        # On the same node memory is shared, whatever the address.
        await enter(address, keys=keys)
        with pytest.raises(Refused, match="no keys were given"):
            await enter(address)
        with pytest.raises(Refused, match="there is no such file"):
            await enter(address, keys=tmp_path / "nowhere.json")
        bad = tmp_path / "bad.json"
        bad.write_bytes(b'{"public": 1}')
        with pytest.raises(Corrupt, match=r"keys .*bad\.json"):
            await enter(address, keys=bad)
        bad.write_bytes(b'{"public": "short", "secret": "short"}')
        with pytest.raises(Refused, match="CURVE public key: it has 5 bytes, not 40"):
            await enter(address, keys=bad)
        other = rpc.CurveKeys.make()
        bad.write_bytes(msgspec.json.encode(QueueKeys(other.public.decode(), other.secret.decode())))
        with pytest.raises(Unreachable, match=r"queue tcp://127\.0\.0\.1.*do the keys fit\?"):
            await enter(address, keys=bad)
        own = QueueKeys(**msgspec.json.decode(keys.read_bytes()))
        forged = rpc.CurveKeys(other.public, other.secret, server=own.public.encode())
        client = rpc.RpcClient(address, rpc.make_hello(RUN_ID, Incarnation("stranger/0", 1)), curve=forged)
        with pytest.raises((Unreachable, ProtocolError)):
            await client.bind(QueueApi, timeout_s=1.0).account()
        await client.close()
        for where in ("tcp://", "tcp://host", "http://x:1", "unix://relative"):
            with pytest.raises(RelaxError, match="address"):
                await enter(where, keys=keys)
        assert (await queue.client.api.account())["ready"] == 1


async def test_a_policy_without_offers(tmp_path: Path) -> None:
    policy = LedgerPolicy(tasks={"train": ("tokens",)}, group_size=2, prompts_per_step=1)
    async with TransferQueue.serve(tmp_path / "queue", policy=policy) as queue:
        with pytest.raises(Refused, match=r"this queue admits groups of prompts \(ask for tickets"):
            await queue.put([row()])
        assert (await queue.statistics())["client"]
    shutil.rmtree(tmp_path / "queue")
    with pytest.raises(Refused, match="it was entered before"):
        async with TransferQueue.serve(tmp_path / "queue", TASKS) as queue, queue:
            pass
    with pytest.raises(Refused, match="it was not entered"):
        await TransferQueue.connect(tmp_path).put([row()])
