"""Supervision events as sentences: who died of what, who is back after how long, why the run ends."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from relax_rt.observe.text import clip, duration

Tone = Literal["plain", "good", "warning", "error"]
LINE = 160
MAX_SLOTS = 4096


class Note(msgspec.Struct, frozen=True):
    """One thing that happened: wall-clock time (s), how bad it is, what."""

    t: float
    tone: Tone
    text: str


class Story:
    """Makes notes of the events that a person wants to know of; the others give none. Bounded; no I/O."""

    def __init__(self) -> None:
        self._down: dict[str, float] = {}

    def note(self, event: dict[str, Any]) -> Note | None:
        """The note for one event of the event log, if it deserves one."""
        t = event.get("t")
        at = float(t) if isinstance(t, int | float) else 0.0
        slot, kind = str(event.get("slot", "")), event.get("kind")
        reason = str(event.get("reason", ""))
        match kind:
            case "slot_exited":
                return self._exited(at, slot, event)
            case "slot_ready":
                return self._ready(at, slot)
            case "slot_restart_requested":
                self._mark_down(slot, at)
                return Note(at, "warning", f"{slot} is restarted: {reason}")
            case "slot_hung":
                return Note(at, "warning", clip(f"{slot} hangs: {reason}", LINE))
            case "slot_recovered":
                return Note(at, "good", f"{slot} goes on")
            case "slot_killed":
                return Note(at, "warning", clip(f"{slot} is killed: {reason}", LINE))
            case "run_draining":
                return self._ending(at, reason, event.get("exit_code"))
            case "supervisor_fault":
                return Note(at, "error", clip(f"fault of the supervisor: {event.get('error', '')}", LINE))
            case "keeper_died":
                return Note(at, "warning", "the keeper died; another takes its place")
            case "fault_injected":
                lasts = f" for {event['seconds']:g} s" if event.get("seconds") else ""
                by = f"seed {event.get('seed')}, number {event.get('number')}"
                return Note(
                    at, "warning", f"{slot or 'the run'} is harmed on purpose: {event.get('name')}{lasts} ({by})"
                )
            case "slot_overtaken":
                return Note(at, "warning", f"{slot} is overtaken on purpose: epoch {event.get('by_epoch')} was issued")
            case "agent_died":
                return Note(at, "error", clip(f"the node agent died: {event.get('cause', '')}", LINE))
        return None

    def _ending(self, at: float, reason: str, exit_code: Any) -> Note:
        if reason == "Ctrl-C":
            return Note(at, "warning", "Ctrl-C: the roles finish the work in hand; Ctrl-C again ends them at once")
        return Note(at, "error" if exit_code not in (0, None) else "plain", clip(f"the run ends: {reason}", LINE))

    def _exited(self, at: float, slot: str, event: dict[str, Any]) -> Note | None:
        diagnosis = event.get("diagnosis")
        diagnosis = diagnosis if isinstance(diagnosis, dict) else {}
        kind = str(diagnosis.get("kind", "unknown"))
        if kind == "clean":
            return None
        self._mark_down(slot, at)
        return Note(at, "error", clip(f"{slot} died ({kind}): {diagnosis.get('cause', '')}", LINE))

    def _ready(self, at: float, slot: str) -> Note | None:
        since = self._down.pop(slot, None)
        return Note(at, "good", f"{slot} is back after {duration(max(0.0, at - since))}") if since is not None else None

    def _mark_down(self, slot: str, at: float) -> None:
        # The first death of a series counts: the slot is away until it is ready again.
        if len(self._down) < MAX_SLOTS:
            self._down.setdefault(slot, at)


class Starts:
    """Tells of each slot that has become ready for the first time, with the seconds it took. Bounded; no I/O."""

    def __init__(self) -> None:
        self._spawned: dict[str, float] = {}
        self._told: set[str] = set()

    def take(self, event: dict[str, Any]) -> str:
        """The line for one event of the event log; empty if it deserves none."""
        slot, t = str(event.get("slot", "")), event.get("t")
        if not isinstance(t, int | float) or slot in self._told or len(self._told) >= MAX_SLOTS:
            return ""
        if event.get("kind") == "slot_spawned" and len(self._spawned) < MAX_SLOTS:
            self._spawned[slot] = float(t)
        if event.get("kind") != "slot_ready":
            return ""
        self._told.add(slot)
        began = self._spawned.pop(slot, None)
        return f"{slot} ready in {duration(max(0.0, float(t) - began))}" if began is not None else ""
