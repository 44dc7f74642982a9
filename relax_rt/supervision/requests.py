"""What operators and nodes ask of the supervisor: restart, scale, drain, more room, less room."""

from __future__ import annotations

from collections.abc import Sequence

from relax_rt.supervision.diagnosis import Diagnosis
from relax_rt.supervision.pacing import Pacing
from relax_rt.supervision.placement import Node
from relax_rt.supervision.protocol import Emit, NodeLost
from relax_rt.supervision.slots import Slot
from relax_rt.supervision.tree import RoleNode
from relax_rt.transport.rpc.errors import Refused

MOST_SLOTS = 4096
"""Of one role, as in its settings."""


class Requests(Pacing):
    """Each is refused with a reason or carried out; the ends of processes that it brings about are not failures."""

    @property
    def counts(self) -> dict[str, int]:
        """The number of slots that each role is to have, in start order."""
        return {role.kind: sum(not s.retired for s in role.slots) for role in self._tree.by_tier()}

    def can_scale(self, kind: str) -> bool:
        """Whether the number of its slots may change at all."""
        role = self._tree.roles.get(kind)
        return role is not None and not role.rules.gang and not role.template.system and self._ending is None

    def _on_restart_requested(self, name: str, reason: str) -> None:
        what = f"cannot restart {name!r}"
        s, role = self._tree.slots.get(name), self._tree.roles.get(name)
        if s is None and role is None:
            if self._placer is not None and name in [node.name for node in self._placer.nodes]:
                self._refuse_at_the_end(what)
                self._open_node(name, what)
                return
            known = ", ".join([*self._tree.roles, *self._tree.slots])
            raise Refused(what, why="no such slot, role or node", hint=f"known: {known}")
        self._refuse_at_the_end(what)
        if s is not None and s.retired:
            raise Refused(what, why="it is being scaled away", hint=f"`relax-rt scale {s.spec.kind}` brings it back")
        role = role or (s.role if s else None)
        assert role is not None
        chosen = [s] if s is not None else [o for o in role.slots if not o.retired]
        if not chosen:
            raise Refused(what, why="the role has no slots", hint=f"`relax-rt scale {role.kind} N` gives it some")
        roomless = [why for slot in chosen if (why := self._no_room(slot))]
        if len(roomless) == len(chosen):
            raise Refused(what, why=f"it can have no room: {roomless[0]}")
        for slot in chosen:
            self._emit("slot_restart_requested", slot, reason=reason)
        if role.rules.gang:
            self._restart_gang(role, reason)
        else:
            for slot in chosen:
                self._restart(slot)

    def _no_room(self, s: Slot) -> str:
        """Why a restart of it would only wait; empty when it need not."""
        if s.state == "pending" and s.roomless:
            return s.waiting
        return self._placer.barred(s.name, s.spec.node) if self._placer is not None else ""

    def _open_node(self, name: str, refusal: str) -> None:
        assert self._placer is not None
        if not self._placer.closed(name):
            raise Refused(refusal, why="the node is not drained", hint="slots and roles on it are restarted by name")
        self._placer.open(name)
        self._out.append(Emit("node_opened", {"node": name}))
        self._look_for_room_again()

    def _restart(self, s: Slot) -> None:
        if s.state in ("requested", "starting", "ready", "hung"):
            s.restart_asked = True
            self._stop(s)
        else:
            self._bring_back(s)

    def _restart_gang(self, role: RoleNode, reason: str) -> None:
        for s in role.slots:
            s.drained = False
        if all(s.gated for s in role.slots):
            for s in role.slots:
                s.waiting, s.roomless = "", False
                self._enter(s, "pending", None)
        elif any(s.state != "pending" for s in role.slots):
            self._regroup(role.slots, 0.0, reason)

    def _bring_back(self, s: Slot) -> None:
        """It is on its way down, or is down: let it start again."""
        s.retired = s.drained = False
        if s.live:
            s.restart_asked = True
        elif s.state in ("backoff", "ended") and (s.cohort is None or s.cohort.released):
            if s.given_up:
                s.window.clear()
            s.failed = s.given_up = False
            s.waiting, s.roomless = "", False
            # What has never been started still waits for the tiers below.
            self._enter(s, "pending" if s.gated else "backoff", None if s.gated else 0.0)

    def _on_scale_requested(self, kind: str, count: int) -> None:
        what = f"cannot scale {kind} to {count}"
        role = self._tree.roles.get(kind)
        if role is None:
            raise Refused(what, why="no such role", hint="roles: " + ", ".join(self._tree.roles))
        self._refuse_at_the_end(what)
        self._refuse_system(what, role)
        if role.rules.gang:
            hint = f"change roles.{kind}.count and start the run again: it resumes"
            raise Refused(what, why="it is a gang, and the number of ranks is part of what they compute", hint=hint)
        if not 0 <= count <= MOST_SLOTS:
            raise Refused(what, why=f"a role has 0 to {MOST_SLOTS} slots")
        if role.rules.min_ready is not None and count < role.rules.min_ready:
            raise Refused(what, why=f"roles.{kind}.min_ready = {role.rules.min_ready}")
        before = sum(not s.retired for s in role.slots)
        self._emit_role("scaled", role, before=before, count=count)
        for s in reversed(list(role.slots)):
            if s.index >= count:
                s.retired = True
                self._put_down(s)
        have = {s.index: s for s in role.slots}
        for index in range(count):
            if index not in have:
                self._tree.add(role, index)
            elif have[index].retired or have[index].drained or have[index].given_up:
                self._bring_back(have[index])

    def _on_drain_requested(self, what: str) -> None:
        refusal = f"cannot drain {what!r}"
        self._refuse_at_the_end(refusal)
        if self._placer is not None and what in [node.name for node in self._placer.nodes]:
            self._drain_node(what, refusal)
            return
        s, role = self._tree.slots.get(what), self._tree.roles.get(what)
        if s is None and role is None:
            known = ", ".join([*self._tree.roles, *self._tree.slots])
            raise Refused(refusal, why="no such slot, role or node", hint=f"known: {known}")
        role = role or (s.role if s else None)
        assert role is not None
        self._refuse_system(refusal, role)
        # A gang without one of its ranks is no gang.
        chosen = role.slots if s is None or role.rules.gang else [s]
        for slot in reversed(list(chosen)):
            if slot.state != "ended":
                slot.drained = True
                self._put_down(slot)

    def _drain_node(self, name: str, refusal: str) -> None:
        assert self._placer is not None
        slots = [s for s in self._tree if s.live and s.node == name]
        for s in slots:
            if s.spec.system:
                raise Refused(refusal, why=f"{s.name} runs there, and the run cannot do without it")
        self._placer.close(name, f"it is drained, and `relax-rt restart {name}` opens it again")
        self._out.append(Emit("node_draining", {"node": name, "slots": [s.name for s in slots]}))
        self._move(slots, f"node {name} is being drained")

    def _move(self, slots: Sequence[Slot], cause: str) -> None:
        """Stop them in order; they start again wherever there is room."""
        for s in slots:
            if s.role.rules.gang:
                if s.cohort is None and not s.drained:
                    self._regroup(s.role.slots, 0.0, cause)
            elif s.state in ("requested", "starting", "ready"):
                s.restart_asked = True
                self._stop(s)

    def _put_down(self, s: Slot) -> None:
        self._leave_cohort(s)
        if not s.live:
            self._end_by_request(s)
        elif s.state in ("requested", "starting", "ready"):
            self._stop(s)

    def _end_by_request(self, s: Slot) -> None:
        self._end(s, failed=False)
        if s.retired:
            self._tree.forget(s)
        else:
            s.waiting = "drained: it starts again when it is restarted or its role is scaled"
        self._emit("drained", s, retired=s.retired)

    def _on_node_joined(self, node: Node) -> None:
        if self._placer is None:
            raise Refused(f"node {node.name!r} cannot join", why="this run is for one node")
        self._placer.add(node)
        self._look_for_room_again()

    def _on_node_lost(self, event: NodeLost) -> None:
        if self._placer is None:
            raise Refused(f"node {event.node!r} cannot be lost", why="this run is for one node")
        lost = [s for s in self._tree if s.live and s.node == event.node]
        self._placer.remove(event.node, keep=event.keep)
        for s in lost:
            s.lost = True
        for s in lost:
            cause = f"node {event.node} is lost: {event.reason}"
            diagnosis = Diagnosis(slot=s.name, epoch=s.epoch, pid=s.pid, kind="node_lost", cause=cause, at=event.at)
            self._on_exited(s, diagnosis, counted=False)

    def _on_exited(self, s: Slot, diagnosis: Diagnosis, *, counted: bool = True) -> None:
        raise NotImplementedError

    def _refuse_at_the_end(self, what: str) -> None:
        if self._ending is not None:
            raise Refused(what, why=f"the run is ending: {self._ending.reason}")

    def _refuse_system(self, what: str, role: RoleNode) -> None:
        if role.template.system:
            raise Refused(what, why=f"the run cannot do without its {role.kind}")
