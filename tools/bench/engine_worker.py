"""One engine in a process of its own, for engine.py: reads a task from the command line, prints its measurements."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import math
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import torch
import transformers

from relax_rt.roles.models.device import denormals_flushed
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.rollout.engines.base import Chunk, Engine, GroupRequest
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.weights.source import StageSource
from relax_rt.transport.weights.stage import WeightStage

PROMPT_TOKENS = (16, 48)
LONGEST = 20
"""Longest completion, in medians."""
SPREAD = 1.0
"""Of the logarithm of lengths."""
WARM_TOKENS = 16
STEADY_CHUNK = 4
"""Tokens are counted as they are told: this many of a sequence at a time."""
DEADLINE_S = 900.0


class Task(msgspec.Struct, frozen=True):
    """What is measured.

    Attributes:
        concurrent: sequences that are decoded at the same time; requests: in all, queued at once.
        rounds: for each, whether weights are updated while it runs.
        steady: rounds are windows of update_every_s in one stretch of generating with every slot in use, and an update
            falls into the beginning of a window; else each round is all of the requests, to the end of the longest.
    """

    engine: str
    model: str
    dtype: str
    concurrent: int
    requests: int
    median_tokens: int
    rounds: list[bool]
    update_every_s: float
    kv: str = "keep"
    steady: bool = False
    sglang_python: str = ""


class Round(msgspec.Struct, frozen=True):
    """One round; cpu_s: processor time of all its processes; pauses: of each update, seconds without a token."""

    tokens: int
    seconds: float
    cpu_s: float
    updates: int
    pauses: list[float]


def processor_s() -> float:
    """Processor time of this process and those below it, a server among them."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def asked(number: int, prompt: list[int], length: int, *, chunk_tokens: int = 0) -> GroupRequest:
    """As a rollout asks for it, but that nothing ends before its length."""
    return GroupRequest(
        id=number,
        prompt=tuple(prompt),
        seeds=(number,),
        temperature=1.0,
        max_new_tokens=length,
        stop_ids=frozenset(),
        chunk_tokens=chunk_tokens,
    )


async def windows(task: Task, engine: Engine, vocabulary: int, sources: list[StageSource], seen: Seen) -> list[Round]:
    """One stretch of generating, cut into windows; what ends is followed by the next, so that all slots are in use."""
    supply = (
        asked(number, prompt, length, chunk_tokens=STEADY_CHUNK)
        for lot in range(1_000_000)
        for number, (prompt, length) in enumerate(workload(task, vocabulary, 2 * lot), 1 + (lot + 1) * 100_000)
    )
    seen.on_end = lambda: engine.submit([next(supply)])
    engine.submit([next(supply) for _ in range(2 * task.concurrent)])
    pauses: list[float] = []

    async def update(number: int) -> None:
        source = sources[number % 2]
        await engine.prepare(source)
        pauses.append((await engine.commit(source.record, task.kv)).pause_s)  # type: ignore[arg-type]

    rounds: list[Round] = []
    await asyncio.sleep(task.update_every_s)  # until prompts and slots are mixed
    for number, updated in enumerate(task.rounds):
        began, busy, before = time.monotonic(), processor_s(), seen.tokens
        pauses.clear()
        if updated:
            await update(sum(task.rounds[:number]))
        await asyncio.sleep(max(0.0, began + task.update_every_s - time.monotonic()))
        took = time.monotonic() - began
        if seen.broken:
            raise seen.broken[0]
        rounds.append(Round(seen.tokens - before, took, processor_s() - busy, len(pauses), pauses.copy()))
    seen.on_end = lambda: None
    return rounds


class Seen:
    """Tokens that came, and how many requests are still to end."""

    def __init__(self) -> None:
        self.tokens = self.left = 0
        self.over = asyncio.Event()
        self.broken: list[BaseException] = []
        self.on_end: Callable[[], None] = lambda: None

    def sink(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            self.tokens += len(chunk.tokens)
            if chunk.finish_reason:
                self.left -= 1
                self.on_end()
        if self.left == 0:
            self.over.set()

    def fail(self, error: BaseException) -> None:
        self.broken.append(error)
        self.over.set()


def workload(task: Task, vocabulary: int, number: int) -> list[tuple[list[int], int]]:
    """Prompts and how many tokens each is to get: log-normal, cut at LONGEST medians; the same for all engines.

    Two rounds that follow each other have the same lengths, and other prompts, or the second would find those of the
    first kept; the one after the last is a short one, to warm up every slot.
    """
    draw = random.Random(number // 2)
    out = []
    warm = number >= len(task.rounds)
    for _ in range(task.concurrent if warm else task.requests):
        length = WARM_TOKENS if warm else task.median_tokens * math.exp(draw.gauss(0, SPREAD))
        ids = [draw.randrange(10, vocabulary) for _ in range(draw.randint(*PROMPT_TOKENS))]
        prompt = [10 + (token + number) % (vocabulary - 10) for token in ids]
        out.append((prompt, max(1, min(int(length), LONGEST * task.median_tokens))))
    return out


@contextlib.contextmanager
def staged(folder: Path, dtype: torch.dtype) -> Iterator[list[StageSource]]:
    """The model's own weights as two versions on a stage in shared memory."""
    from relax_rt.roles.rollout.engines.weights import FlatWeights

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    weights = FlatWeights(model, dtype, torch.device("cpu"))
    data = weights.standby(base=True)
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    place = Path(tempfile.mkdtemp(prefix="engine-bench-", dir=base))
    with contextlib.ExitStack() as left:
        left.callback(shutil.rmtree, place)
        stage = WeightStage(place, 1)
        left.callback(stage.close)
        sources = []
        for version in (1, 2):
            with stage.writing(weights.layout, version - 1) as (file, view):
                view[:] = data
                manifest = stage.seal(version, weights.layout, file, view)
            del view
            sources.append(StageSource(place, VersionRecord(version, 0, version, manifest.digest)))
        del data, model, weights
        yield sources


async def through_interface(task: Task, engine: Engine, folder: Path, vocabulary: int) -> list[Round]:
    """Rounds of an engine behind the interface."""
    seen = Seen()

    async def run(number: int, updated: bool) -> Round:
        work = workload(task, vocabulary, number)
        seen.left, seen.tokens = len(work), 0
        seen.over.clear()
        pauses: list[float] = []

        async def update() -> None:
            for k in range(10_000):
                await asyncio.sleep(task.update_every_s)
                source = sources[k % 2]
                await engine.prepare(source)
                pauses.append((await engine.commit(source.record, task.kv)).pause_s)  # type: ignore[arg-type]

        began, busy = time.monotonic(), processor_s()
        engine.submit([asked(number * 100_000 + i, *one) for i, one in enumerate(work, 1)])
        updates = asyncio.create_task(update()) if updated else None
        async with asyncio.timeout(DEADLINE_S):
            await seen.over.wait()
        took, busy = time.monotonic() - began, processor_s() - busy
        if updates is not None:
            updates.cancel()
            await asyncio.gather(updates, return_exceptions=True)
        if seen.broken:
            raise seen.broken[0]
        return Round(seen.tokens, took, busy, len(pauses), pauses)

    with staged(folder, getattr(torch, task.dtype)) as sources:
        await engine.start(seen.sink, seen.fail)
        try:
            await run(len(task.rounds), False)  # warm
            if task.steady:
                return await windows(task, engine, vocabulary, sources, seen)
            return [await run(number, updated) for number, updated in enumerate(task.rounds)]
        finally:
            await engine.close(10.0)


def embedded(task: Task, folder: Path, vocabulary: int) -> list[Round]:
    from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

    engine = EmbeddedEngine(folder, dtype=task.dtype, max_sequences=task.concurrent, threads=1)
    return asyncio.run(through_interface(task, engine, folder, vocabulary))


def sglang(task: Task, folder: Path, vocabulary: int) -> list[Round]:
    """The real server on the CPU, behind the same interface; each token is streamed to us, as in a run."""
    from relax_rt.roles.rollout.engines.settings import RolloutSettings
    from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
    from relax_rt.roles.rollout.engines.sglang.options import KEPT_BACK, server_environment, server_options
    from relax_rt.roles.rollout.engines.sglang.server import Place

    settings = RolloutSettings.model_validate(
        {"engine": "sglang", "dtype": task.dtype, "max_sequences": task.concurrent, "threads": 1}
    )
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    place = Path(tempfile.mkdtemp(prefix="engine-bench-", dir=base))
    tokens = task.concurrent * (PROMPT_TOKENS[1] + LONGEST * task.median_tokens + KEPT_BACK)
    engine = SglangEngine(
        folder,
        settings,
        Place(
            python=task.sglang_python,
            folder=place / "tmp",
            log=place / "server.log",
            environment=server_environment("cpu", 1, place / "tmp", os.environ),
        ),
        functools.partial(server_options, settings, "cpu", kv_tokens=tokens),
        device="cpu",
        weights_folder=place / "weights",
        kv_tokens=tokens,
        booting=lambda seconds: None,
    )
    try:
        return asyncio.run(through_interface(task, engine, folder, vocabulary))
    finally:
        shutil.rmtree(place)


def generate(task: Task, folder: Path, vocabulary: int) -> list[Round]:
    """transformers' generate: batches of `concurrent`, each as long as its longest; only tokens asked for count."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, task.dtype)).eval()

    def run(number: int) -> Round:
        work = workload(task, vocabulary, number)
        began, busy = time.monotonic(), processor_s()
        for at in range(0, len(work), task.concurrent):
            batch = work[at : at + task.concurrent]
            longest = max(len(p) for p, _ in batch)
            ids = torch.tensor([[0] * (longest - len(p)) + p for p, _ in batch])
            mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p, _ in batch])
            new = max(n for _, n in batch)
            model.generate(
                ids, attention_mask=mask, do_sample=True, max_new_tokens=new, min_new_tokens=new, pad_token_id=0
            )
        return Round(sum(n for _, n in work), time.monotonic() - began, processor_s() - busy, 0, [])

    with torch.inference_mode(), denormals_flushed():
        run(len(task.rounds))
        return [run(number) for number, updated in enumerate(task.rounds) if not updated]


def continuous(task: Task, folder: Path, vocabulary: int) -> list[Round]:
    """transformers' continuous batching, with log-probabilities; updates copy into the parameters while it pauses."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, task.dtype)).eval()
    page = 32
    most = PROMPT_TOKENS[1] + LONGEST * task.median_tokens
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=True, max_new_tokens=most, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=page,
            num_blocks=task.concurrent * -(-most // page),
            max_batch_tokens=2048,
            max_requests_per_batch=task.concurrent,
            use_async_batching=False,
            return_logprobs=True,
        ),
    )

    def run(number: int, updated: bool) -> Round:
        work = workload(task, vocabulary, number)
        tokens = 0
        over = threading.Event()
        pauses: list[float] = []
        fresh = {k: v.clone() for k, v in model.named_parameters()}

        def update() -> None:
            while not over.wait(task.update_every_s):
                start = time.monotonic()
                with manager.pause(), torch.no_grad():
                    for name, parameter in model.named_parameters():
                        parameter.copy_(fresh[name])
                pauses.append(time.monotonic() - start)

        updater = threading.Thread(target=update)
        began, busy = time.monotonic(), processor_s()
        # As many at a time as the others decode: requests beyond that would be packed into larger batches.
        under_way = 0
        waiting = list(enumerate(work))
        if updated:
            updater.start()
        finished = 0
        while finished < len(work):
            while waiting and under_way < task.concurrent:
                i, (prompt, length) = waiting.pop(0)
                name = f"{number}-{i}"
                manager.add_request(prompt, request_id=name, max_new_tokens=length)
                under_way += 1
            result = manager.get_result(timeout=1.0)
            if result is None:
                if not manager.is_running() or time.monotonic() - began > DEADLINE_S:
                    raise RuntimeError("continuous batching gave no result")
                continue
            if not result.is_finished():
                continue
            tokens += len(result.generated_tokens)
            under_way -= 1
            finished += 1
        took, busy = time.monotonic() - began, processor_s() - busy
        over.set()
        if updated:
            updater.join()
        return Round(tokens, took, busy, len(pauses), pauses)

    manager.start()
    try:
        run(len(task.rounds), False)
        return [run(number, updated) for number, updated in enumerate(task.rounds)]
    finally:
        manager.stop(block=True)


ENGINES = {"embedded": embedded, "generate": generate, "continuous": continuous, "sglang": sglang}


def main() -> None:
    task = msgspec.json.decode(sys.argv[1], type=Task)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = resolve_model(task.model, Path.cwd())
    vocabulary = int(transformers.AutoConfig.from_pretrained(folder).get_text_config().vocab_size)
    rounds = ENGINES[task.engine](task, folder, vocabulary)
    print(json.dumps([msgspec.to_builtins(r) for r in rounds]))


if __name__ == "__main__":
    main()
