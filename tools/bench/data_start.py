"""How long a run takes to start, and how much memory, with 2,000 and with 2,000,000 rows of data.

    python tools/bench/data_start.py [--rows N] [--row-bytes N] [--quick] [--json]

Each run is a real `relax-rt up` of the tiny model over a folder of jsonl shards, with an empty index cache, for one
step. Reported: seconds until the data are checked (and the CPU seconds that were used by then, which say more than the
clock on a machine that is not quiet), until every role is ready and until the first step was trained; and
the largest sum of the memory of all its processes, as the proportional set size (pages that several processes share
count once) and as the resident set size. Beside them the size of the index, and the time until the roles are ready of a
second start, which finds the index. Exits with 1 if the run over many rows does not train; speed never fails it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from relax_rt.roles.models.cache import cache_dir
from relax_rt.roles.models.resolve import resolve_model

FEW, MANY, QUICK_MANY = 2_000, 2_000_000, 100_000
SHARDS = 8
LOOK_S = 0.25
TIMEOUT_S = 900.0
MIB = 1 << 20
GOAL_S, GOAL_MIB = 60.0, 500.0
CONFIG = """
[run]
name = "data-start"
[model]
path = "package:tiny"
[data]
path = "rows"
template = "{question}"
max_prompt_tokens = 24
[reward]
function = "exact"
[sampling]
max_new_tokens = 5
[algorithm]
group_size = 4
prompts_per_step = 4
steps = 1
[evaluation]
items = 16
during_items = 16
[queue]
capacity_mib = 16
slab_mib = 2
[roles.rollout]
dtype = "float32"
[roles.trainer]
dtype = "float32"
[roles.evaluator]
dtype = "float32"
"""


def write_rows(folder: Path, count: int, row_bytes: int) -> int:
    """Shards of `count` distinct rows; the size of all of them in bytes."""
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        with (folder / f"part-{shard:02d}.jsonl").open("w") as file:
            for number in range(shard * count // SHARDS, (shard + 1) * count // SHARDS):
                a, b = divmod(number, 1000)
                row = {"prompt": f"{a} + {b} =", "answer": str(a + b), "metadata": {"level": number % 5, "note": ""}}
                row["metadata"]["note"] = "x" * max(0, row_bytes - len(json.dumps(row)))
                file.write(json.dumps(row) + "\n")
    return sum(path.stat().st_size for path in folder.iterdir())


def memory(pid: int) -> tuple[int, int]:
    """Proportional and resident set size of a process and all below it, in bytes."""
    proportional = resident = 0
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0
    for process in processes:
        try:
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                name, _, value = line.partition(":")
                if name == "Pss":
                    proportional += int(value.split()[0]) << 10
                elif name == "Rss":
                    resident += int(value.split()[0]) << 10
        except (OSError, ValueError):
            continue
    return proportional, resident


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and all below it so far."""
    try:
        processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
        return sum(sum(process.cpu_times()[:2]) for process in processes)
    except psutil.NoSuchProcess:
        return 0.0


def events(run_dir: Path) -> list[dict[str, Any]]:
    """The run's events so far."""
    found = []
    for path in sorted((run_dir / "events").glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue  # The last line is being written.
    return found


def measure(folder: Path, run_dir: Path, cache: Path) -> dict[str, Any]:
    """One run from its command to its end."""
    command = [
        sys.executable,
        "-m",
        "relax_rt.cli.main",
        "up",
        str(folder / "roles.toml"),
        "--set",
        f'run.dir="{run_dir}"',
    ]
    environment = {**os.environ, "RELAX_CACHE": str(cache)}
    output = run_dir.parent / f"{run_dir.name}.out"
    begun, row, peak = time.monotonic(), {}, (0, 0)
    with output.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        )
        try:
            while process.poll() is None and time.monotonic() - begun < TIMEOUT_S:
                time.sleep(LOOK_S)
                now = time.monotonic() - begun
                now_used = memory(process.pid)
                peak = (max(peak[0], now_used[0]), max(peak[1], now_used[1]))
                if "checked_s" not in row and b"training and" in output.read_bytes():
                    row["checked_s"], row["check_cpu_s"] = now, cpu_s(process.pid)
                if "step_s" not in row and (run_dir / "events").is_dir():
                    told = events(run_dir)
                    ready = {one.get("slot") for one in told if one["kind"] == "slot_ready"}
                    if "ready_s" not in row and {"rollout/0", "trainer/0", "evaluator/0", "reward/0"} <= ready:
                        row["ready_s"] = now
                    metrics = run_dir / "metrics.jsonl"
                    if metrics.exists() and '"kind":"step"' in metrics.read_text().replace(": ", ":"):
                        row["step_s"] = now
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait(60)
    row |= {"pss_mib": peak[0] / MIB, "rss_mib": peak[1] / MIB, "rc": process.returncode}
    if process.returncode != 0 or "step_s" not in row:
        print(output.read_text()[-4000:], file=sys.stderr)
    return row


def case(base: Path, count: int, row_bytes: int) -> list[dict[str, Any]]:
    """A first and a second start over `count` rows."""
    folder, cache = base / str(count), base / f"cache-{count}"
    data_bytes = write_rows(folder / "rows", count, row_bytes)
    (folder / "roles.toml").write_text(CONFIG)
    cache.mkdir()
    for entry in cache_dir().iterdir():
        if not entry.name.startswith("data-"):
            (cache / entry.name).symlink_to(entry)
    found = []
    for start in ("first", "second"):
        row = measure(folder, base / f"run-{count}-{start}", cache)
        index = sum(path.stat().st_size for path in cache.glob("data-*/*"))
        found.append({"rows": count, "start": start, "data_mib": data_bytes / MIB, "index_mib": index / MIB, **row})
        print(told(found[-1]), flush=True)
    shutil.rmtree(folder / "rows")
    return found


def told(row: dict[str, Any]) -> str:
    """A row for people."""
    times = ", ".join(f"{name[:-2]} {row[name]:.1f} s" for name in ("checked_s", "ready_s", "step_s") if name in row)
    cpu = f" ({row['check_cpu_s']:.1f} s of CPU to the check)" if "check_cpu_s" in row else ""
    return (
        f"{row['rows']:>9,} rows ({row['data_mib']:.0f} MiB), {row['start']} start: {times}{cpu}; memory at most "
        f"{row['pss_mib']:.0f} MiB PSS, {row['rss_mib']:.0f} MiB RSS; index {row['index_mib']:.1f} MiB"
    )


def claims(found: list[dict[str, Any]], many: int) -> list[dict[str, Any]]:
    """Rows of the machine-readable result: what `many` rows cost, each with its goal."""
    few, large = (
        next(row for row in found if row["rows"] == count and row["start"] == "first") for count in (FEW, many)
    )
    named = (
        (f"first step of a run over {many:,} rows that were never read", "s", large.get("step_s"), GOAL_S),
        (f"memory over that with {FEW:,} rows", "MiB", large["pss_mib"] - few["pss_mib"], GOAL_MIB),
    )
    return [
        {"name": name, "unit": unit, "better": "lower", "ours": ours, "peers": {}, "limit": None, "goal": goal}
        | {"holds": ours <= goal}
        for name, unit, ours, goal in named
        if ours is not None
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=MANY, help="of the large data")
    parser.add_argument("--row-bytes", type=int, default=400, help="of a row, about")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_MANY:,} rows")
    parser.add_argument("--json", action="store_true", help="last line: the rows as JSON")
    args = parser.parse_args()
    many = QUICK_MANY if args.quick else args.rows
    resolve_model("package:tiny", Path())
    with tempfile.TemporaryDirectory(prefix="relax-data-start-") as base:
        found = [row for count in (FEW, many) for row in case(Path(base), count, args.row_bytes)]
    results = claims(found, many)
    for one in results:
        print(f"{one['name']}: {one['ours']:.1f} {one['unit']} (goal {one['goal']:.0f})")
    if args.json:
        print(json.dumps(results))
    return 0 if all(row["rc"] == 0 and "step_s" in row for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
