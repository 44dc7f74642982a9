"""The router's state machine: events in, actions out. Pure; `router.router` is its shell.

A request waits, is assigned to an engine, may move to another one, and has exactly one outcome: exactly one `Finish`
follows for each request that `submit` gave a number, and nothing after it.

Tokens that arrived are kept when their engine is lost: the next engine resumes behind them. An update is accepted only
if it continues the sequence, token by token, each with its version; an engine whose update does not has lost the
sequence, as if it had died. Losses are bounded; rejections are not counted, the deadline bounds them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from hashlib import blake2b
from typing import Literal

import msgspec

from relax_rt.roles.data.media.images import ImageSpan
from relax_rt.roles.rollout.engines.base import extend_spans, invalid_sampling
from relax_rt.roles.rollout.router.fleet import EngineEntry, Fleet, HealthLimits
from relax_rt.roles.rollout.router.interface import EngineReport, SequenceRequest, SequenceUpdate
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused

LOSSES_PER_ENGINE = 3
"""A request fails after this many losses for each engine that it may lose: connections end without a death, too."""
LOAD_LIMIT = 1.25
"""An engine gets requests by affinity up to this multiple of the mean load."""
PREFIX_TOKENS = 64
"""Prompts with these first tokens in common go to one engine, if affinity by prefix is requested."""
LONG_FACTOR = 2.0
"""A request is long if it is expected to have this multiple of the recent mean length."""
NEWEST_WEIGHT = 0.05
"""Weight of the newest request in that mean."""

OutcomeKind = Literal["done", "cancelled", "late", "failed", "refused"]


class RouterLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of a router.

    Attributes:
        requests: open at once, at most.
        losses: engines that may be lost with one request before it fails, because it may be the cause.
        silent_s: an assigned engine without an update for so long counts as lost.
        full_s: an engine that rejected a request is not asked again for so long.
        first_room: sequences sent to an engine before its first report.
        health: timeouts of engines.
    """

    requests: int = 8192
    losses: int = 3
    silent_s: float = 5.0
    full_s: float = 0.25
    first_room: int = 8
    health: HealthLimits = msgspec.field(default_factory=HealthLimits)


class RouterFull(Refused):
    """A router has as many open requests as it takes; try again later."""


# --- requests


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence to generate, as a caller of the router asks for it.

    Attributes:
        seed, temperature, stop_ids: as in GroupRequest.
        timeout_s: the request ends by then, finished or not.
        lag: publications that the engine's weights may be behind the committed ones when the request is sent.
        session: requests of one session go to one engine unless that is overloaded.
        prefix: the same for requests whose prompts begin alike.
        expected_tokens: expected length; 0: max_new_tokens.
        chunk_tokens: approximate number of tokens in an update.
        routing: return routing rows, of the prompt from position `rows_from` on; needs engines started for them.
        media: the images in the prompt; only engines whose model takes images accept them.
    """

    prompt: tuple[int, ...]
    seed: int = 0
    temperature: float = 1.0
    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    timeout_s: float = 300.0
    lag: int = 0
    session: str = ""
    prefix: bool = False
    expected_tokens: int = 0
    chunk_tokens: int = 8
    routing: bool = False
    rows_from: int = 0
    media: tuple[ImageSpan, ...] = ()

    def __post_init__(self) -> None:
        # Refused here, because no engine would accept it; only engines know the vocabulary.
        invalid = invalid_sampling((self.seed,), self.temperature)
        outside = (token for token in (*self.prompt, *self.stop_ids) if not 0 <= token < 1 << 31)
        if not invalid and (token := next(outside, None)) is not None:
            invalid = f"token {token}"
        if not invalid and not 0 <= self.rows_from <= max(0, len(self.prompt) - 1):
            invalid = f"routing rows from position {self.rows_from} on of a prompt of {len(self.prompt)}"
        if invalid:
            raise Refused(f"a request with {invalid}", why="no engine samples with that")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended.

    Attributes:
        kind: done; cancelled by its caller; late: its deadline passed; failed: too many engines were lost with it;
            refused: an engine says that no engine could serve it.
        finish_reason: stop or length, if it is done.
        tokens, logprobs, versions: what was generated, also if it is not done; versions over positions of the
            completion.
        engines: incarnations that worked on it, in order, as ``rollout/0#3``.
        why: of an outcome that is not done.
        slow: late although an engine was generating its tokens: more time would help, another engine would not.
        routing, prompt_routing: routing rows, if requested: one for each token; those of the positions before the
            prompt's last, from `rows_from` on.
    """

    kind: OutcomeKind
    finish_reason: str = ""
    tokens: list[int] = []
    logprobs: list[float] = []
    versions: list[VersionSpan] = []
    engines: list[str] = []
    why: str = ""
    slow: bool = False
    routing: bytes = b""
    prompt_routing: bytes = b""


class Assignment(msgspec.Struct, frozen=True):
    """The engine that works on a request; attempts are numbered from 1."""

    attempt: int
    slot: str
    epoch: int


class RequestState:
    """One open request. `assignment`, `outcome` and the tokens are to be read, not set."""

    def __init__(
        self, number: int, wanted: GenerationRequest, now: float, max_losses: int, lowest_version: int = 1
    ) -> None:
        self.number, self.wanted, self._lowest_version = number, wanted, lowest_version
        self.deadline = now + wanted.timeout_s
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[VersionSpan] = []
        self.routing = bytearray()
        self.prompt_routing = b""
        self.assignment: Assignment | None = None
        self.acknowledged = False
        """The assigned engine has sent an update for it."""
        self.heard_at = now
        self.outcome: Outcome | None = None
        self.waiting_on = "its turn"
        self.losses: list[str] = []
        self.lost_with: set[tuple[str, int]] = set()
        """Incarnations that were lost while they had it."""
        self.engines: list[str] = []
        self.long = False
        self._max_losses = max_losses
        self._attempts = 0

    @property
    def left(self) -> int:
        """Number of tokens that may still come."""
        return self.wanted.max_new_tokens - len(self.tokens)

    @property
    def expected(self) -> int:
        """Expected number of tokens still to come, at least one."""
        length = min(self.wanted.expected_tokens or self.wanted.max_new_tokens, self.wanted.max_new_tokens)
        return max(1, length - len(self.tokens))

    def assign(self, now: float, slot: str, epoch: int) -> Assignment:
        """Assign it to an engine."""
        assert self.outcome is None and self.assignment is None
        self._attempts += 1
        self.assignment, self.acknowledged = Assignment(self._attempts, slot, epoch), False
        self.heard_at, self.waiting_on = now, f"the first token of {slot}"
        return self.assignment

    def add(self, now: float, update: SequenceUpdate) -> str:
        """Apply an update of the current attempt. Return why it does not fit; then nothing has changed."""
        self.heard_at = now
        if mismatch := self._mismatch(update):
            return mismatch
        assert self.assignment is not None
        if update.tokens:
            who = f"{self.assignment.slot}#{self.assignment.epoch}"
            if not self.engines or self.engines[-1] != who:
                self.engines.append(who)
            self.tokens += update.tokens
            self.logprobs += update.logprobs
            for span in update.versions:
                extend_spans(self.versions, span)
            if self.wanted.routing:
                self.routing += update.routing
                self.prompt_routing = update.prompt_routing or self.prompt_routing
            self.waiting_on = ""
        if update.report.waiting_on:
            self.waiting_on = f"{self.assignment.slot}: {update.report.waiting_on}"
        if update.finish_reason in ("stop", "length"):
            self.assignment = None
            self._finish("done", finish_reason=update.finish_reason)
        return ""

    def _mismatch(self, update: SequenceUpdate) -> str:
        """Why an update cannot belong to this sequence."""
        have, n = len(self.tokens), len(update.tokens)
        if n and update.start != have:
            return f"a piece begins at token {update.start}, expected {have}"
        if len(update.logprobs) != n:
            return f"{n} tokens with {len(update.logprobs)} log-probabilities"
        if n > self.left:
            return f"{have + n} tokens, at most {self.wanted.max_new_tokens} were wanted"
        at = have
        for span in update.versions:
            if span.start != at or span.end <= at or not self._lowest_version <= span.kv_version <= span.version:
                return f"versions {update.versions} of tokens {have} to {have + n}"
            at = span.end
        if at != have + n:
            return f"tokens {at} to {have + n} are of no known version"
        last = update.tokens[-1] if n else self.tokens[-1] if have else None
        if update.finish_reason == "stop" and last not in self.wanted.stop_ids:
            return f"it ended with token {last}, which is none to stop at"
        if update.finish_reason == "length" and n != self.left:
            return f"it ended at its length with {have + n} tokens of {self.wanted.max_new_tokens}"
        if not n or not self.wanted.routing:
            return ""
        row, rest = divmod(len(update.routing), n)
        if not row or rest or row * have != len(self.routing):
            return f"{n} tokens with {len(update.routing)} bytes of routing rows"
        prompt = len(update.prompt_routing)
        if (prompt or not have) and prompt != (len(self.wanted.prompt) - 1 - self.wanted.rows_from) * row:
            of = f"a prompt of {len(self.wanted.prompt)}, from position {self.wanted.rows_from} on,"
            return f"{of} with {prompt} bytes of rows of {row}"
        return ""

    def engine_lost(self, why: str) -> None:
        """Unassign it from a lost engine; it fails after too many losses."""
        assert self.assignment is not None
        self.lost_with.add((self.assignment.slot, self.assignment.epoch))
        self.unassign(why)
        self.losses.append(why)
        if len(self.lost_with) >= self._max_losses or len(self.losses) >= LOSSES_PER_ENGINE * self._max_losses:
            self._finish("failed", why=f"{len(self.lost_with)} engines were lost with it: " + "; ".join(self.losses))

    def unassign(self, why: str) -> None:
        """Unassign it from an engine that rejected it: it waits again."""
        self.assignment = None
        self.waiting_on = why

    def refuse(self, why: str) -> None:
        """End it: an engine says that no engine could serve it."""
        self._finish("refused", why=why)

    def cancel(self) -> None:
        """End it on behalf of its caller."""
        self._finish("cancelled", why="cancelled by its caller")

    def expire(self, *, slow: bool = False) -> None:
        """End it at its deadline; `slow`: while an engine was generating its tokens."""
        last = f"; it waited for {self.waiting_on}" if self.waiting_on else ""
        self._finish(
            "late", why=f"not finished in {self.wanted.timeout_s:g} s, {len(self.tokens)} tokens made{last}", slow=slow
        )

    def _finish(self, kind: OutcomeKind, *, finish_reason: str = "", why: str = "", slow: bool = False) -> None:
        assert self.outcome is None
        self.outcome = Outcome(
            kind=kind,
            finish_reason=finish_reason,
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            engines=self.engines,
            why=why,
            slow=slow,
            routing=bytes(self.routing),
            prompt_routing=self.prompt_routing,
        )
        self.waiting_on = ""


# --- choice of an engine


class Candidate(msgspec.Struct, frozen=True):
    """An engine with room.

    Attributes:
        outstanding: upper bound of the tokens that it still has to generate.
        longs: number of long sequences that this router has sent to it.
    """

    slot: str
    outstanding: int
    longs: int = 0


class Demand(msgspec.Struct, frozen=True):
    """What `choose` considers of a request.

    Attributes:
        name: of the request; breaks ties.
        expected: tokens that it will generate.
        affinity: requests with the same key should share an engine; empty: none.
        long: expected to outlast the others.
    """

    name: str
    expected: int
    affinity: str = ""
    long: bool = False


def choose(demand: Demand, candidates: Sequence[Candidate]) -> str:
    """Return the slot of the engine that gets the request; empty without candidates. Deterministic.

    Without affinity, the engine with the fewest outstanding tokens. With one (a session, a shared prefix), the engine
    that rendezvous hashing names, so that its prefix cache is used, unless it is loaded beyond its share. A long
    request goes where the fewest long ones are: a batch ends with its longest sequence.
    """
    if not candidates:
        return ""
    if demand.long:
        return min(candidates, key=lambda c: (c.longs, c.outstanding, -weight(demand.name, c.slot), c.slot)).slot
    if demand.affinity:
        share = LOAD_LIMIT * (sum(c.outstanding for c in candidates) + demand.expected) / len(candidates)
        # An empty engine always takes it: a share may be less than one request.
        bound = max(share, demand.expected)
        # Not all can be above: the emptiest has at most the mean.
        fit = [c for c in candidates if c.outstanding + demand.expected <= bound]
        if fit:
            return max(fit, key=lambda c: (weight(demand.affinity, c.slot), c.slot)).slot
    return min(candidates, key=lambda c: (c.outstanding, -weight(demand.name, c.slot), c.slot)).slot


def weight(key: str, slot: str) -> int:
    """Rendezvous hashing: a key belongs to the slot with the greatest weight, so that a slot that comes or goes moves
    only its own keys."""
    return int.from_bytes(blake2b(f"{key}\0{slot}".encode(), digest_size=8).digest(), "big")


def prefix_key(prompt: Sequence[int]) -> str:
    """Affinity key of a prompt's beginning."""
    return "prefix " + ",".join(map(str, prompt[:PREFIX_TOKENS]))


class LengthAverage:
    """Moving average of the lengths that requests are expected to have."""

    def __init__(self) -> None:
        self._mean = 0.0
        self._count = 0

    def is_long(self, expected: int) -> bool:
        """Whether a request is long compared with the recent ones; includes it in the average."""
        long = self._count > 0 and expected >= LONG_FACTOR * self._mean
        self._count += 1
        self._mean += max(NEWEST_WEIGHT, 1 / self._count) * (expected - self._mean)
        return long


# --- the state machine


class StartAttempt(msgspec.Struct, frozen=True):
    """Have an engine start or resume a sequence."""

    number: int
    assignment: Assignment
    request: SequenceRequest


class CancelAttempt(msgspec.Struct, frozen=True):
    """Close an attempt's stream, so that its engine ends the sequence."""

    number: int
    assignment: Assignment


class Deliver(msgspec.Struct, frozen=True):
    """Tokens of a request, in order, each once. `routing` and `prompt_routing` as in SequenceUpdate, if requested."""

    number: int
    start: int
    tokens: list[int]
    logprobs: list[float]
    versions: list[VersionSpan]
    routing: bytes = b""
    prompt_routing: bytes = b""


class Finish(msgspec.Struct, frozen=True):
    """The outcome of a request."""

    number: int
    outcome: Outcome


class ProbeEngine(msgspec.Struct, frozen=True):
    """Ask an engine for a report."""

    slot: str
    epoch: int


RouterAction = StartAttempt | CancelAttempt | Deliver | Finish | ProbeEngine


class RouterCore:
    """Requests and engines of a router."""

    def __init__(self, limits: RouterLimits | None = None, *, frozen: bool = False) -> None:
        self.limits = limits or RouterLimits()
        self.fleet = Fleet(self.limits.health, frozen=frozen)
        self.requests: dict[int, RequestState] = {}
        self.counts: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        """Sequences sent to each slot."""
        self._waiting = _WaitingRequests()
        self._loads = _AssignedLoad()
        self._lengths = LengthAverage()
        self._numbers = 0
        self._actions: list[RouterAction] = []

    # --- events

    def submit(self, now: float, wanted: GenerationRequest) -> tuple[int, list[RouterAction]]:
        """Add a request; returns its number.

        Raises:
            Refused: it asks for nothing. RouterFull: too many are open.
        """
        if not wanted.prompt or wanted.max_new_tokens < 1 or wanted.timeout_s <= 0 or wanted.lag < 0:
            raise Refused(
                f"a request for {wanted.max_new_tokens} tokens behind {len(wanted.prompt)} in {wanted.timeout_s:g} s",
                why="a prompt, at least one token, some time and a lag that is not negative are needed",
            )
        if len(self.requests) >= self.limits.requests:
            raise RouterFull(
                "a request", why=f"{len(self.requests)} are open, the router's bound", hint="send fewer at a time"
            )
        self._numbers += 1
        lowest = 0 if self.fleet.frozen else 1
        request = RequestState(self._numbers, wanted, now, self.limits.losses, lowest_version=lowest)
        request.long = self._lengths.is_long(request.expected)
        self.requests[request.number] = request
        self._waiting.add(request)
        self.counts["submitted"] += 1
        return request.number, self._dispatch(now)

    def cancel(self, now: float, number: int) -> list[RouterAction]:
        """End a request on behalf of its caller; without effect if it has its outcome."""
        if (request := self.requests.get(number)) is not None:
            self._cancel_attempt(request)
            request.cancel()
            self._finish(request)
        return self._dispatch(now)

    def on_members(
        self, now: float, members: Iterable[EngineEntry], versions: Sequence[VersionRecord]
    ) -> list[RouterAction]:
        """Apply the registry's list of engines and the committed versions (at least the new ones)."""
        self.fleet.on_committed(versions)
        self.fleet.on_members(now, members)
        self._revoke(now)
        return self._dispatch(now)

    def on_update(self, now: float, number: int, attempt: int, update: SequenceUpdate) -> list[RouterAction]:
        """Apply an update on the stream of an attempt."""
        if (request := self._current(number, attempt)) is None or request.assignment is None:
            return []
        if not request.acknowledged:
            request.acknowledged = True
            self.fleet.acknowledge(request.assignment.slot, request.assignment.epoch)
        self.fleet.on_report(now, request.assignment.slot, update.report)
        place, epoch, before = request.assignment, update.report.epoch, len(request.tokens)
        if epoch > place.epoch:
            # A new incarnation took over the slot's address before the stream was opened.
            self.fleet.unassign(place.slot, place.epoch, acknowledged=True)
            place = request.assignment = Assignment(place.attempt, place.slot, epoch)
            self.fleet.assign(now, place.slot, epoch)
            self.fleet.acknowledge(place.slot, epoch)
            self._loads.note(request)
        older = f"an older incarnation, #{epoch}, answers" if epoch < place.epoch else ""
        mismatch = older or request.add(now, update)
        self._loads.note(request)
        if mismatch:
            # Cancel it as well: the engine believes that it still has the sequence.
            self._lose(now, request, f"{place.slot}#{place.epoch}: {mismatch}", cancel=True)
            return self._dispatch(now)
        if update.tokens:
            self.counts["tokens"] += len(update.tokens)
            rows, prompt = (update.routing, update.prompt_routing) if request.wanted.routing else (b"", b"")
            self._actions.append(Deliver(number, before, update.tokens, update.logprobs, update.versions, rows, prompt))
        if request.outcome is not None:
            self.fleet.unassign(place.slot, place.epoch, acknowledged=True, ended=True)
            self._finish(request)
        elif update.rejected or update.finish_reason == "abort":
            reason = update.rejected or "aborted"
            self.counts[f"rejected_{reason}"] += 1
            if reason != "full" or update.report.room > 0:
                # By its last report the engine has room: wait for the next report before asking it again.
                self.fleet.back_off(now, place.slot, self.limits.full_s)
            self._release(request, ended=True)
            request.unassign(f"{place.slot} rejected it: {reason}")
            self._waiting.add(request)
        return self._dispatch(now)

    def on_failure(self, now: float, number: int, attempt: int, why: str, *, never: bool = False) -> list[RouterAction]:
        """The stream of an attempt failed; `never`: the engine says that no engine could serve it."""
        if (request := self._current(number, attempt)) is None or request.assignment is None:
            return []
        place = request.assignment
        if never:
            self._release(request)
            request.refuse(why)
            self._finish(request)
        else:
            self.fleet.on_failure(now, place.slot, place.epoch, why)
            self._lose(now, request, f"{place.slot}#{place.epoch}: {why}")
        return self._dispatch(now)

    def on_returned(self, now: float, number: int, attempt: int, why: str) -> list[RouterAction]:
        """The engine of an attempt is stopping in order and has not started the sequence."""
        request = self._current(number, attempt)
        if request is not None and request.assignment is not None:
            self.counts["rejected_stopping"] += 1
            self.fleet.back_off(now, request.assignment.slot, self.limits.full_s)
            self._release(request)
            request.unassign(why)
            self._waiting.add(request)
        return self._dispatch(now)

    def on_report(self, now: float, slot: str, report: EngineReport) -> list[RouterAction]:
        """A probe was answered."""
        self.fleet.on_report(now, slot, report)
        return self._dispatch(now)

    def on_no_report(self, now: float, slot: str, epoch: int, why: str) -> list[RouterAction]:
        """A probe was not answered."""
        self.fleet.on_failure(now, slot, epoch, why)
        return self._dispatch(now)

    def tick(self, now: float) -> list[RouterAction]:
        """Apply deadlines and timeouts, and probe engines. Call it regularly."""
        self.fleet.tick(now)
        for request in [one for one in self.requests.values() if now >= one.deadline]:
            slow = request.assignment is not None and bool(request.tokens) and not request.waiting_on
            self._cancel_attempt(request)
            if request.number in self._waiting:
                request.waiting_on = self._why_waiting(request.wanted.lag)
            request.expire(slow=slow)
            self._finish(request)
        for request in list(self.requests.values()):
            if (place := request.assignment) is not None and now - request.heard_at > self.limits.silent_s:
                why = f"silent for {now - request.heard_at:.1f} s"
                self.fleet.on_failure(now, place.slot, place.epoch, why)
                self._lose(now, request, f"{place.slot}#{place.epoch}: {why}", cancel=True)
        self._revoke(now)
        if self.requests:
            self._actions += [ProbeEngine(engine.slot, engine.epoch) for engine in self.fleet.take_due_probes(now)]
        return self._dispatch(now)

    # --- queries

    def waiting_on(self) -> dict[str, int]:
        """Return what requests wait for, and how many wait for each."""
        assigned = (request for request in self.requests.values() if request.assignment is not None)
        found = Counter(request.waiting_on for request in assigned if request.waiting_on)
        for lag, count in self._waiting.by_lag().items():
            found[self._why_waiting(lag)] += count
        return dict(found)

    # --- inside

    def _current(self, number: int, attempt: int) -> RequestState | None:
        """Return the request if this is its current attempt; updates of earlier attempts are ignored."""
        request = self.requests.get(number)
        if request is None or request.assignment is None or request.assignment.attempt != attempt:
            return None
        return request

    def _dispatch(self, now: float) -> list[RouterAction]:
        """Assign waiting requests to engines, the oldest first; return all actions since the last call.

        It follows every event, so that its cost must grow with engines and assignments, not with waiting requests.
        """
        fleet, first = self.fleet, self.limits.first_room
        room = [slot for slot in sorted(fleet.engines) if fleet.room(now, slot, first) > 0] if self._waiting else []
        hopeless: set[int] = set()
        """Lags that no engine with room serves."""
        while room and (number := self._waiting.first(hopeless)):
            request = self.requests[number]
            wanted = request.wanted
            candidates: list[Candidate] = []
            for slot in room:
                if fleet.routable(slot, wanted.lag):
                    engine = fleet.engines[slot]
                    # The report also counts what others have sent there, but may be older than our last assignments.
                    reported = engine.report.outstanding_tokens if engine.report is not None else 0
                    ours = self._loads.tokens(slot, engine.epoch)
                    candidates.append(Candidate(slot, max(ours, reported), self._loads.longs(slot, engine.epoch)))
            # An engine that was lost with this request once is the last resort.
            others = [c for c in candidates if (c.slot, fleet.engines[c.slot].epoch) not in request.lost_with]
            affinity = f"session {wanted.session}" if wanted.session else ""
            if wanted.prefix and not affinity:
                affinity = prefix_key(wanted.prompt)
            demand = Demand(str(request.number), request.expected, affinity, request.long)
            slot = choose(demand, others or candidates)
            if not slot:
                hopeless.add(request.wanted.lag)
                continue
            self._assign(now, request, slot)
            if fleet.room(now, slot, first) <= 0:
                room.remove(slot)
        actions, self._actions = self._actions, []
        return actions

    def _assign(self, now: float, request: RequestState, slot: str) -> None:
        engine, wanted = self.fleet.engines[slot], request.wanted
        place = request.assign(now, slot, engine.epoch)
        self._waiting.drop(request)
        self._loads.note(request)
        self.fleet.assign(now, slot, engine.epoch)
        self.sent[slot] += 1
        self.counts["sent"] += 1
        if request.tokens:
            self.counts["resumed"] += 1
            self.counts["resumed_tokens"] += len(request.tokens)
        sequence = SequenceRequest(
            prompt=list(wanted.prompt),
            seed=wanted.seed,
            temperature=wanted.temperature,
            max_new_tokens=wanted.max_new_tokens,
            stop_ids=sorted(wanted.stop_ids),
            tokens=list(request.tokens),
            logprobs=list(request.logprobs),
            versions=list(request.versions),
            routing=wanted.routing,
            rows_from=wanted.rows_from,
            media=list(wanted.media),
            rows=bytes(request.routing),
            allowed=list(self.fleet.allowed(wanted.lag)),
            chunk_tokens=wanted.chunk_tokens,
            left_s=max(0.0, request.deadline - now),
        )
        self._actions.append(StartAttempt(request.number, place, sequence))

    def _why_waiting(self, lag: int) -> str:
        if not self.fleet.engines:
            return "an engine: none has entered the registry"
        version = self.fleet.committed.version
        if not version and not self.fleet.frozen:
            return "the first committed weights"
        near = f" (or {lag} behind)" if lag else ""
        states = ", ".join(self.fleet.why_not(slot, lag) for slot in sorted(self.fleet.engines)[:8])
        which = "an engine" if self.fleet.frozen else f"an engine at version {version}{near}"
        return f"{which}: {states}"

    def _revoke(self, now: float) -> None:
        """Revoke sequences from engines that will not generate them."""
        for request in list(self.requests.values()):
            place = request.assignment
            if place is not None and (why := self.fleet.why_revoke(place.slot, place.epoch)):
                self._lose(now, request, f"{place.slot}#{place.epoch}: {why}", cancel=True)

    def _lose(self, now: float, request: RequestState, why: str, *, cancel: bool = False) -> None:
        self.counts["lost"] += 1
        if cancel and request.assignment is not None:
            self._actions.append(CancelAttempt(request.number, request.assignment))
        self._uncount(request)
        request.engine_lost(why)
        self._loads.note(request)
        if request.outcome is not None:
            self._finish(request)
        else:
            self._waiting.add(request)

    def _cancel_attempt(self, request: RequestState) -> None:
        """Cancel the current attempt, if there is one."""
        if request.assignment is not None:
            self._actions.append(CancelAttempt(request.number, request.assignment))
            self._release(request)

    def _release(self, request: RequestState, *, ended: bool = False) -> None:
        self._uncount(request, ended=ended)
        request.assignment = None
        self._loads.note(request)

    def _uncount(self, request: RequestState, *, ended: bool = False) -> None:
        if (place := request.assignment) is not None:
            self.fleet.unassign(place.slot, place.epoch, acknowledged=request.acknowledged, ended=ended)

    def _finish(self, request: RequestState) -> None:
        assert request.outcome is not None
        del self.requests[request.number]
        self._waiting.drop(request)
        self._loads.note(request)
        self.counts[request.outcome.kind] += 1
        self._actions.append(Finish(request.number, request.outcome))


class _WaitingRequests:
    """Numbers of the waiting requests, one queue per lag, on which depends which engines may serve them."""

    def __init__(self) -> None:
        self._queues: dict[int, OrderedDict[int, int]] = {}
        self._added = 0

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, number: int) -> bool:
        return any(number in queue for queue in self._queues.values())

    def add(self, request: RequestState) -> None:
        """Append it."""
        self._added += 1
        self._queues.setdefault(request.wanted.lag, OrderedDict())[request.number] = self._added

    def drop(self, request: RequestState) -> None:
        """Remove it, whether it waits or not."""
        if (queue := self._queues.get(request.wanted.lag)) is not None:
            queue.pop(request.number, None)
            if not queue:
                del self._queues[request.wanted.lag]

    def first(self, excluded: Collection[int]) -> int:
        """Return the oldest one with none of these lags; 0: there is none."""
        heads = [next(iter(queue.items())) for lag, queue in self._queues.items() if lag not in excluded]
        return min(heads, key=lambda head: head[1])[0] if heads else 0

    def by_lag(self) -> dict[int, int]:
        """Count them by lag."""
        return {lag: len(queue) for lag, queue in self._queues.items()}


class _AssignedLoad:
    """Tokens and long sequences that each incarnation still has to generate for this router, updated by `note`."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[tuple[str, int], int, bool]] = {}
        self._tokens: Counter[tuple[str, int]] = Counter()
        self._longs: Counter[tuple[str, int]] = Counter()

    def note(self, request: RequestState) -> None:
        """Update the sums after a request got another engine or more tokens."""
        if (before := self._noted.pop(request.number, None)) is not None:
            self._add(before[0], -before[1], -before[2])
        if (place := request.assignment) is not None and request.outcome is None:
            self._noted[request.number] = (place.slot, place.epoch), request.expected, request.long
            self._add((place.slot, place.epoch), request.expected, request.long)

    def tokens(self, slot: str, epoch: int) -> int:
        """Tokens to come, as expected."""
        return self._tokens[slot, epoch]

    def longs(self, slot: str, epoch: int) -> int:
        """Long sequences."""
        return self._longs[slot, epoch]

    def _add(self, who: tuple[str, int], tokens: int, longs: int) -> None:
        for counter, n in ((self._tokens, tokens), (self._longs, longs)):
            counter[who] += n
            if not counter[who]:
                del counter[who]  # incarnations come and go
