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
                tone: Tone = "error" if event.get("exit_code") not in (0, None) else "plain"
                return Note(at, tone, clip(f"the run ends: {reason}", LINE))
            case "supervisor_fault":
                return Note(at, "error", clip(f"fault of the supervisor: {event.get('error', '')}", LINE))
            case "keeper_died":
                return Note(at, "warning", "the keeper died; another takes its place")
            case "agent_died":
                return Note(at, "error", clip(f"the node agent died: {event.get('cause', '')}", LINE))
        return None

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
