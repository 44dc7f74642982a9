"""Publishing weights on one node: ours beside memcpy, a gloo broadcast and safetensors through the page cache.

    python tools/bench/weights.py [--quick] [--json] [--only transfer,pause,delta]

Transfer: a version lies on the stage; seconds from the word to take it until every receiver, a process of its own, has
told that it holds the version in memory of its own, verified (ours), copied (memcpy out of the same shared memory, no
digests), broadcast (gloo, one rank a receiver and one for the trainer) or loaded from a safetensors file in the page
cache. Ours "mapped" takes no copy: the receiver maps the stage and verifies it. Registry, engine, acknowledgement are
not in it. All of them are measured in turns, in the same rounds, into memory that is there already; figures are medians
of the rounds. The first and the last byte differ from version to version, and are looked at after each transfer. What
the trainer does before the commit, export and digests, is told beside it, as is the write of the safetensors file.

Pause: an embedded engine generates without end and gets one version after the other; each figure is a part of the time
of the transfer. Its own word for how long sequences got no token at a swap; and by the clock of who receives the tokens
the generation time lost at the swap: how much longer the tokens of that time took than as many usually do, less the
same of windows of that length in which nothing happened, between the updates of the same run; the same of the transfer,
which takes processor time from the engine. Medians; the noise is half of a 90% interval. Where it is above the goal,
nothing is said of that.

Delta: bytes that move and seconds that they take when one in a hundred elements has changed.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.weights.manifest import Layout, Manifest, layout_of
from relax_rt.transport.weights.source import DeltaSource, StageSource
from relax_rt.transport.weights.stage import WeightStage, pinned, read_manifest

PARTS = ("transfer", "pause", "delta")
MODELS = {"135M": 135_000_000, "500M": 500_000_000, "1.5B": 1_500_000_000}
RECEIVERS = {"135M": (1, 2, 4), "500M": (1, 2, 4), "1.5B": (1,)}
TENSORS = 270
ROUNDS, QUICK_ROUNDS = 7, 3
OURS, MAPPED, MEMCPY, GLOO, FILES = "ours", "mapped", "memcpy", "gloo", "safetensors"
WAYS = (OURS, MAPPED, MEMCPY, GLOO, FILES)
MEMCPY_FACTOR, PAUSE_PART, DELTA_FACTOR, CHANGED = 1.5, 0.1, 10.0, 0.01
ANSWER_S = 300.0
SWAPS, QUICK_SWAPS = 60, 24
SPARE_BYTES = 2 << 30


def layout(parameters: int) -> Layout:
    """A bfloat16 model of so many parameters, in tensors of one size."""
    rows = parameters // TENSORS // 64
    return layout_of([(tensor_name(i), "bfloat16", (rows, 64), rows * 128) for i in range(TENSORS)])


def tensor_name(number: int) -> str:
    """Of the tensors of that model, in its layout's order."""
    return f"layer.{number}.weight"


def mark(version: int) -> int:
    """The first and the last byte of a version; never 0."""
    return 1 + version % 251


class Receiver:
    """What a receiving process does when it is told to."""

    def __init__(self, folder: pathlib.Path, nbytes: int, rank: int, ranks: int) -> None:
        self.folder, self.rank, self.ranks = folder, rank, ranks
        self.into = np.zeros(nbytes, np.uint8)
        self.into[:] = 1  # its pages are there before anything is measured
        self._gloo = False

    def take(self, way: str, version: int) -> tuple[int, int]:
        """Get a version; answers with its first and its last byte."""
        self.into[[0, -1]] = 0  # the way before this one left the same bytes here
        if way in (OURS, MAPPED):
            record = VersionRecord(version, 0, 0, read_manifest(self.folder, version).digest)
            source = StageSource(self.folder, record)
            if way == OURS:
                source.copy_into(self.into.data)
            else:
                with source.mapped() as view:
                    return view[0], view[-1]
        elif way == MEMCPY:
            with pinned(self.folder, read_manifest(self.folder, version)) as view:
                np.copyto(self.into, np.frombuffer(view, np.uint8))
        elif way == GLOO:
            self.broadcast()
        else:
            self.load(self.folder / "files" / "model.safetensors")
        return int(self.into[0]), int(self.into[-1])

    def load(self, path: pathlib.Path) -> None:
        """A safetensors file, copied into the buffer."""
        import torch
        from safetensors import safe_open

        flat, at = torch.from_numpy(self.into), 0
        with safe_open(path, "pt") as file:
            for number in range(TENSORS):  # as the layout has them, which is not the order of their names
                tensor = file.get_tensor(tensor_name(number)).view(torch.uint8).flatten()
                flat[at : at + tensor.numel()].copy_(tensor)
                at += tensor.numel()

    def broadcast(self) -> None:
        """Take part in a broadcast; the first time joins the group."""
        import torch
        import torch.distributed
        from torch._C._distributed_c10d import FileStore

        if not self._gloo:
            store = FileStore(str(self.folder / f"store-{self.ranks}"), self.ranks)
            torch.distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.ranks)
            self._gloo = True
        torch.distributed.broadcast(torch.from_numpy(self.into), src=0)


def receive(pipe: Connection, folder: str, nbytes: int, rank: int, ranks: int) -> None:
    """A receiving process: takes what it is told to, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    receiver = Receiver(pathlib.Path(folder), nbytes, rank, ranks)
    pipe.send("ready")
    while True:
        try:
            way, version = pipe.recv()
        except EOFError:
            return
        pipe.send(receiver.take(way, version))


@contextmanager
def receivers(folder: pathlib.Path, count: int, nbytes: int) -> Iterator[list[Connection]]:
    """Processes that wait for orders; ended whatever happens."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for rank in range(1, count + 1):
            ours, theirs = context.Pipe()
            process = context.Process(target=receive, args=(theirs, str(folder), nbytes, rank, count + 1), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            answer(pipe)
        yield pipes
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def answer(pipe: Connection) -> Any:
    """What a receiver says, or an end with the reason."""
    if not pipe.poll(ANSWER_S):
        raise SystemExit(f"a receiver did not answer within {ANSWER_S:.0f} s")
    try:
        return pipe.recv()
    except EOFError:
        raise SystemExit("a receiver ended; its last words are above") from None


class Trainer:
    """The sending side: a stage with versions, and the same weights as peers want them."""

    def __init__(self, folder: pathlib.Path, of: Layout, ranks: int, seed: int) -> None:
        self.folder, self.layout = folder, of
        self.stage = WeightStage(folder, 1)
        self.weights = np.resize(np.random.default_rng(seed).integers(0, 256, 64 << 20, np.uint8), of.nbytes)
        self.sender = Receiver(folder, 1, 0, ranks)
        self.sender.into = self.weights
        self.version = 0

    def publish(self) -> tuple[Manifest, float, float]:
        """Stage the next version; answers with the seconds of the copy and of the digests."""
        self.version += 1
        self.weights[[0, -1]] = mark(self.version)
        began = time.perf_counter()
        with self.stage.writing(self.layout, self.version - 1) as (file, view):
            np.copyto(np.frombuffer(view, np.uint8), self.weights)
            copied = time.perf_counter()
            manifest = self.stage.seal(self.version, self.layout, file, view)
        self.stage.retire(self.version)
        return manifest, copied - began, time.perf_counter() - copied

    def write_files(self) -> float:
        """Write the weights as safetensors; answers with the seconds that took."""
        import torch
        from safetensors.torch import save_file

        (self.folder / "files").mkdir(exist_ok=True)
        flat = torch.from_numpy(self.weights)
        tensors = {
            e.name: flat[e.offset : e.offset + e.nbytes].view(torch.bfloat16).view(e.shape) for e in self.layout.entries
        }
        began = time.perf_counter()
        save_file(tensors, self.folder / "files" / "model.safetensors")
        return time.perf_counter() - began

    def send(self, way: str, pipes: Sequence[Connection]) -> float:
        """Have all receivers take the version; answers with the seconds until the last has it."""
        began = time.perf_counter()
        for pipe in pipes:
            pipe.send((way, self.version))
        if way == GLOO:
            self.sender.broadcast()
        got = [answer(pipe) for pipe in pipes]
        seconds = time.perf_counter() - began
        if set(got) != {(mark(self.version),) * 2}:
            raise SystemExit(f"{way}: first and last bytes of receivers are {got}, of the version {mark(self.version)}")
        return seconds


def leave_gloo() -> None:
    """Before a group of another size."""
    import torch.distributed

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def transfer(model: str, count: int, rounds: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """The rows of one model and number of receivers."""
    of = layout(MODELS[model])
    took: dict[str, list[float]] = {way: [] for way in (*WAYS, "export", "digest", "write")}
    trainer = Trainer(folder, of, count + 1, seed=1)
    # A safetensors file is moved off shared memory: it is the page cache that is measured.
    files = pathlib.Path(tempfile.mkdtemp(prefix="weights-bench-files-"))
    (folder / "files").symlink_to(files)
    try:
        with receivers(folder, count, of.nbytes) as pipes:
            for number in range(rounds + 1):
                _, export_s, digest_s = trainer.publish()
                written_s = trainer.write_files()
                for name, value in (("export", export_s), ("digest", digest_s), ("write", written_s)):
                    took[name].append(value)
                for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                    took[way].append(trainer.send(way, pipes))
            leave_gloo()
    finally:
        trainer.stage.close()
        shutil.rmtree(files, ignore_errors=True)
    # The first round warms what is measured.
    return transfer_rows(model, count, of.nbytes, {name: statistics.median(v[1:]) for name, v in took.items()})


def transfer_rows(model: str, count: int, nbytes: int, s: dict[str, float]) -> list[dict[str, Any]]:
    what = f"{model} to {count}"
    peers = {MEMCPY: s[MEMCPY], GLOO: s[GLOO], FILES: s[FILES]}
    speeds = {name: count * nbytes / 1e9 / value for name, value in peers.items()}
    limit = s[MEMCPY]
    return [
        row(f"{what}: fetched and verified by all", "s", "lower", s[OURS], peers, limit, MEMCPY_FACTOR * limit),
        row(f"{what}: the same, mapped", "s", "lower", s[MAPPED], peers, limit, MEMCPY_FACTOR * limit),
        row(f"{what}: data received", "GB/s", "higher", count * nbytes / 1e9 / s[OURS], speeds, speeds[MEMCPY]),
        row(
            f"{what}: before the commit, copy and digests", "s", "lower", s["export"] + s["digest"], {FILES: s["write"]}
        ),
    ]


def delta(model: str, rounds: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """What a delta moves and costs when one in a hundred elements has changed."""
    of = layout(MODELS[model])
    stage = WeightStage(folder, 1)
    rng = np.random.default_rng(2)
    base = rng.integers(0, 1 << 16, of.nbytes // 2, np.uint16)
    records, bytes_moved = [], []
    took: dict[str, list[float]] = {"encode": [], "apply": [], "full": []}
    into, whole = np.zeros(of.nbytes, np.uint8), np.zeros(of.nbytes, np.uint8)
    try:
        for version in range(1, rounds + 2):
            if version > 1:
                base[rng.choice(len(base), int(CHANGED * len(base)), replace=False)] ^= 0x40
            with stage.writing(of, version - 1) as (file, view):
                view[:] = base.view(np.uint8).data
                manifest = stage.seal(version, of, file, view)
                began = time.perf_counter()
                if version > 1 and not stage.seal_delta(manifest, view, version - 1).deltas:
                    raise SystemExit("no delta was made")
                encode_s = time.perf_counter() - began
            records.append(VersionRecord(version, version - 1, version, manifest.digest))
            full = StageSource(folder, records[-1])
            took["full"].append(timed(functools.partial(full.copy_into, whole.data)))
            if version == 1:
                into[:] = whole
                continue
            source = DeltaSource(folder, records[-1], records[-2])
            took["encode"].append(encode_s)
            took["apply"].append(timed(functools.partial(source.copy_into, into.data)))
            bytes_moved.append(source.nbytes)
            if not np.array_equal(into, whole):
                raise SystemExit("the delta gave other weights")
            stage.retire(version)
    finally:
        stage.close()
    s = {name: statistics.median(values) for name, values in took.items()}
    what = f"{model}, delta of {CHANGED:.0%} changed elements"
    factor = of.nbytes / statistics.median(bytes_moved)
    return [
        row(f"{what}: data moved, whole ÷ delta", "x", "higher", factor, {"whole": 1.0}, None, DELTA_FACTOR),
        row(f"{what}: applied and verified", "s", "lower", s["apply"], {"whole, copied": s["full"]}),
        row(f"{what}: made by the trainer's node", "s", "lower", s["encode"], {}),
    ]


def timed(work: Callable[[], None]) -> float:
    """Seconds that it takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def row(
    name: str,
    unit: str,
    better: str,
    ours: float,
    peers: dict[str, float],
    limit: float | None = None,
    goal: float | None = None,
    noise: float | None = None,
) -> dict[str, Any]:
    """One row of the machine-readable result. With more noise than the goal it is not known whether it holds."""
    holds = None if goal is None else ours <= goal if better == "lower" else ours >= goal
    if goal is not None and noise is not None and noise > goal:
        holds = None
    return {
        "name": name,
        "unit": unit,
        "better": better,
        "ours": ours,
        "peers": peers,
        "limit": limit,
        "goal": goal,
        "noise": noise,
        "holds": holds,
    }


def pause(swaps: int, folder: pathlib.Path) -> list[dict[str, Any]]:
    """What an update costs an engine that generates all the while."""
    from weights_engine import random_model, updates

    found = asyncio.run(updates(random_model(folder / "model"), folder / "stage", swaps))
    shutil.rmtree(folder / "model", ignore_errors=True)
    transfer_s, told_s = statistics.median(found.transfer_s), statistics.median(found.pause_s)
    what = f"{found.parameters / 1e6:.0f}M, {len(found.pause_s)} updates"
    rows = [row(f"{what}: a transfer, while it generates", "s", "lower", transfer_s, {})]
    known = {"seconds": told_s}
    name = f"{what}: nothing generated at a swap, its own word"
    rows.append(row(name, "transfers", "lower", told_s / transfer_s, known, None, PAUSE_PART))
    for name, (seconds, noise), goal in (
        ("generation lost at a swap", found.swap.lost(), PAUSE_PART),
        ("longest gap at a swap, above an undisturbed one", found.swap.longest(), None),
        ("generation lost to a transfer", found.transfer.lost(), None),
    ):
        known = {"seconds": seconds, "noise, seconds": noise}
        part, noise = seconds / transfer_s, noise / transfer_s
        rows.append(row(f"{what}: {name}", "transfers", "lower", part, known, None, goal, noise))
    return rows


def measure(options: argparse.Namespace, folder: pathlib.Path) -> list[dict[str, Any]]:
    """All rows asked for; a case that the machine has no memory for is left out, and said so."""
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    rows: list[dict[str, Any]] = []
    for model in MODELS if "transfer" in options.only else ():
        for count in RECEIVERS[model]:
            # Two buffers of the stage, the trainer's copy, the file in the page cache, and one a receiver.
            need = layout(MODELS[model]).nbytes * (4 + count) + SPARE_BYTES
            if options.quick and (model != "135M" or count == 2):
                continue
            if need > (have := available_bytes()):
                print(f"{model} to {count}: needs {need >> 20} MiB, free are {have >> 20}: left out", file=sys.stderr)
                continue
            rows += in_folder(folder, functools.partial(transfer, model, count, rounds))
    if "pause" in options.only:
        rows += in_folder(folder, functools.partial(pause, QUICK_SWAPS if options.quick else SWAPS))
    for model in ("135M", "500M") if "delta" in options.only else ():
        if not (options.quick and model != "135M"):
            rows += in_folder(folder, functools.partial(delta, model, rounds))
    return rows


def in_folder(folder: pathlib.Path, work: Callable[[pathlib.Path], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Do one case in shared memory of its own, given back afterwards."""
    at = folder / "case"
    at.mkdir()
    try:
        return work(at)
    finally:
        shutil.rmtree(at, ignore_errors=True)


def available_bytes() -> int:
    """Memory that can be had without swapping."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))


def show(rows: Sequence[dict[str, Any]]) -> None:
    """The table for people."""
    print(f"{'':74}{'ours':>10}{'noise':>9}{'goal':>10}  peers")
    for r in rows:
        goal = "-" if r["goal"] is None else f"{r['goal']:.4f}"
        noise = "" if r["noise"] is None else f"±{r['noise']:.4f}"
        verdict = {None: "", True: "  yes", False: "  NO"}[r["holds"]]
        peers = ", ".join(f"{name} {value:.4f}" for name, value in r["peers"].items())
        print(f"{r['name'] + ' [' + r['unit'] + ']':74}{r['ours']:>10.4f}{noise:>9}{goal:>10}  {peers}{verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="135M to 1 and 4, three rounds")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON on the last line")
    parser.add_argument("--only", default="", help=f"comma-separated, of {', '.join(PARTS)}")
    options = parser.parse_args()
    options.only = [p for p in options.only.split(",") if p] or list(PARTS)
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there is {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = pathlib.Path(tempfile.mkdtemp(prefix="weights-bench-", dir="/dev/shm"))
    try:
        rows = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    show(rows)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
