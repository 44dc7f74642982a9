"""TransferQueue side by side, in one run: ours, transferqueue 0.1.11 (SimpleStorage), Ray's object store, memcpy.

    python tools/bench/transfer_queue.py [--quick] [--json] [--no-peers]

Writer and reader are processes of their own, and so is our broker, with its journal on. The systems take turns and
never run at the same time. Readers touch the first and last element of every field, in the ragged mix of every value.
"fresh" is the median of the first five batches, which are all kept until the last is read, as while a trainer keeps
what no checkpoint covers yet: each goes to memory that was not used before. "reuse" is that of the batches after them
(without the first three), each freed before the next. The limit of a put is memcpy of the same arrays into warm shared
pages, interleaved with our puts; of samples one by one a bare socket round trip to a process that writes a file,
besides the copy. One by one the goal is half the rate of such round trips that are awaited on an event loop. A goal
that lies beyond the limit is marked. The peers need an environment of their own (`make peer-env`); without it their
columns are empty.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peer_env
from peers.queue_cases import BATCHES, KEPT, TASK
from queue_broker import STOPPING_S, broker, journal_bytes

HERE = Path(__file__).resolve().parent
OURS, TQ, RAY, COPY, AWAITED = "relax-rt", "transferqueue", "ray", "memcpy", "awaited"
PEERS = (TQ, RAY)
SETTLING = 3
"""Batches after the kept ones that count for neither: each system comes to use the same memory over again."""
PEER_TIMEOUT_S = 600.0
CAPACITY_MIB = {"2 MiB": 256, "151 MB": 1024, "ragged + text": 256}
ROUNDS = {"2 MiB": 60, "151 MB": 25, "ragged + text": 40}
PEER_ROUNDS = {"2 MiB": 25, "151 MB": 20, "ragged + text": 20}
SINGLE_ROUNDS = 7
SINGLES = 2048
PEER_SINGLES = 512
NOISE = 1.3
"""Factor between memcpy beside ours and beside the peers from which on a warning is printed."""

Seconds = dict[str, dict[str, dict[str, list[float]]]]
"""Seconds of every round, by system, case and operation."""


# --- our side


class Worker:
    """A worker process, asked one operation at a time."""

    def __init__(self, role: str, folder: Path, capacity_mib: int) -> None:
        command = [sys.executable, str(HERE / "queue_worker.py"), role, str(folder), str(capacity_mib)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a process of the benchmark ended with {self.process.wait()}")
        return json.loads(line)

    def ask(self, operation: str, *arguments: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([operation, *arguments]) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(STOPPING_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def workers(folder: Path, capacity_mib: int) -> Iterator[tuple[Worker, Worker]]:
    with contextlib.ExitStack() as stack:
        writer = stack.enter_context(contextlib.closing(Worker("writer", folder, capacity_mib)))
        reader = stack.enter_context(contextlib.closing(Worker("reader", folder, capacity_mib)))
        yield writer, reader


def add(seconds: Seconds, system: str, case: str, **ops: float) -> None:
    for op, value in ops.items():
        seconds.setdefault(system, {}).setdefault(case, {}).setdefault(op, []).append(value)


def run_batches(seconds: Seconds, rounds: dict[str, int]) -> None:
    """Our rounds of each batch: memcpy, put, get, done."""
    for case, count in rounds.items():
        fields = list(BATCHES[case]().columns)
        with (
            broker({TASK: fields}, capacity_mib=CAPACITY_MIB[case]) as (folder, _),
            workers(folder, CAPACITY_MIB[case]) as (writer, reader),
        ):
            writer.ask("load", case)
            reader.ask("load", case)
            for i in range(count):
                add(seconds, COPY, case, put=writer.ask("copy"))
                put, get = writer.ask("put"), reader.ask("get")
                add(seconds, OURS, case, put=put, get=get)
                for _ in range(KEPT if i == KEPT - 1 else 1 if i >= KEPT else 0):
                    add(seconds, OURS, case, free=reader.ask("done"))
            note(f"ours: {case} done, journal {journal_bytes(folder) / 1024:.0f} KiB")


FORMS = {
    "in turn": ("put_each", "get_each"),
    "batched": ("put_batched", "get_batched"),
    "batched rows": ("put_rows", "get_batched"),
    "pipelined": ("put_pipelined", "get_pipelined"),
}


def run_singles(seconds: Seconds, rounds: int, count: int) -> None:
    """8 KiB samples in every form, and the limit beside them. The first round warms up and does not count."""
    with (
        broker({TASK: ["x"]}, capacity_mib=256) as (folder, _),
        workers(folder, 256) as (writer, reader),
        contextlib.closing(Worker("limit", folder, 0)) as limit,
    ):
        for warm in [False] + [True] * rounds:
            kept: Seconds = seconds if warm else {}
            add(
                kept,
                COPY,
                "in turn",
                put=limit.ask("put_each", count) / count,
                get=limit.ask("get_each", count) / count,
            )
            add(
                kept,
                AWAITED,
                "in turn",
                put=limit.ask("put_awaited", count) / count,
                get=limit.ask("get_awaited", count) / count,
            )
            for form, (put, get) in FORMS.items():
                took = writer.ask(put, count) / count, reader.ask(get, count) / count
                add(kept, OURS, form, put=took[0], get=took[1])
        note(f"ours: 8 KiB samples done, journal {journal_bytes(folder) / 1024:.0f} KiB")


# --- peers


def run_peers(seconds: Seconds, rounds: dict[str, int], single_rounds: int, singles: int) -> dict[str, str]:
    """The peers' rounds; answers with their versions, none if they cannot be measured."""
    arguments = [f"--rounds={json.dumps(rounds)}", f"--single-rounds={single_rounds}", f"--singles={singles}"]
    output = peer_env.run("transfer_queue_peer.py", arguments, timeout_s=PEER_TIMEOUT_S)
    if output is None:
        return {}
    result = json.loads(output.strip().splitlines()[-1])
    for system in PEERS:
        seconds[system] = result["seconds"][system]
    for case, ops in result["seconds"][COPY].items():
        beside, ours = statistics.median(ops["put"][KEPT:]), statistics.median(seconds[COPY][case]["put"][KEPT:])
        if not 1 / NOISE < beside / ours < NOISE:
            note(f"warning: {COPY} of {case}: {ours * 1e3:.2f} ms beside ours, {beside * 1e3:.2f} ms beside the peers")
    versions: dict[str, str] = result["versions"]
    return versions


# --- rows


class Rows:
    """The table's rows out of all seconds."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds
        self.rows: list[dict[str, Any]] = []

    def median(self, system: str, case: str, phase: str, ops: tuple[str, ...]) -> float | None:
        """Seconds of a round's operations together; None if the system was not measured on one of them."""
        found = [self._seconds.get(system, {}).get(case, {}).get(op) for op in ops]
        if not all(found):
            return None
        sums = [sum(each) for each in zip(*(values for values in found if values), strict=True)]
        chosen: list[float] = {"fresh": sums[:KEPT], "reuse": sums[KEPT + SETTLING :]}.get(phase, sums)
        return statistics.median(chosen)

    def batch(self, case: str, phase: str) -> None:
        """put, get, both, and freeing."""
        for name, ops in {"put": ("put",), "get": ("get",), "put + get": ("put", "get"), "free": ("free",)}.items():
            of = {system: self.median(system, case, phase, ops) for system in (OURS, *PEERS)}
            limit = self.median(COPY, case, phase, ("put",)) if "put" in ops else None
            goals = self.batch_goals(case, phase, name, limit)
            self._add(f"{case} {name}, {phase}", "ms", "lower", 1e3, of, limit, goals)

    def batch_goals(self, case: str, phase: str, name: str, limit: float | None) -> dict[str, tuple[str, float]]:
        """What is to be reached: by system (or '' for an absolute limit) in words and as a factor or seconds."""
        if name == "put + get":
            factor = {"2 MiB": 25.0, "151 MB": 50.0}.get(case, 1.0)
            ray = {("2 MiB", "fresh"): 3.0, ("2 MiB", "reuse"): 1.5, ("151 MB", "fresh"): 5.0}.get((case, phase), 1.0)
            return {TQ: (f"{factor:g}x {TQ}", factor), RAY: (f"{ray:g}x {RAY}", ray)}
        if name == "put" and case == "151 MB" and limit is not None:
            return {"": (f"at most 1.5x {COPY}", 1.5 * limit)}
        if name == "get" and case == "151 MB":
            return {RAY: (f"at most 2x {RAY}", 0.5)}
        if name == "get" and case != "ragged + text":
            return {"": ("at most 1 ms", 1e-3)}
        return {}

    def single(self, form: str, op: str, goal: float) -> None:
        """Rates of 8 KiB samples; `goal` a second (0: none)."""
        of = {system: self.median(system, form, "", (op,)) for system in (OURS, *PEERS)}
        what = "put" if op == "put" else "get + done"
        goals = {"": (f"at least {goal:,.0f}/s", 1 / goal)} if goal else {}
        if awaited := self.median(AWAITED, form, "", (op,)):
            goals = {"": (f"half of {1 / awaited:,.0f}/s {AWAITED}", 2 * awaited)}
        limit = self.median(COPY, form, "", (op,))
        self._add(f"8 KiB {what}, {form}", "1/s", "higher", 0.0, of, limit, goals)

    def _add(
        self,
        name: str,
        unit: str,
        better: str,
        scale: float,
        of: dict[str, float | None],
        limit: float | None,
        goals: dict[str, tuple[str, float]],
    ) -> None:
        ours = of.pop(OURS)

        def beyond(system: str, value: float) -> str:
            """Marks a goal that memcpy alone would miss."""
            peer = of.get(system)
            return " (beyond the limit)" if peer is not None and limit is not None and peer / value < limit else ""

        def shown(value: float | None) -> float | None:
            return None if value is None else round(value * scale, 4) if scale else round(1 / value, 1)

        self.rows.append(
            {
                "name": name,
                "unit": unit,
                "better": better,
                "ours": shown(ours),
                "peers": {peer: shown(value) for peer, value in of.items() if value is not None},
                "limit": shown(limit),
                "goal": ", ".join(words + beyond(system, value) for system, (words, value) in goals.items()),
                "holds": holds(ours, of, {system: value for system, (_, value) in goals.items()}),
            }
        )


def holds(ours: float | None, peers: dict[str, float | None], goals: dict[str, float]) -> bool | None:
    """Whether all goals are reached; None if there is none, or if a peer that it needs was not measured."""
    verdicts: list[bool | None] = []
    for system, value in goals.items():
        limit = value if not system else None if (peer := peers.get(system)) is None else peer / value
        verdicts.append(None if limit is None or ours is None else ours <= limit)
    if not verdicts or False in verdicts:
        return False if verdicts else None
    return None if None in verdicts else True


def rows_of(seconds: Seconds) -> list[dict[str, Any]]:
    rows = Rows(seconds)
    for case in BATCHES:
        for phase in ("fresh", "reuse"):
            rows.batch(case, phase)
    for form, goal in {"in turn": 0.0, "batched": 20_000.0, "batched rows": 0.0, "pipelined": 0.0}.items():
        for op in ("put", "get"):
            if form != "batched rows" or op == "put":
                rows.single(form, op, goal)
    return rows.rows


def show(rows: list[dict[str, Any]], versions: dict[str, str]) -> None:
    """The table for people; in brackets how many times better ours is, at the limit how many times worse."""
    heads = [OURS, *(f"{peer} {versions.get(peer, '')}".strip() for peer in PEERS), "limit"]
    print(f"{'median':<31}{'unit':>5}" + "".join(f"{head:>21}" for head in heads) + f"  {'goal':<27}holds")
    for row in rows:
        values = [row["ours"], *(row["peers"].get(peer) for peer in PEERS), row["limit"]]
        cells = [cell(value, row, better=i < len(values) - 1) for i, value in enumerate(values)]
        verdict = {True: "yes", False: "NO", None: ""}[row["holds"]]
        line = f"{row['name']:<31}{row['unit']:>5}" + "".join(f"{c:>21}" for c in cells)
        print(f"{line}  {row['goal']:<27}{' ' * bool(row['goal'])}{verdict}".rstrip())


def cell(value: float | None, row: dict[str, Any], *, better: bool) -> str:
    """A value, and its ratio to ours."""
    if value is None:
        return "-"
    text = format(value, ",.0f" if row["unit"] == "1/s" else ".2f")
    if row["ours"] is None or value is row["ours"]:
        return text
    ratio = value / row["ours"] if (row["better"] == "lower") == better else row["ours"] / value
    return f"{text} ({ratio:.3g}x)"


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--json", action="store_true", help="last line: the rows as JSON")
    parser.add_argument("--no-peers", action="store_true", help="ours and the limits only")
    options = parser.parse_args()
    quick = 2 * KEPT + SETTLING
    seconds: Seconds = {}
    run_batches(seconds, dict.fromkeys(ROUNDS, quick) if options.quick else ROUNDS)
    run_singles(seconds, KEPT if options.quick else SINGLE_ROUNDS, SINGLES // 2 if options.quick else SINGLES)
    versions: dict[str, str] = {}
    if not options.no_peers:
        rounds = dict.fromkeys(PEER_ROUNDS, quick) if options.quick else PEER_ROUNDS
        versions = run_peers(seconds, rounds, KEPT, PEER_SINGLES // 2 if options.quick else PEER_SINGLES)
    rows = rows_of(seconds)
    print(f"load of the machine, 1 and 5 minutes: {os.getloadavg()[0]:.1f} {os.getloadavg()[1]:.1f}")
    show(rows, versions)
    if options.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
