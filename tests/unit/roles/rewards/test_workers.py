"""Users' functions in worker processes: a call that hangs or exceeds a limit costs its sample and its process only."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from sandbox_leftovers import nothing_left, workers

from relax_rt.process.sandbox import probe
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest, Score
from relax_rt.roles.rewards.worker import FunctionSpec, RewardWorkerSetup
from relax_rt.roles.rewards.workers import RewardWorkers
from relax_rt.transport.rpc.errors import RelaxError

FUNCTIONS = """
import asyncio, ctypes, os, signal, subprocess, sys, time

def good(completion, answer):
    return {"right": float(completion == answer), "pid": float(os.getppid() > 0)}

def hangs(completion, answer):
    if completion == "hang":
        time.sleep(600)
    return 1.0

def holds_the_lock(completion, answer):
    import re
    re.match(r"(a|aa)+$", "a" * 60 + "b")

def forks(completion, answer):
    for _ in range(6):
        os.fork()
    time.sleep(600)

def slips_away(completion, answer):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(600)

def ignores(completion, answer):
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"])
    time.sleep(600)

def allocates(completion, answer):
    held = []
    while True:
        held.append(bytearray(16 << 20))

def prints(completion, answer):
    for _ in range(16):
        sys.stdout.write("x" * (1 << 20))
    return 1.0

def leaves(completion, answer):
    os._exit(7)

def crashes(completion, answer):
    ctypes.string_at(0)

def writes_on_all_descriptors(completion, answer):
    for fd in range(3, 64):
        try:
            os.write(fd, b"\\xff" * 64)
        except OSError:
            pass
    time.sleep(600)

def comes_back_twice(completion, answer):
    os.fork()
    return 1.0

async def waits(completion, answer):
    if completion == "block":
        time.sleep(600)
    if completion.startswith("begun "):
        open(completion.split(" ", 1)[1], "w").close()
    await asyncio.sleep(600 if completion.startswith(("slow", "begun")) else 0.01)
    return float(completion == answer)

def ranks(completions, answer, tokens):
    order = sorted(tokens)
    return [order.index(n) / len(tokens) + (c == "raise" and 1 / 0) for c, n in zip(completions, tokens)]
"""
NAMES = [line.split("(")[0].split()[-1] for line in FUNCTIONS.splitlines() if line.startswith(("def ", "async def "))]


@pytest.fixture
def word(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of all that the test starts."""
    word = secrets.token_hex(8)
    monkeypatch.setenv("RELAX_TEST_WORD", word)
    return word


async def made(
    folder: Path, word: str, level: str, timeout_s: float = 1.5, size: int = 1
) -> AsyncIterator[RewardWorkers]:
    """All functions in one pool."""
    (folder / "mine.py").write_text(FUNCTIONS)
    functions = [FunctionSpec(f"mine.py:{name}", group=name == "ranks") for name in NAMES]
    pool = RewardWorkers(RewardWorkerSetup(functions, str(folder), timeout_s), size, processes=24, memory_mib=512)
    pool.pool.level = level  # type: ignore[assignment]
    try:
        await pool.start()
        if level == "namespaces" and (await probe([sys.executable])).level == "namespaces":
            assert pool.pool.level == level, "programs get namespaces here, and workers do not"
        yield pool
    finally:
        await pool.close()
        nothing_left(word)


async def call(pool: RewardWorkers, name: str, *completions: str) -> list[Score | RewardFailed]:
    requests = [RewardRequest(text, "a", {"tokens": n}) for n, text in enumerate(completions)]
    return await pool.score(NAMES.index(name), requests)


def reason(result: Score | RewardFailed) -> str:
    assert isinstance(result, RewardFailed), result
    return result.reason


LATE = "did not return within reward.timeout_s = 1.5 s: its process was killed"
EXPECTED = {
    "hangs": LATE,
    "forks": f"more than 24 processes|{LATE}",
    "slips_away": LATE,
    "ignores": LATE,
    "allocates": f"took more than 512 MiB|{LATE}",
    "leaves": "its process ended: exit code 7",
    "crashes": "its process ended: signal 11",
    "writes_on_all_descriptors": "wrote to its socket",
}
FIRST = ["hangs", "forks", "slips_away", "leaves"]


@pytest.mark.parametrize(
    ("level", "names"),
    [
        ("namespaces", FIRST),
        pytest.param("namespaces", [name for name in EXPECTED if name not in FIRST], marks=pytest.mark.long),
        pytest.param("limits", ["forks", "slips_away", "ignores", "allocates"], marks=pytest.mark.long),
    ],
    ids=["namespaces", "the others", "limits"],
)
async def test_whatever_a_function_does_its_sample_fails_and_the_next_is_scored(
    tmp_path: Path, word: str, level: str, names: list[str]
) -> None:
    async for pool in made(tmp_path, word, level):
        for name in names:
            (result,) = await call(pool, name, "hang")
            assert any(one in reason(result) for one in EXPECTED[name].split("|")), (name, result)
            assert f"mine.py:{name}" in reason(result)
            (after,) = await call(pool, "good", "a")
            assert isinstance(after, Score) and after.components["right"] == 1.0, (name, after)
        assert len(workers(word)) == 1


@pytest_asyncio.fixture
async def usual(tmp_path: Path, word: str) -> AsyncIterator[RewardWorkers]:
    async for one in made(tmp_path, word, "namespaces", size=2):
        yield one


async def test_what_stands_before_and_behind_a_hanging_call_is_scored(usual: RewardWorkers) -> None:
    seen: list[int] = []
    requests = [RewardRequest(text, "a", {}) for text in ("a", "hang", "b", "c")]
    results = await usual.score(NAMES.index("hangs"), requests, lambda: seen.append(1))
    assert [isinstance(result, RewardFailed) for result in results] == [False, True, False, False]
    assert isinstance(results[1], RewardFailed) and results[1].excess and not results[1].stuck
    assert len(seen) == 4


async def test_a_pattern_that_holds_the_lock_is_killed_too(usual: RewardWorkers) -> None:
    (result,) = await call(usual, "holds_the_lock", "x")
    assert "its process was killed" in reason(result)


async def test_what_a_function_prints_is_bounded(capfd: pytest.CaptureFixture[str], tmp_path: Path, word: str) -> None:
    # Not by a fixture: what it inherits is to be what is looked at here.
    async for pool in made(tmp_path, word, "namespaces", timeout_s=10.0):
        (result,) = await call(pool, "prints", "x")
        assert isinstance(result, Score)
    assert 1000 < len(capfd.readouterr().err) < 2 << 20


async def test_a_child_that_comes_back_from_the_function_says_nothing(usual: RewardWorkers) -> None:
    for _ in range(3):
        assert await call(usual, "comes_back_twice", "x", "y") == [Score(1.0, {"reward": 1.0})] * 2


async def test_async_functions_run_together_and_time_out_apart(usual: RewardWorkers) -> None:
    one, slow, other = await call(usual, "waits", "a", "slow", "b")
    assert one == Score(1.0, {"reward": 1.0}) and other == Score(0.0, {"reward": 0.0})
    assert "did not return within" in reason(slow)
    results = await call(usual, "waits", "block", "a")
    assert all("its process was killed" in reason(result) for result in results)


async def test_a_group_is_scored_by_one_call_and_fails_as_one(usual: RewardWorkers) -> None:
    requests = [RewardRequest(str(n), "a", {"tokens": 10 - n}, group=n // 2) for n in range(4)]
    assert [r.total for r in await usual.score(NAMES.index("ranks"), requests) if isinstance(r, Score)] == [0.5, 0] * 2
    requests[0] = RewardRequest("raise", "a", {"tokens": 1})
    first, second, *others = await usual.score(NAMES.index("ranks"), requests)
    assert "ZeroDivisionError" in reason(first) and reason(first) == reason(second)
    assert all(isinstance(result, Score) for result in others)


async def test_a_worker_that_is_killed_from_outside_is_replaced(tmp_path: Path, word: str) -> None:
    # The call is not to be late before its process is found and killed.
    async for pool in made(tmp_path, word, "namespaces", timeout_s=30.0, size=2):
        # What was begun in it fails, and says how it ended.
        task = asyncio.create_task(call(pool, "waits", f"begun {tmp_path / 'begun'}"))
        async with asyncio.timeout(120):
            while not (tmp_path / "begun").exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for pid in workers(word):
            os.kill(pid, 9)
        (result,) = await task
        assert (
            "its process ended: signal 9" in reason(result) and isinstance(result, RewardFailed) and not result.excess
        )
        assert isinstance((await call(pool, "good", "a"))[0], Score)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "wrong.py").write_text("import json\nx = 1 / 0\n")
    yield tmp_path


async def test_a_function_that_cannot_be_loaded_is_told_with_its_line(folder: Path, word: str) -> None:
    pool = RewardWorkers(RewardWorkerSetup([FunctionSpec("wrong.py:f")], str(folder), 5.0), 1)
    with pytest.raises(RelaxError, match=r"reward\.function = 'wrong\.py:f': .*ZeroDivisionError.* at .*wrong\.py:2"):
        await pool.start()
    await pool.close()
    nothing_left(word)


async def test_a_function_that_ends_the_process_when_it_is_imported_is_told(folder: Path, word: str) -> None:
    (folder / "ends.py").write_text("import os\nos._exit(3)\n")
    pool = RewardWorkers(RewardWorkerSetup([FunctionSpec("ends.py:f")], str(folder), 5.0), 1)
    with pytest.raises(RelaxError, match="its process ended: exit code 3"):
        await pool.start()
    await pool.close()
    nothing_left(word)
