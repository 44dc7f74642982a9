"""The event log and the metrics as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

A role is a process of the trace, a slot one of its threads: spans from spawn to ready and from ready to exit, waits
before a restart, faults; steps, evaluations and checkpoints on threads of their own beside it. One pass over each
file; what is remembered is bounded by the number of slots.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from relax_rt.observe.text import clip

MICRO = 1_000_000
MAX_TRACKS = 16_384
RUN = "run"
"""Track of what concerns no slot."""
QUIET = ("epoch_issued", "slot_announced", "version_issued", "run_started")
COUNTERS = {"queue": ("outstanding", "payload_bytes"), "rollout": ("tokens_per_s", "running")}
STEP_PARTS = ("wait_s", "train_s", "publish_s")
BUILT_IN = ("t", "m", "by", "kind", "slot", "role", "diagnosis")

Record = dict[str, Any]


class Trace:
    """Turns events and metrics into the records of a trace; `records` yields them as they are made.

    Args:
        began: wall-clock time (s) that is 0 in the trace.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._pids: dict[str, int] = {}
        self._tids: dict[str, int] = {}
        self._open: dict[str, tuple[str, float, Record]] = {}
        self._last = began
        self._fresh: list[Record] = []

    def records(self, events: Iterable[Record], metrics: Iterable[Record]) -> Iterator[Record]:
        """All records of the trace."""
        for event in events:
            t = event.get("t")
            if isinstance(t, int | float) and math.isfinite(t):
                self._last = max(self._last, float(t))
                self._event(float(t), str(event.get("kind", "")), event)
                yield from self._pop_records()
        for record in metrics:
            t = record.get("t")
            if isinstance(t, int | float) and math.isfinite(t):
                self._metric(float(t), str(record.get("kind", "")), record)
                yield from self._pop_records()
        for slot in list(self._open):
            self._close(slot, self._last, {"ended": "not in the log"})
        yield from self._pop_records()

    def _pop_records(self) -> list[Record]:
        fresh, self._fresh = self._fresh, []
        return fresh

    def _event(self, t: float, kind: str, event: Record) -> None:
        slot = str(event.get("slot", "")) or _sender(event)
        match kind:
            case "run_started":
                for one in list(self._open):
                    self._close(one, t, {"ended": "the run was started again"})
            case "slot_spawned":
                self._begin(slot, "starting", t, {"epoch": event.get("epoch"), "pid": event.get("pid")})
            case "slot_ready":
                self._begin(slot, "ready", t, {"epoch": event.get("epoch")})
            case "slot_hung":
                self._begin(slot, "hung", t, {"reason": event.get("reason")})
            case "slot_recovered":
                self._begin(slot, "ready", t, {"epoch": event.get("epoch")})
            case "slot_exited":
                diagnosis = event.get("diagnosis")
                diagnosis = diagnosis if isinstance(diagnosis, dict) else {}
                why = f"{diagnosis.get('kind', 'unknown')}: {diagnosis.get('cause', '')}"
                self._close(slot, t, {"ended": clip(why, 200)})
                if diagnosis.get("kind") != "clean":
                    self._instant(
                        slot,
                        f"died ({diagnosis.get('kind', 'unknown')})",
                        t,
                        {"cause": str(diagnosis.get("cause", ""))},
                    )
            case "slot_restarting":
                self._begin(slot, "back-off", t, _plain(event))
            case "fault_injected":
                seconds = event.get("seconds")
                track = f"{slot} faults" if slot else RUN
                if isinstance(seconds, int | float) and seconds > 0:
                    self._span(track, f"fault: {event.get('name')}", t + seconds, seconds, _plain(event))
                self._instant(slot or RUN, f"fault: {event.get('name')}", t, _plain(event), scope="p")
            case "checkpoint":
                self._span(
                    f"{slot} checkpoints", str(event.get("folder", kind)), t, event.get("seconds"), _plain(event)
                )
            case _ if kind not in QUIET:
                self._instant(slot or RUN, kind, t, _plain(event))

    def _metric(self, t: float, kind: str, record: Record) -> None:
        who = _sender(record)
        if kind == "step":
            parts = [(part, record.get(part)) for part in STEP_PARTS]
            known = [
                (part, float(s)) for part, s in parts if isinstance(s, int | float) and math.isfinite(s) and s >= 0
            ]
            end = t
            for part, seconds in reversed(known):
                self._span(f"{who} steps", part.removesuffix("_s"), end, seconds, {"step": record.get("step")})
                end -= seconds
        elif kind == "evaluation":
            details = {key: record.get(key) for key in ("when", "step", "version", "exact")}
            self._span(f"{who} evaluations", f"evaluation {record.get('when', '')}", t, record.get("seconds"), details)
        for key in COUNTERS.get(kind, ()):
            value = record.get(key)
            if isinstance(value, int | float) and math.isfinite(value):
                where = self._where(who)
                self._fresh.append(
                    {"ph": "C", "name": f"{who} {key}", "ts": self._at(t), "args": {key: value}, **where}
                )

    def _begin(self, slot: str, name: str, t: float, args: Record) -> None:
        self._close(slot, t, {})
        if len(self._open) < MAX_TRACKS:
            self._open[slot] = (name, t, args)

    def _close(self, slot: str, t: float, args: Record) -> None:
        name, began, known = self._open.pop(slot, ("", t, {}))
        if name:
            self._span(slot, name, t, t - began, {**known, **args})

    def _span(self, track: str, name: str, end: float, seconds: Any, args: Record) -> None:
        if not isinstance(seconds, int | float) or not math.isfinite(seconds):
            return
        began = self._at(end - max(0.0, float(seconds)))
        where = self._where(track)
        self._fresh.append({"ph": "X", "name": name, "ts": began, "dur": self._at(end) - began, "args": args, **where})

    def _instant(self, track: str, name: str, t: float, args: Record, *, scope: str = "t") -> None:
        where = self._where(track)
        self._fresh.append({"ph": "i", "name": name, "ts": self._at(t), "s": scope, "args": args, **where})

    def _where(self, track: str) -> dict[str, int]:
        """Process and thread of a track; named when they are first used."""
        role = track.partition("/")[0]
        pid = self._pids.get(role)
        if pid is None:
            pid = self._pids[role] = len(self._pids) + 1
            self._fresh.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": role}})
        tid = self._tids.get(track)
        if tid is None and len(self._tids) < MAX_TRACKS:
            tid = self._tids[track] = len(self._tids) + 1
            self._fresh.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}})
        return {"pid": pid, "tid": tid or 0}

    def _at(self, t: float) -> int:
        """Microseconds since the trace began."""
        return max(0, round((t - self._began) * MICRO))


def _sender(record: Record) -> str:
    return str(record.get("by", "")).partition("#")[0]


def _plain(event: Record) -> Record:
    return {key: value for key, value in event.items() if key not in BUILT_IN}
