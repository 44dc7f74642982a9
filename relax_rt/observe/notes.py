"""Events as sentences for people, on the live screen and in `why`: what died and why, what is ready again."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from relax_rt.observe.text import NOTHING, clip, duration

Tone = Literal["plain", "good", "warning", "error"]
NOTE_WIDTH, HINT_WIDTH = 160, 320
"""Characters of a note, and of one that may contain a hint."""
MAX_SLOTS, MAX_REQUESTS = 4096, 64


NOTES: dict[str, tuple[Tone, str]] = {
    "slot_restart_requested": ("warning", "{slot} is restarted: {reason}"),
    "slot_hung": ("warning", "{slot} hangs: {reason}"),
    "slot_recovered": ("good", "{slot} makes progress again"),
    "slot_killed": ("warning", "{slot} is killed: {reason}"),
    "slot_given_up": ("error", "{slot} is given up, {left} others continue: it {reason}"),
    "slot_unplaced": ("warning", "there is no room for {slot}: {reason}"),
    "role_restarting": ("error", "{role} is restarted as a whole, as {slot} {reason}"),
    "gang_failed": ("error", "gang {role} fails in generation {generation}: {slot}: {cause}"),
    "gang_started": ("plain", "gang {role} starts with {ranks} ranks as generation {generation}"),
    "scaled": ("plain", "{role} is scaled from {before} to {count} slots"),
    "slot_drained": ("plain", "{slot} is drained"),
    "node_joined": ("good", "node {node} has joined"),
    "node_draining": ("plain", "node {node} is drained"),
    "node_leaving": ("plain", "node {node} leaves: {reason}"),
    "node_left": ("plain", "node {node} has left: {reason}"),
    "node_lost": ("error", "node {node} is lost: {reason}"),
    "node_fenced": ("warning", "node {node} is fenced: {reason}"),
    "fault_injected": ("warning", "fault '{name}' is injected into {slot} by {by} (seed {seed})"),
    "fault_failed": ("warning", "a fault in {slot} failed: {why}"),
    "fault_ended": ("plain", "fault '{name}' in {slot} is over"),
    "zygote_died": ("warning", "a zygote died: {reason}"),
    "zygote_given_up": ("warning", "roles are no longer forked from a zygote: {reason}"),
    "spare_died": ("warning", "a spare of {role} died: {reason}"),
    "spares_ended": ("plain", "the spares of {role} are ended: {reason}"),
    "run_ending_already": ("plain", "the run is ending already; requested again: {reason}"),
    "supervisor_fault": ("error", "fault of the supervisor: {error}"),
    "keeper_died": ("warning", "the keeper died and is replaced"),
    "processes_unkillable": ("error", "these processes could not be killed: {pids}"),
    "checkpoint_damaged": ("error", "checkpoint {checkpoint} cannot be read and is skipped: {why}"),
    "checkpoint_quarantined": ("warning", "checkpoint {checkpoint} was renamed to {folder} and is ignored"),
    "checkpoint_unverified": ("warning", "checkpoint {checkpoint} was loaded, but {why}"),
    "agent_died": ("error", "the node agent died: {cause}"),
    "members_lost": ("warning", "{members} samples of {groups} groups were lost: {cause}; {hint}"),
    "no_progress": ("error", "{failed_groups} groups failed in a row, and none was trained: the run ends"),
    "slot_stalled": ("error", "no slot made progress while {slot} waited: {waiting}"),
    "item_retired": ("warning", "item {item} ({about}) is retired after {timeouts} timeouts: {reason}"),
    "item_reinstated": ("plain", "item {item} is sampled again"),
    "groups_filtered": (
        "warning",
        "filters dropped all {scored} groups scored for step {step} (recently {passing} pass): {filtered}",
    ),
    "steps_empty": ("warning", "{steps} consecutive steps trained nothing: {why}"),
}
"""Text of the note that an event gives, by kind, with the fields of the event."""
NOTES_ONCE: dict[str, tuple[Tone, str]] = {
    "weights_save_failed": ("warning", "version {version} is not in publication.directory: {why}"),
    "weights_from_files": ("warning", "version {version} is read from publication.directory: {why}"),
    "handles_fallback": ("warning", "the SGLang server loads version {version} from the file: {why}"),
    "broadcast_rank_removed": ("warning", "{engine} receives versions by the stage, not by broadcast: {why}"),
    "broadcast_disabled": ("warning", "versions are sent by the stage, not by broadcast: {why}"),
    "layers_fallback": ("warning", "the trainer computes with Megatron-Core's own layers: {why}; {hint}"),
    "answer_unreadable": ("warning", "the answer of item {item} cannot be parsed, its completions score 0: {reason}"),
    "step_skipped": ("warning", "step {step} was skipped: {why}"),
    "update_skipped": ("warning", "updates of step {step} were skipped: {why}"),
    "step_short": ("warning", "step {step} used fewer groups than prompts_per_step"),
}
"""Events that may come at each step: the first gives a note, the others are only in the event log."""


class _Fields(dict[str, Any]):
    """An event's fields; one that it lacks is shown as a dash."""

    def __missing__(self, key: str) -> str:
        return NOTHING


class Note(msgspec.Struct, frozen=True):
    """One event for people: wall-clock time (s), severity, text."""

    t: float
    tone: Tone
    text: str


class RequestedKills:
    """Recognises the exits of slots that were killed because the user ended the run: these are not failures."""

    def __init__(self) -> None:
        self._reasons: set[str] = set()

    def update(self, event: dict[str, Any]) -> bool:
        """Process an event; True if it is the kill or the exit of such a slot."""
        match event.get("kind"):
            case "run_started":
                self._reasons.clear()
            case "run_draining" | "run_ending_already" if len(self._reasons) < MAX_REQUESTS:
                self._reasons.add(str(event.get("reason")))
            case "slot_killed":
                return str(event.get("reason")) in self._reasons
            case "slot_exited" if isinstance(diagnosis := event.get("diagnosis"), dict):
                return diagnosis.get("kind") == "killed" and str(diagnosis.get("cause")) in self._reasons
        return False


class EventNotes:
    """Turns the events that matter to people into notes, in bounded memory."""

    def __init__(self) -> None:
        self._down: dict[str, float] = {}
        self._noted: set[str] = set()
        self.requested = RequestedKills()

    def note(self, event: dict[str, Any]) -> Note | None:
        """The note for one event of the event log; None for most kinds."""
        t = event.get("t")
        at = float(t) if isinstance(t, int | float) else 0.0
        slot, kind = str(event.get("slot", "")), event.get("kind")
        if self.requested.update(event):
            return None
        match kind:
            case "slot_exited":
                return self._exited(at, slot, event)
            case "slot_ready":
                since = self._down.pop(slot, None)
                return (
                    Note(at, "good", f"{slot} is back after {duration(max(0.0, at - since))}")
                    if since is not None
                    else None
                )
            case "slot_restart_requested":
                self._mark_down(slot, at)
            case "run_draining":
                return self._ending(at, event)
        found = NOTES.get(str(kind))
        if found is None and str(kind) in NOTES_ONCE and str(kind) not in self._noted:
            self._noted.add(str(kind))
            found = NOTES_ONCE[str(kind)]
        if found is None:
            return None
        tone, text = found
        return Note(at, tone, clip(text.format_map(_Fields(event)), HINT_WIDTH))

    def _ending(self, at: float, event: dict[str, Any]) -> Note:
        reason, exit_code, most_s = str(event.get("reason", "")), event.get("exit_code"), event.get("slot_most_s")
        most = f", each within {duration(most_s)}" if isinstance(most_s, int | float) and most_s > 0 else ""
        if reason == "Ctrl-C":
            text = f"Ctrl-C: the roles finish their work in progress{most}; Ctrl-C again ends them at once"
            return Note(at, "warning", text)
        # From 128 on the user asked for it: a signal, or `down --now`.
        failed = isinstance(exit_code, int) and 0 < exit_code < 128
        return Note(at, "error" if failed else "plain", clip(f"the run ends: {reason}", NOTE_WIDTH))

    def _exited(self, at: float, slot: str, event: dict[str, Any]) -> Note | None:
        diagnosis = event.get("diagnosis")
        diagnosis = diagnosis if isinstance(diagnosis, dict) else {}
        kind = str(diagnosis.get("kind", "unknown"))
        if kind == "clean":
            return None
        self._mark_down(slot, at)
        return Note(at, "error", clip(f"{slot} died ({kind}): {diagnosis.get('cause', '')}", NOTE_WIDTH))

    def _mark_down(self, slot: str, at: float) -> None:
        # The first death of a series counts: the slot is away until it is ready again.
        if len(self._down) < MAX_SLOTS:
            self._down.setdefault(slot, at)


class StartTimes:
    """Reports each slot that becomes ready for the first time, with the time it took. In bounded memory."""

    def __init__(self) -> None:
        self._spawned: dict[str, float] = {}
        self._noted: set[str] = set()

    def update(self, event: dict[str, Any]) -> str:
        """Process an event; returns the line to report, or ""."""
        slot, t = str(event.get("slot", "")), event.get("t")
        if not isinstance(t, int | float) or slot in self._noted or len(self._noted) >= MAX_SLOTS:
            return ""
        if event.get("kind") == "slot_spawned" and len(self._spawned) < MAX_SLOTS:
            self._spawned[slot] = float(t)
        if event.get("kind") != "slot_ready":
            return ""
        self._noted.add(slot)
        began = self._spawned.pop(slot, None)
        return f"{slot} ready in {duration(max(0.0, float(t) - began))}" if began is not None else ""
