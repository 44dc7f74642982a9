"""The router without input and output: events in, actions out. Engines, choice and the requests' lives put together.

Of every request that `submit` gave a number exactly one End comes, and after it nothing more.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

import msgspec

from relax_rt.roles.rollout.generation import EngineReport, Order, Piece
from relax_rt.roles.rollout.router.choice import Candidate, Lengths, Need, choose, prefix_key
from relax_rt.roles.rollout.router.fleet import EngineNews, Fleet, Patience, Sign
from relax_rt.roles.rollout.router.requests import Life, Outcome, Place, Wanted
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a router.

    Attributes:
        requests: at hand at once, at most.
        losses: engines that may be lost with one request before it is given up: it may be what kills them.
        silent_s: an engine that says nothing for so long is taken to be lost.
        full_s: an engine that turned a request away is not asked again for so long.
        first_room: sequences that an engine is sent before it has said how many it takes.
        patience: with engines.
    """

    requests: int = 8192
    losses: int = 3
    silent_s: float = 5.0
    full_s: float = 0.25
    first_room: int = 8
    patience: Patience = msgspec.field(default_factory=Patience)


class Open(msgspec.Struct, frozen=True):
    """Have an engine begin, or go on with, a sequence."""

    number: int
    place: Place
    order: Order


class Close(msgspec.Struct, frozen=True):
    """Leave a stream that is open: its engine is to end the sequence."""

    number: int
    place: Place


class RouterFull(Refused):
    """A router has as many requests at hand as it takes: later it may take this one."""


class Deliver(msgspec.Struct, frozen=True):
    """Tokens of a request, in order; each is delivered once. `routing` and `prompt_routing` as in Piece, if wanted."""

    number: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    routing: bytes = b""
    prompt_routing: bytes = b""


class End(msgspec.Struct, frozen=True):
    """The outcome of a request."""

    number: int
    outcome: Outcome


class Probe(msgspec.Struct, frozen=True):
    """Ask an engine how it does."""

    slot: str
    epoch: int


Action = Open | Close | Deliver | End | Probe


class RouterCore:
    """See the module."""

    def __init__(self, limits: Limits | None = None, *, frozen: bool = False) -> None:
        self.limits = limits or Limits()
        self.fleet = Fleet(self.limits.patience, frozen=frozen)
        self.lives: dict[int, Life] = {}
        self.counts: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        """Sequences sent to each slot."""
        self._waiting = _Waiting()
        self._loads = _Loads()
        self._lengths = Lengths()
        self._numbers = 0
        self._actions: list[Action] = []

    # --- events

    def submit(self, now: float, wanted: Wanted) -> tuple[int, list[Action]]:
        """A new request.

        Raises:
            Refused: it asks for nothing. RouterFull: too many are at hand.
        """
        if not wanted.prompt or wanted.max_new_tokens < 1 or wanted.timeout_s <= 0 or wanted.lag < 0:
            raise Refused(
                f"a request for {wanted.max_new_tokens} tokens behind {len(wanted.prompt)} in {wanted.timeout_s:g} s",
                why="a prompt, at least one token, some time and a lag that is not negative are needed",
            )
        if len(self.lives) >= self.limits.requests:
            raise RouterFull(
                "a request", why=f"{len(self.lives)} are at hand, the router's bound", hint="send fewer at a time"
            )
        self._numbers += 1
        life = Life(self._numbers, wanted, now, self.limits.losses, lowest=0 if self.fleet.frozen else 1)
        life.long = self._lengths.long(life.expected)
        self.lives[life.number] = life
        self._waiting.add(life)
        self.counts["submitted"] += 1
        return life.number, self._done(now)

    def cancel(self, now: float, number: int) -> list[Action]:
        """The owner of a request wants it no more; without effect if it has its outcome."""
        if (life := self.lives.get(number)) is not None:
            self._leave(life)
            life.cancel()
            self._end(life)
        return self._done(now)

    def news(self, now: float, members: Iterable[EngineNews], versions: Sequence[VersionRecord]) -> list[Action]:
        """What the registry says: all engines, and the committed versions (at least those that are new)."""
        self.fleet.commit(versions)
        self.fleet.news(now, members)
        self._take_away(now)
        return self._done(now)

    def piece(self, now: float, number: int, attempt: int, piece: Piece) -> list[Action]:
        """An engine says something on the stream of an attempt."""
        life = self.lives.get(number)
        if life is None or life.place is None or not life.takes(attempt):
            return []
        self._meet(life)
        self.fleet.heard(now, life.place.slot, sign_of(piece.report))
        place, before = self._who_answers(now, life, piece.report.epoch), len(life.tokens)
        older = f"an older incarnation, #{piece.report.epoch}, answers" if piece.report.epoch < place.epoch else ""
        wrong = older or life.add(now, piece)
        self._loads.note(life)
        if wrong:
            # Left too: the engine thinks that it still has the sequence.
            self._lose(now, life, f"{place.slot}#{place.epoch}: {wrong}", close=True)
            return self._done(now)
        if piece.tokens:
            self.counts["tokens"] += len(piece.tokens)
            rows, prompt = (piece.routing, piece.prompt_routing) if life.wanted.routing else (b"", b"")
            self._actions.append(Deliver(number, before, piece.tokens, piece.logprobs, piece.versions, rows, prompt))
        if life.outcome is not None:
            self.fleet.left(place.slot, place.epoch, met=True, ended=True)
            self._end(life)
        elif piece.turned_away or piece.finish_reason == "abort":
            self._turned_away(now, life, place, piece)
        return self._done(now)

    def failed(self, now: float, number: int, attempt: int, why: str, *, never: bool = False) -> list[Action]:
        """The stream of an attempt broke or ended; `never`: the engine says that no engine could do it."""
        life = self.lives.get(number)
        if life is None or life.place is None or not life.takes(attempt):
            return []
        place = life.place
        if never:
            self._release(life)
            life.refuse(why)
            self._end(life)
        else:
            self.fleet.lost(now, place.slot, place.epoch, why)
            self._lose(now, life, f"{place.slot}#{place.epoch}: {why}")
        return self._done(now)

    def returned(self, now: float, number: int, attempt: int, why: str) -> list[Action]:
        """The engine of an attempt is stopping in order and has not begun it."""
        life = self.lives.get(number)
        if life is not None and life.place is not None and life.takes(attempt):
            self.counts["turned_away_stopping"] += 1
            self.fleet.full(now, life.place.slot, self.limits.full_s)
            self._release(life)
            life.give_back(why)
            self._waiting.add(life)
        return self._done(now)

    def report(self, now: float, slot: str, report: EngineReport) -> list[Action]:
        """A probe was answered."""
        self.fleet.heard(now, slot, sign_of(report))
        return self._done(now)

    def no_report(self, now: float, slot: str, epoch: int, why: str) -> list[Action]:
        """A probe was not answered."""
        self.fleet.lost(now, slot, epoch, why)
        return self._done(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed: to be called every now and then."""
        self.fleet.tick(now)
        for life in [life for life in self.lives.values() if now >= life.deadline]:
            slow = life.place is not None and bool(life.tokens) and not life.waiting_on
            self._leave(life)
            if life.number in self._waiting:
                life.waiting_on = self._why_nowhere(life.wanted.lag)
            life.expire(slow=slow)
            self._end(life)
        for life in list(self.lives.values()):
            if (place := life.place) is not None and now - life.heard_at > self.limits.silent_s:
                why = f"silent for {now - life.heard_at:.1f} s"
                self.fleet.lost(now, place.slot, place.epoch, why)
                self._lose(now, life, f"{place.slot}#{place.epoch}: {why}", close=True)
        self._take_away(now)
        if self.lives:
            self._actions += [Probe(engine.slot, engine.epoch) for engine in self.fleet.to_probe(now)]
        return self._done(now)

    # --- what is to be seen

    def waiting_on(self) -> dict[str, int]:
        """What requests wait for, in words, and how many for each."""
        found = Counter(life.waiting_on for life in self.lives.values() if life.place is not None and life.waiting_on)
        for lag, count in self._waiting.by_lag().items():
            found[self._why_nowhere(lag)] += count
        return dict(found)

    def outstanding(self, slot: str, epoch: int) -> int:
        """Tokens that an incarnation has to make for our requests, as expected."""
        return self._loads.ours(slot, epoch)

    # --- inside

    def _done(self, now: float) -> list[Action]:
        """Send what can be sent; the actions since the last time."""
        self._send(now)
        actions, self._actions = self._actions, []
        return actions

    def _send(self, now: float) -> None:
        """Send requests that wait to engines that may have them, the oldest first.

        This follows every event: it costs as much as there are engines and requests sent, not as many as wait.
        """
        if not self._waiting:
            return
        fleet, first = self.fleet, self.limits.first_room
        room = [slot for slot in sorted(fleet.engines) if fleet.room(now, slot, first) > 0]
        nowhere: set[int] = set()
        while room and (number := self._waiting.first(nowhere)):
            life = self.lives[number]
            candidates = [self._candidate(slot) for slot in room if fleet.routable(slot, life.wanted.lag)]
            # Where it was lost once it goes only if there is nobody else.
            others = [c for c in candidates if (c.slot, fleet.engines[c.slot].epoch) not in life.lost_with]
            slot = choose(_need(life), others or candidates)
            if not slot:
                nowhere.add(life.wanted.lag)
                continue
            self._place(now, life, slot)
            if fleet.room(now, slot, first) <= 0:
                room.remove(slot)

    def _candidate(self, slot: str) -> Candidate:
        engine = self.fleet.engines[slot]
        # Its own word counts also what others have sent there, but is as old as it is.
        told = engine.sign.outstanding_tokens if engine.sign is not None else 0
        ours = self._loads.ours(slot, engine.epoch)
        return Candidate(slot, max(ours, told), self._loads.longs(slot, engine.epoch))

    def _place(self, now: float, life: Life, slot: str) -> None:
        engine, wanted = self.fleet.engines[slot], life.wanted
        place = life.send(now, slot, engine.epoch)
        self._waiting.drop(life)
        self._loads.note(life)
        self.fleet.took(now, slot, engine.epoch)
        self.sent[slot] += 1
        self.counts["sent"] += 1
        if life.tokens:
            self.counts["continued"] += 1
            self.counts["tokens_kept"] += len(life.tokens)
        order = Order(
            prompt=list(wanted.prompt),
            seed=wanted.seed,
            temperature=wanted.temperature,
            max_new_tokens=wanted.max_new_tokens,
            stop_ids=sorted(wanted.stop_ids),
            tokens=list(life.tokens),
            logprobs=list(life.logprobs),
            versions=list(life.versions),
            routing=wanted.routing,
            rows_from=wanted.rows_from,
            media=list(wanted.media),
            rows=bytes(life.routing),
            allowed=list(self.fleet.allowed(wanted.lag)),
            chunk_tokens=wanted.chunk_tokens,
            left_s=max(0.0, life.deadline - now),
        )
        self._actions.append(Open(life.number, place, order))

    def _why_nowhere(self, lag: int) -> str:
        if not self.fleet.engines:
            return "an engine: none has entered the registry"
        version = self.fleet.committed.version
        if not version and not self.fleet.frozen:
            return "the first committed weights"
        near = f" (or {lag} behind)" if lag else ""
        states = ", ".join(self.fleet.why_not(slot, lag) for slot in sorted(self.fleet.engines)[:8])
        which = "an engine" if self.fleet.frozen else f"an engine at version {version}{near}"
        return f"{which}: {states}"

    def _meet(self, life: Life) -> None:
        """Its engine says something of it."""
        assert life.place is not None
        if not life.met:
            life.met = True
            self.fleet.met(life.place.slot, life.place.epoch)

    def _who_answers(self, now: float, life: Life, epoch: int) -> Place:
        """Where the request is: a new incarnation may have taken the old one's address before the stream was opened."""
        place = life.place
        assert place is not None
        if epoch > place.epoch:
            self.fleet.left(place.slot, place.epoch, met=True)
            place = life.place = Place(place.attempt, place.slot, epoch)
            self.fleet.took(now, place.slot, epoch)
            self.fleet.met(place.slot, epoch)
            self._loads.note(life)
        return place

    def _turned_away(self, now: float, life: Life, place: Place, piece: Piece) -> None:
        """Its engine did not begin it, or gives it up because it stops."""
        reason = piece.turned_away or "aborted"
        self.counts[f"turned_away_{reason}"] += 1
        if reason != "full" or piece.report.room > 0:
            # What is known of it says so now, and its next word may say otherwise; if not, it is not asked at once.
            self.fleet.full(now, place.slot, self.limits.full_s)
        self._release(life, ended=True)
        life.give_back(f"{place.slot} turned it away: {reason}")
        self._waiting.add(life)

    def _take_away(self, now: float) -> None:
        """Take sequences away from engines that will not make them."""
        for life in list(self.lives.values()):
            if (place := life.place) is not None and (why := self.fleet.stuck(place.slot, place.epoch)):
                self._lose(now, life, f"{place.slot}#{place.epoch}: {why}", close=True)

    def _lose(self, now: float, life: Life, why: str, *, close: bool = False) -> None:
        self.counts["lost"] += 1
        if close and life.place is not None:
            self._actions.append(Close(life.number, life.place))
        self._unwork(life)
        life.lose(why)
        self._loads.note(life)
        if life.outcome is not None:
            self._end(life)
        else:
            self._waiting.add(life)

    def _leave(self, life: Life) -> None:
        """Have the engine end it, if one has it."""
        if life.place is not None:
            self._actions.append(Close(life.number, life.place))
            self._release(life)

    def _release(self, life: Life, *, ended: bool = False) -> None:
        self._unwork(life, ended=ended)
        life.place = None
        self._loads.note(life)

    def _unwork(self, life: Life, *, ended: bool = False) -> None:
        if life.place is not None:
            self.fleet.left(life.place.slot, life.place.epoch, met=life.met, ended=ended)

    def _end(self, life: Life) -> None:
        assert life.outcome is not None
        del self.lives[life.number]
        self._waiting.drop(life)
        self._loads.note(life)
        self.counts[life.outcome.kind] += 1
        self._actions.append(End(life.number, life.outcome))


class _Waiting:
    """Numbers of the requests that wait, the oldest first, and those with one lag apart from the others."""

    def __init__(self) -> None:
        self._lines: dict[int, OrderedDict[int, int]] = {}
        self._turns = 0

    def __bool__(self) -> bool:
        return bool(self._lines)

    def __contains__(self, number: int) -> bool:
        return any(number in line for line in self._lines.values())

    def add(self, life: Life) -> None:
        """At the end."""
        self._turns += 1
        self._lines.setdefault(life.wanted.lag, OrderedDict())[life.number] = self._turns

    def drop(self, life: Life) -> None:
        """Whether it waits or not."""
        if (line := self._lines.get(life.wanted.lag)) is not None:
            line.pop(life.number, None)
            if not line:
                del self._lines[life.wanted.lag]

    def first(self, but: Collection[int]) -> int:
        """The oldest one with another lag than these; 0: there is none."""
        heads = [next(iter(line.items())) for lag, line in self._lines.items() if lag not in but]
        return min(heads, key=lambda head: head[1])[0] if heads else 0

    def by_lag(self) -> dict[int, int]:
        """How many there are."""
        return {lag: len(line) for lag, line in self._lines.items()}


class _Loads:
    """What each incarnation has to do for us, kept up as requests move and grow."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[tuple[str, int], int, bool]] = {}
        self._ours: Counter[tuple[str, int]] = Counter()
        self._longs: Counter[tuple[str, int]] = Counter()

    def note(self, life: Life) -> None:
        """A request may have another place, or more tokens, than when it was last noted."""
        if (before := self._of.pop(life.number, None)) is not None:
            self._add(before[0], -before[1], -before[2])
        if (place := life.place) is not None and life.outcome is None:
            self._of[life.number] = (place.slot, place.epoch), life.expected, life.long
            self._add((place.slot, place.epoch), life.expected, life.long)

    def ours(self, slot: str, epoch: int) -> int:
        """Tokens to come, as expected."""
        return self._ours[slot, epoch]

    def longs(self, slot: str, epoch: int) -> int:
        """Long sequences."""
        return self._longs[slot, epoch]

    def _add(self, who: tuple[str, int], tokens: int, longs: int) -> None:
        for counter, n in ((self._ours, tokens), (self._longs, longs)):
            counter[who] += n
            if not counter[who]:
                del counter[who]  # incarnations come and go


def _need(life: Life) -> Need:
    wanted = life.wanted
    affinity = f"session {wanted.session}" if wanted.session else prefix_key(wanted.prompt) if wanted.prefix else ""
    return Need(str(life.number), life.expected, affinity, life.long)


def sign_of(report: EngineReport) -> Sign:
    """An engine's report as the fleet takes it."""
    return Sign(
        epoch=report.epoch,
        version=report.version,
        generated=report.generated,
        outstanding_tokens=report.outstanding_tokens,
        room=report.room,
        kv_used=report.kv_used,
        waiting_on=report.waiting_on,
        stopping=report.stopping,
    )
