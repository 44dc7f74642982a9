"""Run tests and measurements on a GPU machine within a budget of seconds, most valuable first.

    python tools/gpu/measure.py PHASE --budget-s N [--out FOLDER] [--resume FILE] [--again PROBE,…|failed] [--list]

PHASE is `check` (needs no device), `machine`, `tests`, `figures` or `all`. Each probe runs in a process of its own with
a deadline. One that fails, crashes or hangs is recorded and killed with everything it started, and the next one begins.
Each result is written at once, as a row of JSON, to `FOLDER/measure.jsonl` and to stdout, and all output to
`FOLDER/measure.log` (FOLDER is $OUT, or build/gpu-measure). Started again on the same folder, or with `--resume` on the
rows of an earlier machine, it leaves out what has a result. A probe that no longer fits into the budget is skipped,
named at the end, and run the next time.

Outcomes: `ok`, `failed` (its exit code says so), `crashed` (by a signal), `timed_out`, `skipped` (with `why`).
The exit code is 0 only if each probe of the phase is `ok`.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PR_SET_CHILD_SUBREAPER = 36
TAIL, SHOWN = 2000, 400
"""Characters of a failed probe's output: in its row, and in the row on stdout, which some machines cut."""
LOG_BYTES = 1 << 19
"""Of one probe's output, at most."""
GRACE_S = 3.0
"""Between SIGTERM and SIGKILL."""
RESERVE_S = 10.0
"""Of the budget, kept to end the last probe and for the summary."""
DEVICE_S = 120.0
"""For torch to say whether there is a device."""
FINAL = frozenset({"ok", "failed", "crashed", "timed_out"})
ROWS, LOG = "measure.jsonl", "measure.log"


@dataclass(frozen=True, slots=True)
class Probe:
    """One program.

    Attributes:
        phase: one of PHASES.
        name: unique; stands in its row.
        command: what is run in the root of the tree.
        expected_s: begun only if so much of the budget is left.
        limit_s: killed after this long.
        gives: what its rows tell.
        device: needs a CUDA device.
    """

    phase: str
    name: str
    command: tuple[str, ...]
    expected_s: float
    limit_s: float
    gives: str
    device: bool = True


def program(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def tests(*arguments: str) -> tuple[str, ...]:
    plugin = ("-p", "measure_rows", "-p", "no:cacheprovider", "-q", "-rfEs", "--tb=short")
    return (sys.executable, "-m", "pytest", *plugin, *arguments)


def figure(name: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / "figures.py"), "--only", name)


IMPORTS = """
import importlib.metadata as metadata, json, platform
import reasoning_gym, transformers, torch, zmq
import relax_rt.roles.rollout, relax_rt.roles.training.trainer, relax_rt.roles.evaluation.role
names = ("torch", "transformers", "tokenizers", "numpy", "cupy-cuda13x", "nvidia-nccl-cu13", "megatron-core", "peft")
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
print(json.dumps({"figure": "versions", "python": platform.python_version(), **{n: version(n) for n in names}}))
"""
TINY = """
import json, time
from pathlib import Path
from relax_rt.roles.models.resolve import resolve_model
begin = time.monotonic()
folder = resolve_model("package:tiny", Path())
print(json.dumps({"figure": "package:tiny", "seconds": time.monotonic() - begin, "folder": str(folder)}))
"""

# In the order of their worth: what the next ones build upon first, then what nobody has seen yet, then figures.
PROBES = (
    Probe("check", "imports", program(IMPORTS), 20, 120, "versions of what is installed", device=False),
    Probe("check", "collect", tests("--collect-only", "tests/gpu"), 20, 120, "that tests/gpu imports", device=False),
    Probe("check", "tiny model", program(TINY), 30, 180, "seconds to make package:tiny", device=False),
    Probe("machine", "device", figure("device"), 15, 90, "GPU, memory, copy rate, bfloat16 and float32 matrix rate"),
    Probe("tests", "engine", tests("tests/gpu/test_engine_on_cuda.py"), 40, 180, "the embedded engine's conformance"),
    Probe("tests", "trainer", tests("tests/gpu/test_trainer_on_cuda.py"), 40, 180, "torch trainer, critic, reference"),
    Probe("tests", "runs", tests("tests/gpu/test_runs_on_cuda.py"), 60, 240, "whole GRPO runs; a role killed"),
    Probe("tests", "ipc", tests("tests/gpu/test_cuda_ipc.py"), 40, 150, "CUDA IPC, senders killed"),
    Probe("figures", "engine rate", figure("engine"), 40, 180, "tokens/s at 1.5 billion parameters"),
    Probe("figures", "ipc rate", figure("ipc"), 15, 90, "share of the device's own copy rate; to reach: 0.8"),
    Probe("tests", "publication", tests("tests/gpu/test_publication_on_cuda.py"), 20, 90, "1.5 billion parameters"),
    Probe("tests", "megatron", tests("tests/gpu/test_megatron_on_cuda.py"), 30, 120, "Megatron beside transformers"),
    Probe("figures", "restart", figure("start"), 30, 150, "seconds from SIGKILL of a role to readiness"),
    Probe(
        "tests", "nccl twice", tests("tests/gpu/test_nccl.py", "-k", "twice or refused"), 30, 150, "a device used twice"
    ),
    Probe("tests", "nccl ranks", tests("tests/gpu/test_nccl.py", "-k", "meet"), 40, 180, "ranks lost in a broadcast"),
    Probe("figures", "broadcast", figure("shared"), 20, 120, "seconds of a broadcast of two ranks on one device"),
    Probe("tests", "nccl absent", tests("tests/gpu/test_nccl.py", "-k", "never_comes"), 60, 240, "absent peers"),
    Probe("figures", "duplicate", figure("duplicate"), 40, 180, "seconds until a device used twice is named"),
    Probe("figures", "absent", figure("absent"), 90, 300, "seconds until an absent peer is named"),
    Probe("tests", "sglang", tests("tests/gpu/test_sglang_on_cuda.py"), 90, 400, "SGLang, if it is there"),
)
PHASES = {
    "check": ("check",),
    "machine": ("machine",),
    "tests": ("tests",),
    "figures": ("figures",),
    "all": ("check", "machine", "tests", "figures"),
}


class Rows:
    """Appends rows to a file and to stdout; knows the last result of each probe."""

    def __init__(self, folder: Path, earlier: Iterable[Path] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.log = folder / ROWS, folder / LOG
        self.last: dict[str, dict[str, Any]] = {}
        for file in (*earlier, self.file):
            self.last |= {str(row["probe"]): row for row in read_rows(file) if "outcome" in row}
        if self.file.exists() and (data := self.file.read_bytes()) and not data.endswith(b"\n"):
            with self.file.open("ab") as out:
                out.write(b"\n")  # its writer was killed in the middle of a row

    def add(self, row: Mapping[str, Any]) -> None:
        """Write a row at once: it must survive whatever comes next."""
        with self.file.open("a") as out:
            out.write(json.dumps(row) + "\n")
            out.flush()
            os.fsync(out.fileno())
        if row.get("outcome") != "started":
            say(json.dumps({**row, **({"tail": row["tail"][-SHOWN:]} if "tail" in row else {})}))
        if "outcome" in row:
            self.last[str(row["probe"])] = dict(row)


def say(line: str) -> None:
    """Print a line; a reader of stdout that has gone away ends nothing, since the file has everything."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open until the end


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the whole rows of a file; none where there is no file."""
    found = []
    for line in file.read_text(errors="replace").splitlines() if file.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and "probe" in row:
            found.append(row)
    return found


def own_descendants() -> None:
    """Adopt processes whose parent ends, so that `end_all` finds what a probe left; end all of them on SIGTERM.

    Not taken from relax_rt: what is installed wrongly there must be a probe's result and not the end of this program.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def end_all(grace_s: float = GRACE_S) -> int:
    """End all descendants of this process, sessions of their own included; return how many there were."""
    me, ended = psutil.Process(), 0
    for round_ in range(50):
        living = [p for p in me.children(recursive=True) if alive(p)]
        if not living:
            break
        ended = max(ended, len(living))
        for one in living:
            try:
                one.send_signal(signal.SIGTERM if round_ == 0 else signal.SIGKILL)
            except psutil.NoSuchProcess:
                pass
        psutil.wait_procs(living, timeout=grace_s)
    return ended


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def run(probe: Probe, left_s: float, rows: Rows) -> dict[str, Any]:
    """Run a probe for at most what is left, and return its row."""
    limit = min(probe.limit_s, left_s)
    paths = [str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "RELAX_MEASURE_ROWS": str(rows.file),
        "RELAX_MEASURE_PROBE": probe.name,
    }
    row: dict[str, Any] = {"probe": probe.name, "phase": probe.phase, "at": datetime.now(UTC).isoformat("T", "seconds")}
    before = len(read_rows(rows.file))
    begin = time.monotonic()
    with tempfile.TemporaryFile() as out:
        try:
            process = subprocess.Popen(
                probe.command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return {**row, "outcome": "failed", "seconds": 0.0, "tail": str(error)}
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:  # also when this program is told to end
            seconds = time.monotonic() - begin
            left_running = end_all()
        process.poll()
        out.seek(max(0, out.seek(0, os.SEEK_END) - LOG_BYTES))
        output = out.read()
    with rows.log.open("ab") as log:
        log.write(f"===== {probe.name}: {' '.join(probe.command)[:300]}\n".encode() + output + b"\n")
    text = output.decode(errors="replace")
    row |= {"outcome": outcome_of(code), "seconds": round(seconds, 2)}
    if code is None:
        row["why"] = f"killed after {limit:.0f} s" + (" (all of the budget)" if limit < probe.limit_s else "")
    elif code < 0:
        row["why"] = signal.Signals(-code).name
    if code is not None and left_running:
        row["left_running"] = left_running
    if figures := figures_in(text):
        row["figures"] = figures
        if code == 0 and (why := [str(found["skipped"]) for found in figures if "skipped" in found]):
            row |= {"outcome": "skipped", "why": why[0]}
    done = [found for found in read_rows(rows.file)[before:] if "test" in found]
    if done:
        counts = [str(found["result"]) for found in done]
        row |= {name: counts.count(name) for name in ("passed", "failed", "skipped") if name in counts}
        if code == 0 and "passed" not in row:
            row |= {"outcome": "skipped", "why": str(done[0].get("why", ""))}
    if row["outcome"] not in ("ok", "skipped"):
        row["tail"] = text[-TAIL:]
    return row


def outcome_of(code: int | None) -> str:
    if code is None:
        return "timed_out"
    return "ok" if code == 0 else "crashed" if code < 0 else "failed"


def figures_in(text: str) -> list[dict[str, Any]]:
    """Return the rows of JSON that a probe printed."""
    lines = [line for line in text.splitlines() if line.startswith('{"figure"')]
    return [json.loads(line) for line in lines if line.endswith("}")]


def why_no_device(left_s: float) -> str:
    """Say why no CUDA device can be used; empty where one can. Asked in a process of its own: a driver may hang."""
    code = "import torch, sys; sys.exit(0 if torch.cuda.is_available() else 'torch sees no CUDA device')"
    try:
        done = subprocess.run(program(code), capture_output=True, text=True, timeout=max(1.0, min(DEVICE_S, left_s)))
    except subprocess.TimeoutExpired:
        return f"torch did not say within {DEVICE_S:.0f} s whether there is a CUDA device"
    return "" if done.returncode == 0 else done.stderr.strip()[-300:]


def wanted(phase: str, last: Mapping[str, Mapping[str, Any]], again: str, probes: Sequence[Probe]) -> list[Probe]:
    """Return the probes of a phase that have no result yet; those that were interrupted come last.

    Args:
        again: names of probes to run all the same, by commas; "failed" for all that are not ok.
    """
    names = set(filter(None, again.split(",")))
    if unknown := names - {p.name for p in probes} - {"failed"}:
        raise SystemExit(f"error: --again {', '.join(sorted(unknown))}: no such probe; --list shows them")

    def open_(probe: Probe) -> bool:
        outcome = last.get(probe.name, {}).get("outcome")
        return probe.name in names or outcome not in FINAL or ("failed" in names and outcome != "ok")

    found = [p for p in probes if p.phase in PHASES[phase] and open_(p)]
    return sorted(found, key=lambda p: last.get(p.name, {}).get("outcome") == "started")


def measure(
    phase: str, budget_s: float, rows: Rows, *, again: str = "", probes: Sequence[Probe] = PROBES
) -> dict[str, Any]:
    """Run what is wanted within the budget, and return the summary."""
    deadline = time.monotonic() + budget_s - RESERVE_S
    todo = wanted(phase, rows.last, again, probes)
    no_device = why_no_device(budget_s) if any(probe.device for probe in todo) else ""
    for probe in todo:
        left = deadline - time.monotonic()
        skipped = {"probe": probe.name, "phase": probe.phase, "outcome": "skipped"}
        if probe.device and no_device:
            rows.add({**skipped, "why": no_device})
        elif left < probe.expected_s:
            rows.add({**skipped, "why": f"takes about {probe.expected_s:.0f} s, {max(left, 0):.0f} s are left"})
        else:
            rows.add({"probe": probe.name, "phase": probe.phase, "outcome": "started"})
            rows.add(run(probe, left, rows))
    return summary(phase, rows.last, probes)


def summary(phase: str, last: Mapping[str, Mapping[str, Any]], probes: Sequence[Probe]) -> dict[str, Any]:
    """Return the probes of the phase by outcome."""
    found: dict[str, Any] = {"summary": phase}
    for probe in probes:
        if probe.phase in PHASES[phase]:
            row = last.get(probe.name, {"outcome": "not run"})
            why = f": {row['why']}" if row.get("why") else ""
            found.setdefault(str(row["outcome"]), []).append(probe.name + why)
    return found


def main() -> None:
    """Read the command line, measure, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("phase", choices=PHASES)
    parser.add_argument("--budget-s", type=float, default=540.0, help="seconds for all of it (default 540)")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "build" / "gpu-measure"))
    parser.add_argument("--resume", type=Path, action="append", default=[], help="rows of an earlier call")
    parser.add_argument("--again", default="", help="probes to run although they have a result; or: failed")
    parser.add_argument("--list", action="store_true", help="show the probes of the phase and run nothing")
    arguments = parser.parse_args()
    if arguments.list:
        for probe in PROBES:
            if probe.phase in PHASES[arguments.phase]:
                print(f"{probe.phase:8} {probe.name:12} about {probe.expected_s:3.0f} s  {probe.gives}")
        return
    if missing := [str(file) for file in arguments.resume if not file.exists()]:
        raise SystemExit(f"error: --resume {missing[0]}: no such file")
    own_descendants()
    rows = Rows(arguments.out, arguments.resume)
    found = measure(arguments.phase, arguments.budget_s, rows, again=arguments.again)
    for name, those in found.items():
        if name != "summary":
            say(f"{name}: {len(those)}: {'; '.join(those)}")
    sys.exit(0 if set(found) <= {"summary", "ok"} else 1)


if __name__ == "__main__":
    main()
