"""The engine over a fake server: requested and unrequested ends, failures, pauses, swaps and memory."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from relax_rt.roles.rollout.engines.base import Chunk, EngineEnded, GroupRequest
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.rollout.engines.sglang import engine as engines
from relax_rt.roles.rollout.engines.sglang.client import (
    Meta,
    SequenceEnd,
    ServerLimits,
    ServerRefused,
    SglangClient,
    StreamEvent,
)
from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
from relax_rt.roles.rollout.engines.sglang.requests import server_seed
from relax_rt.roles.rollout.engines.sglang.server import ServerDied, ServerSpec
from relax_rt.roles.rollout.engines.sglang.weights import content_hash
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, ProtocolError, Refused, RelaxError, Unreachable
from relax_rt.transport.weights.manifest import Manifest, layout_of

CONTEXT = 64
INFO = {
    "max_req_input_len": CONTEXT,
    "max_total_num_tokens": 200,
    "page_size": 4,
    "internal_states": [{"effective_max_running_requests_per_dp": 3}],
}


def arrays(version: int) -> dict[str, np.ndarray]:
    return {"a.weight": np.full((4, 4), version, np.float32), "b.weight": np.full((3,), version, np.float32)}


class Source:
    """A version whose fetch may be held up."""

    def __init__(self, version: int, gate: threading.Event | None = None) -> None:
        data = arrays(version)
        layout = layout_of((name, "float32", array.shape, array.nbytes) for name, array in data.items())
        self.manifest, self.record = Manifest(version, 1, "", layout, (), ""), VersionRecord(version, 0, 0)
        self._data, self._gate, self.begun = data, gate, threading.Event()

    def copy_into(self, into: memoryview) -> None:
        self.begun.set()
        part = into[:4]
        if self._gate is not None:
            assert self._gate.wait(120.0)
        part[:] = bytes(4)
        for entry in self.manifest.layout.entries:
            into[entry.offset : entry.offset + entry.nbytes] = self._data[entry.name].tobytes()

    def mapped(self) -> Any:
        raise NotImplementedError


class FakeClient(SglangClient):
    """The server's endpoints: one queue of events for each segment, weights that are a version's, memory."""

    url = "http://fake"

    def __init__(self, model: Path) -> None:
        self.model, self.holds = model, 0
        self.queues: dict[str, asyncio.Queue[StreamEvent | None]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.obeys = True

    async def call(self, path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
        self.calls.append((path, body))
        match path:
            case "/server_info":
                return INFO
            case "/weights_checker":
                sums = {
                    name: content_hash([memoryview(a.tobytes())], 0, "cpu") for name, a in arrays(self.holds).items()
                }
                return {"ranks": [{"checksums": sums}]}
            case "/update_weights_from_disk":
                folder = Path(body["model_path"])
                if not (folder / "model.safetensors").exists():
                    raise ServerRefused(path, why="nothing is there")
                self.holds = 0 if folder == self.model else int(body["weight_version"])
            case "/release_memory_occupation":
                self.holds = -7
            case "/abort_request" if self.obeys:
                for rid in list(self.queues) if body.get("abort_all") else [body["rid"]]:
                    self.say(rid, end="abort")
        return {}

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[StreamEvent]:
        running = list(body["rid"])
        queue: asyncio.Queue[StreamEvent | None] = asyncio.Queue()
        self.queues |= dict.fromkeys(running, queue)
        while running:
            event = await queue.get()
            if event is None:
                return
            assert event.meta_info is not None
            if event.meta_info.finish_reason is not None:
                running.remove(event.meta_info.id)
                self.queues.pop(event.meta_info.id, None)
            yield event

    async def close(self) -> None:
        pass

    def say(self, rid: str, tokens: tuple[int, ...] = (), upto: int = 0, end: str = "", message: str = "") -> None:
        """`tokens` of a segment, the last of them its `upto`-th."""
        probable = [(-1.0, token, None) for token in tokens]
        finish = SequenceEnd(end, message) if end else None
        meta = Meta(rid, finish, upto or len(tokens), 1, output_token_logprobs=probable)
        self.queues[rid].put_nowait(StreamEvent(list(tokens), meta))

    @property
    def rid(self) -> str:
        (one,) = self.queues
        return one


class FakeServer:
    pid = 0
    crash: ServerDied | None = None

    def __init__(self, client: FakeClient) -> None:
        self.client = client

    async def start(self, timeout_s: float) -> None:
        pass

    async def stop(self, timeout_s: float = 10.0) -> None:
        pass

    def explain(self, error: RelaxError) -> RelaxError:
        return type(error)(error.what, why=f"{error.why}; a fake", hint=error.hint)

    def crashed(self) -> ServerDied | None:
        return self.crash

    async def wait_for_exit(self, within_s: float = 1.0) -> None:
        pass


class Rig:
    """A started engine, what it told, and why it is out."""

    def __init__(self, folder: Path, **table: Any) -> None:
        model = folder / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps({"max_position_embeddings": CONTEXT, "vocab_size": 100}))
        save_file(arrays(0), model / "model.safetensors")
        settings = EngineSettings.model_validate({"engine": "sglang", "dtype": "float32", "sglang": table})
        place = ServerSpec(python="", folder=folder / "run/tmp", log=folder / "log", environment={})
        weights = folder / "run/weights"
        self.engine = SglangEngine(
            model, settings, place, lambda *_, **__: {}, device="cpu", weights_folder=weights, kv_tokens=9
        )
        self.client = FakeClient(model)
        self.engine._server = FakeServer(self.client)  # type: ignore[assignment]
        self.chunks: list[Chunk] = []
        self.failure: BaseException | None = None

    def sink(self, chunks: list[Chunk]) -> None:
        self.chunks += chunks

    def fail(self, error: BaseException) -> None:
        assert self.failure is None
        self.failure = error

    async def begin(self, members: int = 1, new: int = 10, **rest: Any) -> GroupRequest:
        """A request whose segments run."""
        values: dict[str, Any] = {"id": 1, "prompt": (1, 2, 3), "temperature": 1.0, "stop_ids": frozenset([9])}
        request = GroupRequest(max_new_tokens=new, seeds=tuple(range(members)), **(values | rest))
        self.engine.submit([request])
        await until(lambda: bool(self.client.queues))
        return request

    async def publish(self, version: int) -> None:
        source = Source(version)
        await self.engine.prepare(source)
        await self.engine.commit(source.record, "keep")


@asynccontextmanager
async def rig(folder: Path, **table: Any) -> AsyncIterator[Rig]:
    one = Rig(folder, **table)
    one.engine._first_token = lambda timeout_s: asyncio.sleep(0)  # type: ignore[method-assign]
    await one.engine.start(one.sink, one.fail)
    try:
        yield one
    finally:
        await one.engine.close(2.0)
    assert not (folder / "run").exists(), "a copy of the weights is left"


async def until(condition: Callable[[], bool], limit_s: float = 120) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 what it looks at tells nobody
            await asyncio.sleep(0.005)


async def test_requests_are_bounded_by_the_servers_limits(tmp_path: Path) -> None:
    assert await FakeClient(tmp_path).limits(1.0) == ServerLimits(longest=64, kv_tokens=200, running=3)
    narrow = FakeClient(tmp_path)
    narrow.call = lambda *_, **__: asyncio.sleep(0, INFO | {"max_total_num_tokens": 40})  # type: ignore[assignment]
    assert (await narrow.limits(1.0)).longest == 32
    narrow.call = lambda *_, **__: asyncio.sleep(0, {"page_size": 1})  # type: ignore[assignment]
    with pytest.raises(ProtocolError, match="its limits"):
        await narrow.limits(1.0)
    async with rig(tmp_path) as one:
        one.engine._limits = ServerLimits(longest=20, kv_tokens=200, running=3)
        with pytest.raises(Refused, match="this server takes 20 a sequence"):
            await one.begin(new=18)
        await one.begin(5, new=17)
        load = one.engine.load()
        assert (load.running, load.waiting) == (3, 2), "the server decodes three at a time"
        assert load.kv_used == 3 * 3 / 200


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"end": "abort", "message": "Input length exceeds"}, r"ended it \(abort\) at 0 of 10 .*Input length exceeds"),
        ({"end": "length"}, r"ended it \(length\) at 0 of 10"),
        ({"tokens": (4, 5), "end": "length"}, r"ended it \(length\) at 2 of 10"),
        ({"end": "stop"}, r"ended it \(stop\) at 0 of 10"),
    ],
)
async def test_an_unrequested_end_is_an_error(tmp_path: Path, said: dict[str, Any], why: str) -> None:
    async with rig(tmp_path) as one:
        await one.begin()
        one.client.say(one.client.rid, **said)
        await until(lambda: one.failure is not None)
        assert isinstance(one.failure, ServerRefused)
        with pytest.raises(ServerRefused, match=why):
            raise one.failure
        with pytest.raises(EngineEnded):
            one.engine.submit([])


async def test_a_requested_end_is_no_error(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        await one.begin()
        one.client.say(one.client.rid, (4,))
        await one.engine.pause("a look")
        await one.engine.resume()
        await until(lambda: bool(one.client.queues))
        one.client.say(one.client.rid, (2,), end="stop")  # ends sequences of the model, not of the request
        await until(lambda: one.engine.load().tokens_generated == 2 and bool(one.client.queues))
        one.engine.abort(1)
        await until(lambda: bool(one.chunks) and one.chunks[-1].finish_reason == "abort")
        assert [t for c in one.chunks for t in c.tokens] == [4, 2]
        assert one.failure is None


async def test_a_sink_that_fails_ends_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:

        def refuse(_: list[Chunk]) -> None:
            raise KeyError("lost")

        one.engine._sink = refuse
        await one.begin(new=1)
        one.client.say(one.client.rid, (9,), end="stop")
        await until(lambda: isinstance(one.failure, KeyError))


async def test_an_unexpected_error_ends_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        one.client.generate = lambda body: 1 / 0  # type: ignore[assignment, return-value, method-assign]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await one.begin()
        await until(lambda: isinstance(one.failure, ZeroDivisionError))


async def test_a_silent_sequence_among_others_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "WATCH_EVERY_S", 0.02)
    async with rig(tmp_path) as one:
        await one.begin(2, new=50)
        silent, lively = one.client.queues
        one.client.say(silent, (4,))
        one.client.say(lively, (4,))
        await until(lambda: one.engine.load().tokens_generated == 2)
        assert one.failure is None
        one.engine._running[silent].progressed_at -= 91
        await until(lambda: one.failure is not None)
        assert isinstance(one.failure, DeadlineExceeded)
        assert "request 1, member 0" in str(one.failure) and "while others got some" in str(one.failure)


async def test_a_sequence_that_may_wait_for_room_has_more_time(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        await one.begin(2, new=50)
        silent, lively = one.engine._running.values()
        one.engine._progressed_at = lively.progressed_at = time.monotonic()
        lively.fresh, silent.progressed_at = False, lively.progressed_at - 2 * 90
        assert one.engine._stalled(lively.progressed_at) is None, "it has not begun"
        silent.fresh = False
        assert one.engine._stalled(lively.progressed_at) is not None
        one.engine._limits = ServerLimits(64, 100, 3)
        assert one.engine._stalled(lively.progressed_at) is None, "106 positions are needed, and 100 there"
        silent.progressed_at -= 900
        assert one.engine._stalled(lively.progressed_at) is not None
        assert one.engine._stalled(lively.progressed_at + 91) == (
            "a token of the SGLang server, with 2 sequences running",
            "none within 91 s",
        )


async def test_an_event_without_tokens_is_no_progress(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        await one.begin()
        before = one.engine._progressed_at
        one.client.say(one.client.rid)
        await asyncio.sleep(0.02)
        assert one.engine._progressed_at == before
        one.client.say(one.client.rid, (4,))
        await until(lambda: one.engine._progressed_at > before)
        (member,) = one.engine._running.values()
        assert member.progressed_at == one.engine._progressed_at


async def test_a_cancelled_fetch_keeps_the_lock_until_its_thread_ends(tmp_path: Path) -> None:
    gate = threading.Event()
    async with rig(tmp_path) as one:
        slow, next_one = Source(1, gate), Source(2)
        fetch = asyncio.create_task(one.engine.prepare(slow))
        await asyncio.to_thread(slow.begun.wait, 120)
        fetch.cancel()
        await asyncio.wait([fetch], timeout=60.0)
        assert fetch.cancelled(), "whoever waits is let go at once"
        later = asyncio.create_task(one.engine.prepare(next_one))
        await asyncio.sleep(0.05)
        assert not next_one.begun.is_set()
        gate.set()
        await later
        await one.engine.commit(next_one.record, "keep")
        assert one.engine.load().version == 2


async def test_closing_during_a_fetch_waits_at_most_its_timeout(tmp_path: Path) -> None:
    gate = threading.Event()
    async with rig(tmp_path) as one:
        slow = Source(1, gate)
        fetch = asyncio.create_task(one.engine.prepare(slow))
        await asyncio.to_thread(slow.begun.wait, 120)
        began = time.monotonic()
        await one.engine.close(0.2)
        assert 0.1 < time.monotonic() - began < 60.0
        gate.set()
        await asyncio.gather(fetch, return_exceptions=True)
        with pytest.raises(EngineEnded):
            await one.engine.prepare(Source(2))


async def test_an_idle_engine_notices_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "WATCH_EVERY_S", 0.02)
    async with rig(tmp_path) as one:
        one.engine._server.crash = ServerDied("the SGLang server ended", why="its scheduler_0")  # type: ignore[attr-defined]
        await until(lambda: one.failure is not None)
        assert isinstance(one.failure, ServerDied)


@pytest.mark.parametrize("work", ["swap", "pause"])
async def test_calls_of_a_dead_server_fail_with_its_cause(work: str, tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        await one.begin()
        source = Source(1)
        await one.engine.prepare(source)

        async def gone(path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
            raise Unreachable(f"{path} of the SGLang server", why="All connection attempts failed")

        async def wait_for_exit() -> None:
            one.engine._fail(ServerDied("the SGLang server ended", why="its scheduler_0 was killed by SIGKILL"))

        one.client.call = gone  # type: ignore[method-assign]
        one.engine._server.wait_for_exit = wait_for_exit  # type: ignore[method-assign,assignment]
        with pytest.raises(ServerDied, match=r"^the SGLang server ended: its scheduler_0 was killed by SIGKILL"):
            await (one.engine.commit(source.record, "keep") if work == "swap" else one.engine.pause("a look"))
        assert isinstance(one.failure, ServerDied)


async def test_a_cancelled_pause_leaves_the_engine_running(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        await one.begin()
        one.client.obeys = False
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await one.engine.pause("a look")
        assert one.engine.load().paused == ""
        one.client.say(one.client.rid, (4,), end="abort")  # too late
        await until(lambda: one.engine.load().tokens_generated == 1 and bool(one.client.queues))
        one.client.say(one.client.rid, (9,), end="stop")
        await until(lambda: bool(one.chunks))
        assert one.chunks[0].tokens == [4, 9]


async def test_a_pause_that_fails_ends_the_engine(tmp_path: Path) -> None:
    async with rig(tmp_path, update_timeout_s=0.05) as one:
        await one.begin()
        one.client.obeys = False
        with pytest.raises(DeadlineExceeded, match="running sequences"):
            await one.engine.pause("a look")
        assert isinstance(one.failure, DeadlineExceeded)


async def test_memory_is_resumed_with_the_same_weights(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        for version in (0, 3):
            if version:
                await one.publish(version)
            await one.engine.release_memory()
            await one.engine.release_memory()
            assert one.client.holds == -7
            with pytest.raises(Refused, match="released"):
                await one.engine.prepare(Source(version + 1))
            await one.engine.resume_memory()
            assert one.client.holds == version
        assert one.failure is None
        await one.engine.prepare(Source(4))
        with pytest.raises(Refused, match="could not get version 3 back"):
            await one.engine.release_memory()
        await one.publish(5)
        await one.engine.release_memory()
        await one.engine.resume_memory()
        assert one.client.holds == 5


async def test_initial_weights_that_are_not_restored_are_detected(tmp_path: Path) -> None:
    async with rig(tmp_path) as one:
        await one.engine.release_memory()
        save = one.client.call

        async def loads_nothing(path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
            return {} if path == "/update_weights_from_disk" else await save(path, body, timeout_s=timeout_s)

        one.client.call = loads_nothing  # type: ignore[method-assign]
        with pytest.raises(Corrupt):
            await one.engine.resume_memory()
        assert isinstance(one.failure, Corrupt)


def test_seeds_that_differ_in_the_highest_bit_stay_apart() -> None:
    seeds = [domain | seed for domain in (0, 1 << 63) for seed in (*range(500), (1 << 63) - 1)]
    sent = {server_seed(seed) for seed in seeds}
    assert len(sent) == len(seeds)
    assert min(sent) >= 0 and max(sent) < 1 << 63
