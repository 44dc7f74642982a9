"""A fleet of engines, a registry whose news is late, a network that loses things, callers, and the router's core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router_engine import SimEngine, length, token
from sim_kernel import Kernel

from relax_rt.roles.rollout.router.core import (
    CancelAttempt,
    Deliver,
    Finish,
    GenerationRequest,
    Outcome,
    ProbeEngine,
    RouterAction,
    RouterCore,
    RouterLimits,
    StartAttempt,
)
from relax_rt.roles.rollout.router.fleet import EngineEntry, HealthLimits
from relax_rt.roles.rollout.router.interface import SequenceUpdate
from relax_rt.transport.base.versions import VersionRecord

TWICE, NONE, WRONG, STALE, ROUTED, LEAK, STUCK, UNJUST, ACCOUNT = (
    "two outcomes",
    "no outcome",
    "wrong tokens",
    "begun at a version that was not allowed",
    "sent to an engine known to be at such a version",
    "worked on for nobody",
    "left with an engine that makes nothing",
    "given up without cause",
    "accounts that do not add up",
)
SLOTS = ("rollout/0", "rollout/1", "rollout/2")
LIMITS = RouterLimits(silent_s=2.0, health=HealthLimits(stuck_s=3.0, paused_s=6.0, dead_s=8.0))
STUCK_S, LEAK_S = 9.0, 1.5
SECONDS = 40.0


@dataclass
class Request:
    """What a caller wanted, and has got."""

    wanted: GenerationRequest
    began: float
    until: float
    tokens: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    ended_at: float = float("inf")
    placed_at: float = float("inf")
    moved_at: float = 0.0
    attempt: int = 0
    harm: int = 0


@dataclass(frozen=True)
class Harm:
    """What was done to an engine, and until when it may be felt."""

    who: tuple[str, int]
    begins: float
    until: float


class Checker:
    """Judges by what it has seen itself, with an account of versions of its own."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.findings: list[tuple[str, str]] = []
        self.parents: dict[int, VersionRecord] = {}
        self.told_version: dict[tuple[str, int], int] = {}
        self.told_committed = 0
        self.kept = self.moved = 0

    def found(self, kind: str, what: str) -> None:
        self.findings.append((kind, f"{self.world.kernel.now:.2f} {what}"))

    def kinds(self) -> set[str]:
        return {kind for kind, _ in self.findings}

    def distance(self, a: int, b: int) -> float:
        """By walking up from both, one step at a time."""
        ups: list[dict[int, int]] = []
        for start in (a, b):
            found, at, n = {start: 0}, start, 0
            while at:
                n += self.parents[at].changed
                at = self.parents[at].parent
                found[at] = n
            ups.append(found)
        return min(ups[0][v] + ups[1][v] for v in ups[0] if v in ups[1])

    def may(self, version: int, lag: int) -> bool:
        committed = self.told_committed
        return bool(version) and (version > committed or self.distance(version, committed) <= lag)

    def sent(self, action: StartAttempt, lag: int) -> None:
        place = action.assignment
        version = self.told_version.get((place.slot, place.epoch), 0)
        if not self.may(version, lag):
            self.found(ROUTED, f"{action.number} to {place} at {version}, committed {self.told_committed}")

    def begun(self, engine: SimEngine, action: StartAttempt) -> None:
        request, order = self.world.requests[action.number], action.request
        # What was committed since it was sent nobody can hold against it.
        committed = max(order.allowed)
        near = engine.version > committed or self.distance(engine.version, committed) <= request.wanted.lag
        if not engine.version or not near:
            self.found(STALE, f"{action.number} at {engine.slot}#{engine.epoch}, version {engine.version}")
        # One that was left before it was read, by an engine that stood still, is over as soon as it has begun.
        if action.assignment.attempt == request.attempt and order.tokens != request.tokens and not request.outcomes:
            self.found(WRONG, f"{action.number} goes on with {len(order.tokens)} of {len(request.tokens)} tokens")
        self.kept += len(order.tokens)
        self.moved += bool(order.tokens)

    def works(self, engine: SimEngine, key: tuple[int, int]) -> None:
        request = self.world.requests[key[0]]
        if self.world.kernel.now - max(request.ended_at, engine.frozen_until) > LEAK_S:
            self.found(LEAK, f"{engine.slot}#{engine.epoch} makes {key}")

    def delivered(self, part: Deliver) -> None:
        request = self.world.requests[part.number]
        versions = [span.version for span in part.versions for _ in range(span.start, span.end)]
        right = [token(request.wanted.seed, part.start + n, version) for n, version in enumerate(versions)]
        if part.start != len(request.tokens) or right != part.tokens or request.outcomes:
            self.found(WRONG, f"{part.number} at {part.start}, had {len(request.tokens)}")
        request.tokens += part.tokens
        request.moved_at = self.world.kernel.now

    def ended(self, number: int, outcome: Outcome) -> None:
        request, now = self.world.requests[number], self.world.kernel.now
        request.outcomes.append(outcome)
        request.ended_at = now
        if len(request.outcomes) > 1:
            self.found(TWICE, f"{number}: {[o.kind for o in request.outcomes]}")
        whole = min(length(request.wanted.seed), request.wanted.max_new_tokens)
        if outcome.tokens != request.tokens or (outcome.kind == "done" and len(outcome.tokens) != whole):
            self.found(WRONG, f"{number} ended with {len(outcome.tokens)} of {whole}")
        harmed = {h.who for h in self.world.harms if h.until > request.began and h.begins <= now}
        if outcome.kind == "failed" and len(harmed) + request.harm < LIMITS.losses:
            self.found(UNJUST, f"{number} after {request.harm} and {harmed}: {outcome.why}")

    def look(self) -> None:
        """Every now and then."""
        self._add_up()
        for number, request in self.world.requests.items():
            if not request.outcomes and self.world.kernel.now > request.until + 1.0:
                request.outcomes.append(Outcome(kind="late"))
                self.found(NONE, f"{number}")
            routed = self.world.core.requests.get(number)
            still_s = self.world.kernel.now - max(request.placed_at, request.moved_at)
            if routed is not None and routed.assignment is not None and still_s > STUCK_S:
                self.found(STUCK, f"{number} at {routed.assignment} for {still_s:.1f} s")

    def _add_up(self) -> None:
        """What the core keeps account of as it goes, against a count of all its requests."""
        core = self.world.core
        placed = [request for request in core.requests.values() if request.assignment is not None]
        for slot, engine in core.fleet.engines.items():
            at = [
                request
                for request in placed
                if request.assignment and (request.assignment.slot, request.assignment.epoch) == (slot, engine.epoch)
            ]
            have = core._loads.tokens(slot, engine.epoch), core._loads.longs(slot, engine.epoch)
            if have != (sum(request.expected for request in at), sum(request.long for request in at)):
                self.found(
                    ACCOUNT, f"{slot}#{engine.epoch} has {have}, its sequences are {[request.number for request in at]}"
                )
        waiting = sum(core._waiting.by_lag().values())
        if waiting != len(core.requests) - len(placed) or len(core._loads._noted) != len(placed):
            self.found(ACCOUNT, f"{len(core.requests)} requests, {len(placed)} placed, {waiting} waiting")


class World:
    """One run, by its seed."""

    def __init__(self, seed: int, *, faulty: bool = True) -> None:
        self.kernel = Kernel(seed)
        self.random, self.faulty = self.kernel.random, faulty
        self.checker = Checker(self)
        self.core = RouterCore(LIMITS)
        self.engines: dict[str, SimEngine] = {}
        self.members: dict[str, EngineEntry] = {}
        self.versions: list[VersionRecord] = []
        self.requests: dict[int, Request] = {}
        self.harms: list[Harm] = []
        self.quiet: dict[tuple[int, int], float] = {}
        self._line: dict[str, float] = {}
        self._epochs = self._news_due = 0
        self._news_at = self._away_until = 0.0
        for slot in SLOTS:
            self._spawn(slot)
        self._publish()
        self._arrive()
        self._tick()
        if faulty:
            self._harm()
        self.kernel.run(self._over, SECONDS * 4)
        self.kernel.run(lambda: False, self.kernel.now + 3.0)

    def _over(self) -> bool:
        return self.kernel.now > SECONDS and all(r.outcomes for r in self.requests.values())

    # --- the router's actions, and what reaches it

    def do(self, actions: Sequence[RouterAction]) -> None:
        for action in actions:
            match action:
                case StartAttempt(number, place):
                    request = self.requests[number]
                    request.placed_at, request.attempt = self.kernel.now, place.attempt
                    self.checker.sent(action, request.wanted.lag)
                    if self._lost():
                        request.harm += 1
                    else:
                        self._to_engine(place.slot, lambda e, a=action: e.open(a), self._refusal(action), 2.0)  # type: ignore[misc]
                case CancelAttempt(number, place):
                    key = number, place.attempt
                    self._to_engine(place.slot, lambda e, k=key: e.close(k), lambda: None)  # type: ignore[misc]
                case Deliver():
                    self.checker.delivered(action)
                case Finish(number, outcome):
                    self.checker.ended(number, outcome)
                case ProbeEngine(slot, epoch):
                    self._probe(slot, epoch)

    def _refusal(self, action: StartAttempt) -> Callable[[], None]:
        """Nobody is there: the connection is refused."""

        def refused() -> None:
            self.do(self.core.on_failure(self.kernel.now, action.number, action.assignment.attempt, "nobody answers"))

        return refused

    def _to_engine(
        self, slot: str, call: Callable[[SimEngine], None], nobody: Callable[[], None], patience_s: float = 0.0
    ) -> None:
        """To whoever has the slot's address by then, tried again for a while; what stands still reads it later."""
        until = self.kernel.now + patience_s

        def arrive() -> None:
            engine = self.engines[slot]
            if engine.alive:
                engine.inbox.append((call, nobody))
                engine.read()
            elif self.kernel.now < until:
                self.kernel.after(0.05, arrive)
            else:
                nobody()

        at = self._line[slot] = max(self._line.get(slot, 0.0), self.kernel.now + self.random.uniform(0.001, 0.02))
        self.kernel.after(at - self.kernel.now, arrive)

    def from_engine(self, engine: SimEngine, key: tuple[int, int], piece: SequenceUpdate) -> None:
        """In order on a stream; now and then one is lost."""
        if piece.tokens and self._lost():
            self.requests[key[0]].harm += 1
            return
        at = max(self.quiet.get(key, 0.0), self.kernel.now + self.random.uniform(0.001, 0.03))
        self.quiet[key] = at

        def arrive() -> None:
            self._told(engine.slot, piece.report.epoch, piece.report.version)
            self.do(self.core.on_update(self.kernel.now, key[0], key[1], piece))

        self.kernel.after(at - self.kernel.now, arrive)

    def _told(self, slot: str, epoch: int, version: int) -> None:
        known = self.checker.told_version
        known[slot, epoch] = max(known.get((slot, epoch), 0), version)

    def _lost(self) -> bool:
        return self.faulty and self.random.random() < 0.004

    def _probe(self, slot: str, epoch: int) -> None:
        answered: list[bool] = []

        def answer(engine: SimEngine) -> None:
            report = engine.report()

            def arrive() -> None:
                if not answered:
                    answered.append(True)
                    self._told(slot, report.epoch, report.version)
                    self.do(self.core.on_report(self.kernel.now, slot, report))

            self.kernel.after(self.random.uniform(0.001, 0.02), arrive)

        def no_answer() -> None:
            if not answered:
                answered.append(True)
                self.do(self.core.on_no_report(self.kernel.now, slot, epoch, "no answer"))

        self._to_engine(slot, answer, no_answer)
        self.kernel.after(2.0, no_answer)

    # --- what happens

    def _tick(self) -> None:
        self.kernel.after(0.1, self._tick)
        self.do(self.core.tick(self.kernel.now))
        self.checker.look()

    def _arrive(self) -> None:
        rng = self.random
        if self.kernel.now < SECONDS:
            self.kernel.after(rng.expovariate(4.0), self._arrive)
        wanted = GenerationRequest(
            prompt=(1, 2),
            seed=rng.randrange(10**6),
            max_new_tokens=rng.choice((20, 100, 200)),
            stop_ids=frozenset({0}),
            timeout_s=rng.uniform(12.0, 40.0),
            lag=rng.choice((0, 0, 1, 2)),
            session=rng.choice(("", "", "a", "b")),
        )
        number = self.core._numbers + 1
        self.requests[number] = Request(wanted, self.kernel.now, self.kernel.now + wanted.timeout_s)
        self.do(self.core.submit(self.kernel.now, wanted)[1])
        if rng.random() < 0.1:
            self.kernel.after(rng.uniform(0.0, 6.0), lambda: self.do(self.core.cancel(self.kernel.now, number)))

    def _publish(self) -> None:
        rng = self.random
        self.kernel.after(rng.uniform(2.0, 6.0), self._publish)
        number = (self.versions[-1].version if self.versions else 0) + rng.choice((1, 1, 2))
        parent = self.versions[-1].version if self.versions else 0
        back = len(self.versions) > 4 and rng.random() < 0.35
        if back:
            parent = self.versions[-rng.choice((2, 3, 4))].version
        record = VersionRecord(number, parent, len(self.versions), changed=not back)
        self.versions.append(record)
        self.checker.parents[number] = record
        for slot in SLOTS:
            self._fetch(slot, record)
        self._news()

    def _fetch(self, slot: str, record: VersionRecord) -> None:
        engine = self.engines[slot]

        def swap() -> None:
            if engine.alive and record.version > engine.version:
                if self.kernel.now < engine.frozen_until:
                    self.kernel.after(engine.frozen_until - self.kernel.now, swap)
                    return
                engine.version = record.version
                engine.swapping_until = self.kernel.now + self.random.uniform(0.0, 0.4)
                self._enter(slot, "ready")

        self.kernel.after(self.random.uniform(0.1, 2.5), swap)

    def _enter(self, slot: str, state: str) -> None:
        engine = self.engines[slot]
        self.members[slot] = EngineEntry(slot, engine.epoch, state, engine.version, engine.generated)
        self._news()

    def _news(self) -> None:
        """In order, and late; a registry that is away tells it when it is back."""
        at = max(self._news_at, self.kernel.now + self.random.uniform(0.005, 0.3), self._away_until)
        self._news_at = at
        members, versions = list(self.members.values()), list(self.versions)

        def arrive() -> None:
            for member in members:
                self._told(member.slot, member.epoch, member.version)
            if versions:
                self.checker.told_committed = versions[-1].version
            self.do(self.core.on_members(self.kernel.now, members, versions))

        self.kernel.after(at - self.kernel.now, arrive)

    def _spawn(self, slot: str) -> None:
        self._epochs += 1
        self.engines[slot] = SimEngine(self, slot, self._epochs)
        self._enter(slot, "starting")
        if self.versions:
            self._fetch(slot, self.versions[-1])

    # --- harm

    def _harm(self) -> None:
        rng = self.random
        self.kernel.after(rng.expovariate(0.5), self._harm)
        if self.kernel.now > SECONDS:
            return
        engine = self.engines[rng.choice(SLOTS)]
        how = rng.choice(("kill", "kill", "freeze", "hang", "stop", "cut", "registry"))
        if how == "registry":
            self._away_until = self.kernel.now + rng.uniform(0.5, 4.0)
        elif not engine.alive:
            return
        elif how == "freeze":
            engine.frozen_until = self.kernel.now + rng.choice((1.0, 4.0, 15.0))
            self._harmed(engine, engine.frozen_until)
        elif how == "hang":
            engine.hung_until = self.kernel.now + rng.choice((1.0, 5.0, 1e9))
            self._harmed(engine, engine.hung_until)
            if engine.hung_until > 1e6:
                self.kernel.after(12.0, lambda: self._kill(engine))
        elif how == "cut":
            self._cut(engine)
        elif how == "stop":
            if self.kernel.now >= engine.frozen_until:
                engine.stop()
                self._enter(engine.slot, "draining")
                self.kernel.after(0.5, lambda: self._kill(engine))
        else:
            self._kill(engine)

    def _harmed(self, engine: SimEngine, until: float) -> None:
        self.harms.append(Harm((engine.slot, engine.epoch), self.kernel.now, until + 3.0))

    def _cut(self, engine: SimEngine) -> None:
        """Its connections end, and with them what it makes for them; most of the ends are noticed."""
        self._harmed(engine, self.kernel.now)
        for key in list(engine.seqs):
            del engine.seqs[key]
            if self.random.random() < 0.8:
                self.kernel.after(
                    self.random.uniform(0.001, 0.1),
                    lambda k=key: self.do(self.core.on_failure(self.kernel.now, k[0], k[1], "cut")),  # type: ignore[misc]
                )

    def _kill(self, engine: SimEngine) -> None:
        if not engine.alive:
            return
        self._cut(engine)
        engine.alive = False
        for _, nobody in engine.inbox:
            nobody()
        engine.inbox.clear()
        slot, rng = engine.slot, self.random
        self.kernel.after(rng.uniform(0.01, 1.0), lambda: self._enter(slot, "gone"))
        self.kernel.after(rng.uniform(1.0, 3.0), lambda: self._spawn(slot))
