"""Figures of a GPU machine, measured in one run and printed as JSON, a line a figure.

    python tools/gpu/figures.py [--mib 4096] [--only device,ipc,absent,duplicate,shared,start,engine]

device: what the device itself reaches: a copy of --mib (bytes read and written are both counted) and products of square
matrices of random numbers; the other figures are read beside it.
ipc: a copy of weights out of another process's memory by CUDA IPC, as a share of the same copy within one process, both
by the device's own clock, in turns, medians of the rounds; to reach: 0.8. Bytes read and written are both counted.
absent, duplicate: NCCL whose peer never comes, and two ranks on one device, with our own look-out for them and without:
seconds until the error has its name, whether the process was reaped and what memory came back.
shared: two ranks on one device, where the NCCL at hand allows it (NCCL_MULTI_RANK_GPU_ENABLE). A broadcast of one rank
to nobody is no bandwidth, and is never reported.
start: from SIGKILL of a role on the device to its successor's readiness, in a run.
engine: tokens/s of the embedded engine on the device with random weights of 1.5 billion parameters' shape.
What cannot be measured here is told with its reason.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
for folder in ("tests/gpu", "tests/unit/transport/weights", "tests"):
    sys.path.insert(0, str(ROOT / folder))

ROUNDS = 9
GB = 1e9


def tell(figure: str, **fields: Any) -> None:
    print(json.dumps({"figure": figure, **fields}), flush=True)


def device_seconds(copy: Callable[[], None]) -> float:
    """Of a copy, by the device's clock."""
    import cupy

    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    begin.record()
    copy()
    end.record()
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) / 1e3


def device(mib: int) -> None:
    import torch

    def median_s(work: Callable[[], Any]) -> float:
        for _ in range(3):
            work()
        times = []
        for _ in range(ROUNDS):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    source = torch.randint(0, 255, (mib << 20,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_gb_s = 2 * source.nbytes / median_s(lambda: target.copy_(source)) / GB
    size, rates = 8192, {}
    for dtype in (torch.bfloat16, torch.float32):
        left, right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        seconds = median_s(lambda left=left, right=right: left @ right)
        rates[f"{dtype}".removeprefix("torch.") + "_tflop_s"] = 2 * size**3 / seconds / 1e12
    free, total = torch.cuda.mem_get_info()
    precision = torch.get_float32_matmul_precision()
    tell("device", copy_gb_s=copy_gb_s, **rates, float32=precision, free_mib=free >> 20, total_mib=total >> 20)


def ipc(mib: int) -> None:
    import cupy
    import device_far_end

    from relax_rt.transport.weights import device
    from relax_rt.transport.weights.cuda_ipc import read_export

    nbytes = mib << 20
    with tempfile.TemporaryDirectory() as folder:
        program = str(ROOT / "tests/gpu/device_far_end.py")
        sender = subprocess.Popen(
            [sys.executable, program, "send", folder, str(mib)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert sender.stdout is not None
        try:
            assert json.loads(sender.stdout.readline())["did"] == "shown"
            own, into = device.DeviceBuffer(nbytes), device.DeviceBuffer(nbytes)
            own.view.array()[:] = device_far_end.pattern(nbytes)
            with device.open_device_memory(read_export(Path(folder), 1).memory) as theirs:
                seconds: dict[str, list[float]] = {"own": [], "ipc": []}
                for _ in range(ROUNDS + 1):
                    for name, source in (("own", own.view), ("ipc", theirs)):
                        pointer = source.pointer

                        def copy(pointer: int = pointer) -> None:
                            cupy.cuda.runtime.memcpyAsync(into.view.pointer, pointer, nbytes, 3, 0)

                        seconds[name].append(device_seconds(copy))
                same = into.view.digest() == theirs.digest()
        finally:
            sender.kill()
            sender.communicate()
    rate = {name: 2 * nbytes / statistics.median(times[1:]) / GB for name, times in seconds.items()}
    tell("ipc", mib=mib, own_gb_s=rate["own"], ipc_gb_s=rate["ipc"], share=rate["ipc"] / rate["own"], same=same)


def ranks_of(folder: str, names: tuple[str, ...], *, shared: bool, lonely: bool) -> Any:
    import test_nccl

    where = Path(folder) / f"{time.monotonic_ns()}"
    where.mkdir()
    return test_nccl.Ranks(where, names, shared=shared, lonely=lonely)


async def nccl_case(figure: str, *, shared: bool, lonely: bool, absent: bool) -> None:
    import torch

    from relax_rt.transport.weights.broadcast.protocol import BroadcastFailed

    with tempfile.TemporaryDirectory() as folder:
        before = torch.cuda.mem_get_info()[0]
        ranks = ranks_of(folder, ("root", "a"), shared=shared, lonely=lonely)
        if absent:
            ranks.order("a", "rendezvous", "hang")
        begin = time.monotonic()
        async with ranks.collective:
            try:
                outcome, _ = await ranks.send()
                error = ""
            except BroadcastFailed as failure:
                assert failure.outcome is not None
                outcome, error = failure.outcome, str(failure)
            seconds = time.monotonic() - begin
        for buffer in ranks.buffers.values():
            buffer.free()
        await asyncio.sleep(1.0)
        tell(
            figure,
            lookout=not lonely,
            seconds=seconds,
            delivered=outcome.delivered,
            lost=[f"{lost.member}: {lost.fate}: {lost.why}" for lost in outcome.lost],
            error=error,
            reaped=not ranks.collective.ranks.living,
            memory_missing_mib=(before - torch.cuda.mem_get_info()[0]) >> 20,
        )


def absent(_: int) -> None:
    for lonely in (False, True):
        asyncio.run(nccl_case("absent", shared=True, lonely=lonely, absent=True))


def duplicate(_: int) -> None:
    for lonely in (False, True):
        asyncio.run(nccl_case("duplicate", shared=False, lonely=lonely, absent=False))


def shared(_: int) -> None:
    import test_nccl

    version = test_nccl.nccl_version()
    if version < test_nccl.SHARED_SINCE:
        tell("shared", skipped=f"NCCL {version} allows one rank a device; {test_nccl.SHARED_SINCE} is wanted")
        return

    async def measure() -> None:
        with tempfile.TemporaryDirectory() as folder:
            ranks = ranks_of(folder, ("root", "a"), shared=True, lonely=False)
            async with ranks.collective:
                await ranks.send()
                seconds = []
                for _ in range(ROUNDS):
                    outcome, one = await ranks.send()
                    if not outcome.delivered:
                        tell("shared", skipped=f"nobody was served: {outcome.lost}")
                        return
                    seconds.append(one)
            took = statistics.median(seconds)
            tell(
                "shared", nccl=version, ranks=2, mib=test_nccl.NBYTES >> 20, seconds=took, with_="digests on the device"
            )

    asyncio.run(measure())


def start(_: int) -> None:
    import test_runs_on_cuda
    from tiny_run import TinyRun

    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        (base / "device_actor.py").write_text((ROOT / "tests/gpu/device_actor.py").read_text())
        config = base / "roles.toml"
        config.write_text(test_runs_on_cuda.ACTORS.replace("max_restarts = 3", "max_restarts = 50"))
        run = TinyRun(base / "run", config).start()
        seconds = []
        try:
            run.until("holder/0", lambda: run.slot("holder/0").get("state") == "ready")
            for _ in range(5):
                begin = time.monotonic()
                run.kill("holder/0")
                seconds.append(time.monotonic() - begin)
        finally:
            subprocess.run([run.command()[0], "down", str(run.run_dir)], check=False, timeout=60)
            run.process.wait(60)
    tell("start", kills=len(seconds), median_s=statistics.median(seconds), worst_s=max(seconds))


def engine(_: int) -> None:
    import torch
    import transformers

    from relax_rt.roles.rollout.engines.base import GroupRequest, generate
    from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

    with tempfile.TemporaryDirectory() as folder:
        config = transformers.Qwen3Config(
            vocab_size=151_936,
            hidden_size=2048,
            intermediate_size=6144,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
        with torch.device("cuda"):  # random numbers for 1.5 billion parameters take a CPU half a minute
            transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
        gc.collect()
        torch.cuda.empty_cache()
        one = EmbeddedEngine(Path(folder), dtype="bfloat16", max_sequences=64, threads=4, device="cuda")
        requests = [
            GroupRequest(
                id=i,
                prompt=tuple(range(100, 228)),
                seeds=(i,),
                temperature=1.0,
                max_new_tokens=256,
                stop_ids=frozenset(),
            )
            for i in range(64)
        ]
        begin = time.monotonic()
        done = asyncio.run(generate(one, requests, timeout_s=600.0))
        seconds = time.monotonic() - begin
    tokens = sum(len(completion.tokens) for completion in done.values())
    tell("engine", concurrent=64, tokens=tokens, tokens_s=tokens / seconds, includes="warm-up and prefill")


FIGURES = {
    "device": device,
    "ipc": ipc,
    "absent": absent,
    "duplicate": duplicate,
    "shared": shared,
    "start": start,
    "engine": engine,
}


def machine() -> str:
    """Why nothing can be measured here; empty where it can. Tells what the machine is."""
    from relax_rt.transport.rpc.errors import Refused
    from relax_rt.transport.weights import device

    try:
        cupy = device.cupy()
    except Refused as error:
        return str(error)
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    nccl = cupy.cuda.nccl.get_version() if getattr(cupy.cuda.nccl, "available", False) else None
    name = torch.cuda.get_device_name(0)
    tell(
        "machine",
        device=name,
        torch=torch.__version__,
        cupy=cupy.__version__,
        nccl=nccl,
        cpus=os.cpu_count(),
        shm_free_mib=shutil.disk_usage("/dev/shm").free >> 20,
    )
    return ""


def main() -> None:
    """Measure what was asked for; one that fails does not keep the others from it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--only", default=",".join(FIGURES))
    arguments = parser.parse_args()
    if why := machine():
        raise SystemExit(f"nothing can be measured here: {why}")
    failed = False
    for name in arguments.only.split(","):
        try:
            FIGURES[name](arguments.mib)
        except Exception as error:  # noqa: BLE001 - one figure's failure is told, and the others are measured
            failed = True
            tell(name, failed=f"{type(error).__name__}: {error}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
