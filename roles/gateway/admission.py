"""Which calls are at work at the engines, which wait and which are sent away. Pure: events in, actions out.

The cap follows the engines' load. It *grows* while all that were let in are being worked on and the engines have room,
it *holds* between, and it comes down when they fall behind: then the youngest calls are *shed*, which means that they
wait again at the head of their line, so that older ones, whose work is worth more, end first. A call that was shed once
too often, or whose caller has seen tokens, is not shed.

Whose turn it is: of the group that has the fewest at work; among equals of the one that had its turn longest ago. What
comes when the line is full takes the place of the youngest of the group that waits with most, or is sent away itself.

Work is counted in sequences, as engines count it: a call has as many as it wants answers. One that wants more than the
cap is let in when nothing else is at work; nobody is let in past one whose turn it is.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from typing import Literal

import msgspec

from relax_rt.transport.rpc.errors import Refused

Trend = Literal["grow", "hold", "shed"]


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds, and where the cap changes.

    Attributes:
        first, least, most: sequences at work: at the start, always allowed, never exceeded (but by one call alone).
        waiting: calls that may wait.
        wait_s: the longest that one waits, from when it came, or from when it was shed.
        high, low: share of the engines' KV caches in use above which calls are shed, and below which the cap grows.
        slack: share of those at work that may lie at the router without an engine: they are there when room comes.
        shrink: share of what is at work that the cap comes down to.
        grow: share that it grows by, at least one.
        every_s: between two changes: a change takes its time to show.
        sheds: how often one call is shed.
    """

    first: int = 16
    least: int = 1
    most: int = 4096
    waiting: int = 4096
    wait_s: float = 300.0
    high: float = 0.9
    low: float = 0.7
    slack: float = 0.1
    shrink: float = 0.85
    grow: float = 0.25
    every_s: float = 0.5
    sheds: int = 2

    def __post_init__(self) -> None:
        sound = 1 <= self.least <= self.first <= self.most and self.waiting >= 0 and self.wait_s > 0
        if not (sound and 0 < self.low < self.high <= 1 and 0 < self.shrink < 1 and self.grow > 0 <= self.slack):
            hint = "1 <= least <= first <= most, 0 < low < high <= 1, 0 < shrink < 1"
            raise Refused(f"marks {self}", why="they contradict each other", hint=hint)


class Load(msgspec.Struct, frozen=True):
    """How the engines do.

    Attributes:
        room: sequences that they would take besides.
        stalled: of our sequences, those that no engine has.
        kv_used: of the fullest KV cache, 0 to 1.
    """

    room: int
    stalled: int
    kv_used: float


class Admit(msgspec.Struct, frozen=True):
    """Let it work."""

    number: int


class Shed(msgspec.Struct, frozen=True):
    """End its sequences: it waits again."""

    number: int


class Refuse(msgspec.Struct, frozen=True):
    """Send it away."""

    number: int
    why: str
    retry_after_s: float


Action = Admit | Shed | Refuse


class _Place:
    """A call that waits or is at work."""

    def __init__(self, number: int, group: str, sequences: int, now: float) -> None:
        self.number, self.group, self.sequences = number, group, sequences
        self.waits_since = now
        self.sheds = 0
        self.held = False
        """Its caller has seen tokens."""


class Admission:
    """See the module."""

    def __init__(self, marks: Marks | None = None) -> None:
        self.marks = marks or Marks()
        self.cap = self.marks.first
        self.trend: Trend = "hold"
        self.counts: Counter[str] = Counter()
        self._working: OrderedDict[int, _Place] = OrderedDict()
        """In the order in which they were let in."""
        self._lines: dict[str, OrderedDict[int, _Place]] = {}
        self._where: dict[int, _Place] = {}
        """Those that wait."""
        self._sequences = 0
        self._at_work: Counter[str] = Counter()
        """Sequences of each group."""
        self._turn: dict[str, int] = {}
        self._turns = 0
        self._ranks: list[tuple[int, int, str]] = []
        """A heap of (at work, last turn, group) of those that wait."""
        self._changed_at = float("-inf")
        self._gap_s = 0.0
        """Between two calls that end, the newer ones weighing more."""
        self._ended_at: float | None = None

    @property
    def at_work(self) -> int:
        """Sequences that were let in."""
        return self._sequences

    @property
    def waiting(self) -> int:
        """Calls that were not."""
        return len(self._where)

    # --- events

    def arrive(self, now: float, number: int, group: str, sequences: int = 1) -> list[Action]:
        """A call comes, with at least one sequence; its number was not there before."""
        self.counts["arrived"] += 1
        actions: list[Action] = []
        if self.waiting >= self.marks.waiting and not (not self.waiting and self._fits(sequences)):
            # With a line of no length calls come in as long as there is room.
            victim = self._victim(group)
            if victim is None:
                return [self._refuse(number, f"{self.waiting} calls wait already, the bound", now)]
            self._unqueue(victim)
            actions.append(self._refuse(victim.number, "others, who had fewer calls waiting, came", now))
        self._queue(_Place(number, group, sequences, now), first=False)
        return actions + self._let_in()

    def leave(self, now: float, number: int) -> list[Action]:
        """A call has ended, or its caller is gone; without effect if it is not there."""
        if (place := self._where.get(number)) is not None:
            self._unqueue(place)
            self.counts["gave_up"] += 1
        elif (place := self._working.pop(number, None)) is not None:
            self._worked_less(place)
            self.counts["ended"] += 1
            self._note_end(now)
        return self._let_in()

    def hold(self, number: int) -> bool:
        """One that is at work can no longer begin anew: its caller sees tokens of it. False: it has just been shed."""
        if (place := self._working.get(number)) is not None:
            place.held = True
        return place is not None

    def tick(self, now: float, load: Load) -> list[Action]:
        """Time has passed, and the engines say how they do."""
        late = [place for place in self._where.values() if now - place.waits_since >= self.marks.wait_s]
        actions: list[Action] = []
        for place in late:
            self._unqueue(place)
            actions.append(self._refuse(place.number, f"it waited {self.marks.wait_s:g} s for its turn", now))
        if now - self._changed_at >= self.marks.every_s:
            actions += self._adapt(now, load)
        return actions + self._let_in()

    # --- inside

    def _adapt(self, now: float, load: Load) -> list[Action]:
        marks, working = self.marks, self.at_work
        behind = load.stalled > max(1.0, marks.slack * working)
        if load.kv_used >= marks.high or behind:
            # What no engine has is too much by itself; with caches that are full, so is a part of what they have.
            fits = working - load.stalled + int(marks.slack * working)
            cap = min(fits, int(working * marks.shrink)) if load.kv_used >= marks.high else fits
            self.trend = "shed"
            self._set(now, min(self.cap, max(marks.least, cap)))
            return self._shed(now, working - self.cap)
        self.trend = "hold"
        full = working >= self.cap or self.waiting > 0
        if load.kv_used < marks.low and not load.stalled and load.room > 0 and full and self.cap < marks.most:
            self.trend = "grow"
            by = max(1, int(self.cap * marks.grow), min(load.room, self._wanted()))
            self._set(now, min(marks.most, self.cap + by))
        return []

    def _set(self, now: float, cap: int) -> None:
        if cap != self.cap:
            self.cap, self._changed_at = cap, now

    def _shed(self, now: float, excess: int) -> list[Action]:
        """The youngest that may be shed go back to the head of their lines, and wait anew; the oldest goes on."""
        found: list[_Place] = []
        for place in reversed(self._working.values()):
            if sum(one.sequences for one in found) >= excess or len(found) + 1 == len(self._working):
                break
            if not place.held and place.sheds < self.marks.sheds:
                found.append(place)
        for place in found:
            del self._working[place.number]
            self._worked_less(place)
            place.sheds += 1
            place.waits_since = now
            self.counts["shed"] += 1
            self._queue(place, first=True)
        return [Shed(place.number) for place in found]

    def _fits(self, sequences: int) -> bool:
        return self.at_work + sequences <= self.cap or not self.at_work

    def _wanted(self) -> int:
        """Sequences of those that wait."""
        return sum(place.sequences for place in self._where.values())

    def _let_in(self) -> list[Action]:
        actions: list[Action] = []
        while self._where:
            group = self._next_group()
            place = next(iter(self._lines[group].values()))
            if not self._fits(place.sequences):
                break
            self._unqueue(place)
            self._turns += 1
            self._turn[group] = self._turns
            self._working[place.number] = place
            self._sequences += place.sequences
            self._at_work[group] += place.sequences
            self._rank(group)
            self.counts["admitted"] += 1
            actions.append(Admit(place.number))
        return actions

    def _next_group(self) -> str:
        """Whose turn it is, of those that wait."""
        while (best := self._ranks[0]) != self._rank_of(best[2]) or best[2] not in self._lines:
            heapq.heappop(self._ranks)
        return best[2]

    def _rank_of(self, group: str) -> tuple[int, int, str]:
        return self._at_work[group], self._turn.get(group, 0), group

    def _rank(self, group: str) -> None:
        """A group's rank may be another; old ones stay until they come to the top, or are too many."""
        if group in self._lines:
            heapq.heappush(self._ranks, self._rank_of(group))
        if len(self._ranks) > 64 + 4 * len(self._lines):
            self._ranks = [self._rank_of(one) for one in self._lines]
            heapq.heapify(self._ranks)

    def _queue(self, place: _Place, *, first: bool) -> None:
        line = self._lines.setdefault(place.group, OrderedDict())
        line[place.number] = self._where[place.number] = place
        if first:
            line.move_to_end(place.number, last=False)
        if len(line) == 1:
            self._rank(place.group)

    def _unqueue(self, place: _Place) -> None:
        del self._where[place.number]
        line = self._lines[place.group]
        del line[place.number]
        if not line:
            del self._lines[place.group]
            self._forget(place.group)

    def _worked_less(self, place: _Place) -> None:
        group = place.group
        self._sequences -= place.sequences
        self._at_work[group] -= place.sequences
        if not self._at_work[group]:
            del self._at_work[group]
            self._forget(group)
        self._rank(group)

    def _forget(self, group: str) -> None:
        """Groups come and go: nothing is kept of one that has no call."""
        if group not in self._at_work and group not in self._lines:
            self._turn.pop(group, None)

    def _victim(self, group: str) -> _Place | None:
        """Whose place one of this group takes: the youngest of the longest line, if that is longer than its own."""
        if not self._lines:
            return None
        longest = max(self._lines, key=lambda g: (len(self._lines[g]), g))
        if len(self._lines[longest]) <= len(self._lines.get(group, ())) + 1:
            return None
        return next(reversed(self._lines[longest].values()))

    def _refuse(self, number: int, why: str, now: float) -> Refuse:
        self.counts["refused"] += 1
        return Refuse(number, why, self._estimate())

    def _note_end(self, now: float) -> None:
        if self._ended_at is not None:
            self._gap_s += 0.1 * (now - self._ended_at - self._gap_s)
        self._ended_at = now

    def _estimate(self) -> float:
        """Seconds until those that wait will have been let in, as things go; 1 to 60."""
        return min(60.0, max(1.0, self.waiting * self._gap_s))
