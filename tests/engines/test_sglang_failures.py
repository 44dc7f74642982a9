"""A real SGLang server that dies, hangs, or holds other weights than it reported; weights in requests, by handles."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from conformance import ENDLESS
from harness import Driver, Traits, torch, transformers
from sglang_parts import PYTHON, make_engine, needs_server

from relax_rt.process import guard, procfs
from relax_rt.roles.rollout.engines.base import EngineEnded
from relax_rt.roles.rollout.engines.sglang.client import SglangClient
from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
from relax_rt.roles.rollout.engines.sglang.options import option_names
from relax_rt.roles.rollout.engines.sglang.server import ServerDied
from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, RelaxError

pytestmark = [pytest.mark.engines, needs_server]


@pytest.fixture(scope="module")
def odd_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that the server pads, a head of its own, and tensors that leave gaps in the published layout."""
    torch.manual_seed(1)
    config = transformers.Qwen3Config(
        vocab_size=100,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    folder = tmp_path_factory.mktemp("odd")
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


@asynccontextmanager
async def running(model: Path, folder: Path, **table: Any) -> AsyncIterator[Driver]:
    """An engine at version 1. Afterwards nothing of its server is left."""
    before = shared_memory()
    engine = make_engine(model, folder, **table)
    driver = Driver(engine, model, Traits())
    try:
        await driver.start()
        pids = procfs.descendants(engine._server.pid)
        assert len(pids) >= 2, "the server and its scheduler"
        await publish(driver, "recompute")
        yield driver
    finally:
        await engine.close(10.0)
    assert not [pid for pid in pids if alive(pid)]
    assert not (folder / "tmp").exists()
    await nothing_shared_since(before)


def shared_memory() -> dict[str, tuple[int, int]]:
    """What has names as a server gives them; others on this machine give such names, too."""
    found = {}
    for path in guard.SHM_ROOT.iterdir():
        with suppress(OSError):
            status = path.stat()
            if path.name.startswith((*guard.SHM_PREFIXES, "sglang")) and status.st_uid == os.getuid():
                found[path.name] = status.st_dev, status.st_ino
    return found


def left_since(before: Collection[str]) -> list[str]:
    """Names that are new and that no living process has mapped: what others make meanwhile is in their use."""
    new = {name: segment for name, segment in shared_memory().items() if name not in before}
    used = set[tuple[int, int]]().union(*map(guard.mapped_segments, procfs.pids())) if new else set()
    return sorted(name for name, segment in new.items() if segment not in used)


async def nothing_shared_since(before: Collection[str]) -> None:
    end = time.monotonic() + 120
    while left := left_since(before):
        assert time.monotonic() < end, f"left behind in shared memory: {left}"
        await asyncio.sleep(0.1)


def alive(pid: int) -> bool:
    fields = procfs.stat_fields(pid)
    return fields is not None and fields[0] not in "ZX"


async def publish(driver: Driver, kv: Any) -> int:
    source = driver.source()
    await driver.engine.prepare(source)
    await driver.engine.commit(source.record, kv)
    return driver.version


def is_out(driver: Driver, kind: type[Exception]) -> BaseException:
    """The engine said why, and takes nothing more."""
    assert isinstance(driver.failure, kind), driver.failure
    with pytest.raises(EngineEnded):
        driver.engine.submit([driver.request([1], 1)])
    return driver.failure


def scheduler_of(engine: SglangEngine) -> int:
    for pid in procfs.descendants(engine._server.pid):
        if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no scheduler among the server's processes")


async def test_weights_sent_as_tensors_and_a_server_that_hangs(
    conformance_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("a")
    async with running(conformance_model, folder, weights="tensor", stall_timeout_s=15.0) as driver:
        asked = driver.request(range(10, 30), 4, new=200, stop_ids=ENDLESS)
        driver.submit(asked)
        await driver.tokens(40)
        began = driver.version
        version = await publish(driver, "recompute")
        for completion in await driver.finished(asked):
            assert [s.version for s in completion.versions] == [began, version]
            driver.check(asked, completion)

        assert isinstance(driver.engine, SglangEngine)
        driver.submit(driver.request([1], 2, new=400, stop_ids=ENDLESS))
        await driver.tokens(10)
        os.kill(scheduler_of(driver.engine), signal.SIGSTOP)
        await wait_for(lambda: driver.failure is not None)
        error = is_out(driver, DeadlineExceeded)
        assert "2 sequences running" in str(error) and "server.log" in str(error)


async def test_weights_by_handles_and_by_the_file_if_these_are_refused(
    conformance_model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told, asked_for = tmp_path_factory.mktemp("h"), list[tuple[int, str]](), list[tuple[str, int]]()
    call = SglangClient.call

    async def noted(self: SglangClient, path: str, body: Any = None, *, timeout_s: float) -> dict[str, Any]:
        asked_for.append((path, len(str(body))))
        return await call(self, path, body, timeout_s=timeout_s)

    monkeypatch.setattr(SglangClient, "call", noted)

    def updates() -> list[str]:
        paths = [path for path, _ in asked_for if path.startswith("/update_weights_from")]
        asked_for.clear()
        return paths

    def not_shown(version: int, why: str) -> None:
        told.append((version, why))

    async with running(conformance_model, folder, weights="handles", on_file_fallback=not_shown) as driver:
        began = driver.version
        asked = driver.request(range(10, 30), 4, new=200, stop_ids=ENDLESS)
        driver.submit(asked)
        await driver.tokens(40)
        shown = driver.source()
        await driver.engine.prepare(shown)
        await driver.engine.commit(shown.record, "recompute")
        assert max(size for path, size in asked_for if "tensor" in path) < len(shown.data) / 4, "no bytes of weights"
        assert updates() == ["/update_weights_from_tensor"] * 2 and not told
        # What the server was shown is written over by the next fetch: it must have copied it.
        unused = driver.source()
        await driver.engine.prepare(unused)
        for completion in await driver.finished(asked):
            assert [s.version for s in completion.versions] == [began, shown.record.version]
            driver.check(asked, completion)
        whole = driver.request([7, 8, 9], 3, new=40)
        for completion in await driver.complete(whole):
            assert {s.version for s in completion.versions} == {shown.record.version}
            driver.check(whole, completion)

        assert isinstance(driver.engine, SglangEngine)
        client = driver.engine._server.client
        await client.call("/begin_weight_update", {}, timeout_s=30.0)
        third = await publish(driver, "recompute")
        assert updates() == ["/update_weights_from_disk"]
        ((version, why),) = told
        assert version == third and "already open" in why
        await client.call("/end_weight_update", {}, timeout_s=30.0)
        await publish(driver, "recompute")
        assert updates() == ["/update_weights_from_disk"] and len(told) == 1
        for completion in await driver.complete(whole := driver.request([7, 8, 9], 3, new=40)):
            driver.check(whole, completion)

        # Handles of nothing end the server; a successor is to find that out before it tries again.
        driver.engine._loader._use_handles = True
        await driver.engine.prepare(source := driver.source())
        (folder / "weights/model.safetensors").rename(folder / "elsewhere")
        with pytest.raises(RelaxError):
            await driver.engine.commit(source.record, "recompute")
        is_out(driver, RelaxError)
        assert len(told) == 1 and (folder / "attempt").exists()


async def test_a_server_that_falsely_reports_a_load_ends_the_engine(
    odd_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with running(odd_model, tmp_path_factory.mktemp("b")) as driver:
        whole = driver.request([7, 8, 9], 3, new=40)
        for completion in await driver.complete(whole):
            driver.check(whole, completion)
        asked = driver.request([1, 2], 2, new=400, stop_ids=ENDLESS)
        driver.submit(asked)
        await driver.tokens(10)
        source = driver.source()
        await driver.engine.prepare(source)
        # The bytes change between our verification and the server's read, which answers 200.
        path = tmp_path_of(driver) / "weights/model.safetensors"
        with path.open("r+b") as file:
            file.seek(-100, os.SEEK_END)
            file.write(b"\x3f")
        before = driver.version
        with pytest.raises(Corrupt, match="are not what was published"):
            await driver.engine.commit(source.record, "recompute")
        is_out(driver, Corrupt)
        assert driver.version == before
        told = [span.version for chunk in driver.chunks for span in chunk.versions]
        assert source.record.version not in told, "nothing was sampled from what is not whole"


async def test_a_server_that_dies_in_mid_generation_is_reported_with_its_last_lines(
    conformance_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    async with running(conformance_model, tmp_path_factory.mktemp("c")) as driver:
        assert isinstance(driver.engine, SglangEngine)
        asked = driver.request([1, 2], 3, new=400, stop_ids=ENDLESS, chunk_tokens=8)
        driver.submit(asked)
        await driver.tokens(60)
        os.kill(scheduler_of(driver.engine), signal.SIGKILL)
        await wait_for(lambda: driver.failure is not None)
        assert str(driver.failure).startswith("the SGLang server ended: its scheduler_0 was killed by SIGKILL")
        is_out(driver, ServerDied)
        told = sum(len(chunk.tokens) for chunk in driver.chunks if chunk.request == asked.id)
        assert told >= 3 * 8, "what had come until then was told"


ROLE = """
import asyncio, sys, threading
sys.path.insert(0, {tests!r})
from pathlib import Path
from sglang_parts import make_engine

async def main():
    engine = make_engine(Path({model!r}), Path({folder!r}))
    await engine.start(lambda chunks: None, lambda error: None)
    print(engine._server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


async def test_nothing_outlives_a_role_that_is_killed(
    conformance_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    before, folder = shared_memory(), tmp_path_factory.mktemp("d")
    code = ROLE.format(tests=str(Path(__file__).parent), model=str(conformance_model), folder=str(folder))
    role = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
    assert role.stdout is not None
    try:
        server = int(await asyncio.wait_for(role.stdout.readline(), 450.0))
        pids = procfs.descendants(server) | {server}
        assert len(pids) >= 3
    finally:
        role.kill()
        await role.wait()
    await wait_for(lambda: not any(map(alive, pids)))
    await nothing_shared_since(before)


async def test_a_server_without_its_model_is_reported(
    tmp_path: Path, conformance_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its own words on what is wrong with the model folder are in the error."""
    broken = Path(shutil.copytree(conformance_model, tmp_path / "model"))
    config = broken / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForCausalLM", "Qwen3ForNobody"))
    engine = make_engine(broken, tmp_path_factory.mktemp("e"), python=str(PYTHON))
    with pytest.raises(ServerDied, match="Qwen3ForNobody"):
        await engine.start(lambda _: None, lambda _: None)
    await engine.close(5.0)


async def test_an_interpreter_lists_the_options_of_its_sglang() -> None:
    names = await asyncio.to_thread(option_names, str(PYTHON), "cpu")
    assert names is not None and {"attention-backend", "mem-fraction-static", "tp-size"} <= names


def tmp_path_of(driver: Driver) -> Path:
    assert isinstance(driver.engine, SglangEngine)
    return driver.engine.weights_folder.parent


async def wait_for(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 what it looks at tells nobody
            await asyncio.sleep(0.05)
