"""What tools/bench/modes.py replays: lengths and times drawn beforehand, and the pipeline that loses nothing."""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from functools import lru_cache

import msgspec

from relax_rt.roles.data.order import sample_seed

PAPER = {"colocate": 225.9, "on-policy": 201.0, "asynchronous": 128.6}
"""Seconds a step, as issue and paper (arXiv 2604.11554) give them."""
PUBLICATION_S = 6.0
RELEASE_PART = 0.4
"""Of the change of turns in colocate, this part is the engines' release, before training; the rest is their return."""
CALIBRATED_OVER = 64
"""Batches over which the mean time of a batch alone is taken."""
STAGE_SLOTS = 8
"""Of an engine, where 128.6 s are a stage that is never idle: with 16, the tail of a batch alone would leave nothing of
the on-policy step for training."""


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the job.

    Attributes:
        median, sigma, most: tokens of a completion, log-normal, cut at `most`.
        group, groups: samples of a group, groups of a step.
        engines, slots: engines, and sequences that one decodes at a time.
        seed: of the run; lengths derive from it, from a sample's prompt and from its place in the group.
    """

    median: int = 2048
    sigma: float = 0.7
    most: int = 8192
    group: int = 8
    groups: int = 32
    engines: int = 4
    slots: int = 16
    seed: int = 1

    @property
    def all_slots(self) -> int:
        """Of all engines."""
        return self.engines * self.slots

    def lengths(self, prompt: int) -> list[int]:
        """Tokens of the members of a prompt's group."""
        return [self.drawn(sample_seed(self.seed, prompt, member, 0)) for member in range(self.group)]

    def drawn(self, seed: int) -> int:
        """Tokens of the sample with this seed."""
        return draw(seed, self.median, self.sigma, self.most)


def draw(seed: int, median: int, sigma: float, most: int) -> int:
    """A log-normal length, cut."""
    return max(1, min(round(random.Random(seed).lognormvariate(math.log(median), sigma)), most))


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How long things take, in seconds.

    Attributes:
        token_s: between two tokens of a sequence, however many others there are: decoding waits for memory.
        train_token_s: of training, for each trained token.
        publish_s: from committed weights to their swap. release_s, resume_s: of the engines' memory, in colocate.
    """

    token_s: float
    train_token_s: float
    publish_s: float
    release_s: float = 0.0
    resume_s: float = 0.0

    def scaled(self, factor: float) -> Pace:
        """All of it shorter by this factor."""
        return Pace(**{name: getattr(self, name) / factor for name in self.__struct_fields__})


def cluster(shape: Shape, generation_s: float) -> Pace:
    """The pace at which colocate and on-policy steps take the paper's time, if nothing is lost.

    on-policy = generation + training + publication; colocate = the same and a change of turns. What remains open is how
    the on-policy time divides: `generation_s` is the mean time of a batch that is generated alone.

    Raises:
        ValueError: no time is left for training.
    """
    alone, tokens = calibration(shape)
    turns_s = PAPER["colocate"] - PAPER["on-policy"]
    train_s = PAPER["on-policy"] - generation_s - PUBLICATION_S
    if train_s <= 0:
        raise ValueError(f"generation of {generation_s:.1f} s leaves {train_s:.1f} s of a step for training")
    return Pace(
        token_s=generation_s / alone,
        train_token_s=train_s / tokens,
        publish_s=PUBLICATION_S,
        release_s=RELEASE_PART * turns_s,
        resume_s=(1 - RELEASE_PART) * turns_s,
    )


def readings(sigma: float, generation_s: float) -> dict[str, tuple[Shape, Pace]]:
    """The paper's asynchronous 128.6 s, read in two ways; what colocate and on-policy take is the same in both.

    Returns:
        tail: `generation_s`, unless told otherwise these 128.6 s, are a batch generated alone, with its tail; an ideal
        asynchronous step is shorter, as other sequences fill the tail. stage: they are the longer stage, generation
        with every slot in use; that is the ideal asynchronous step, and a batch alone takes longer.
    """
    whole, narrow = Shape(sigma=sigma), Shape(sigma=sigma, slots=STAGE_SLOTS)
    alone, tokens = calibration(narrow)
    longer_s = PAPER["asynchronous"] * alone / (tokens / narrow.all_slots)
    return {"tail": (whole, cluster(whole, generation_s)), "stage": (narrow, cluster(narrow, longer_s))}


def most_over_colocate(shape: Shape, pace: Pace) -> float:
    """How many times as fast as the paper's colocate two stages are that are never idle, of mean batches."""
    return PAPER["colocate"] / max(stages(shape, pace, range(CALIBRATED_OVER)))


@lru_cache
def calibration(shape: Shape) -> tuple[float, float]:
    """Of a mean batch: tokens that the busiest slot makes when it is generated alone, and all tokens."""
    batches = [batch(shape, number) for number in range(CALIBRATED_OVER)]
    alone = statistics.fmean(makespan([n for one in lengths for n in one], shape.all_slots) for lengths in batches)
    return alone, statistics.fmean(sum(map(sum, lengths)) for lengths in batches)


def batch(shape: Shape, number: int) -> list[list[int]]:
    """Lengths of the groups of the batch that consists of the prompts whose turn it is."""
    return [shape.lengths(prompt) for prompt in range(number * shape.groups, (number + 1) * shape.groups)]


def makespan(lengths: list[int], slots: int) -> int:
    """Tokens that the busiest slot makes when each takes the next sequence as soon as it is free."""
    free = [0] * slots
    for length in lengths:
        heapq.heapreplace(free, free[0] + length)
    return max(free)


class Pipeline:
    """Groups through engines and trainer under the staleness contract, with no time for anything but what is replayed.

    Written apart from the runtime: it shares none of its code, only the contract's text. A group is begun when a slot
    is free for it, on any engine, if the samples not yet trained stay within (max_staleness + 1 - lag) batches; a step
    takes the groups that are complete, stalest first, and waits for those that it would make over-stale.
    """

    def __init__(self, shape: Shape, pace: Pace, max_staleness: float, *, colocate: bool = False) -> None:
        self._shape, self._pace, self._bound = shape, pace, max_staleness
        self._turns = (pace.release_s, pace.resume_s) if colocate else (0.0, 0.0)
        self._lengths: Callable[[int], list[int]] = lru_cache(maxsize=None)(shape.lengths)
        self._now = 0.0
        self._events: list[tuple[float, int, str, int]] = []
        self._order = 0
        self._slots = shape.all_slots
        self._waiting: deque[tuple[int, int]] = deque()
        self._left: dict[int, int] = {}
        self._began: dict[int, int] = {}
        self._ready: set[int] = set()
        self._next = 0
        self._trained = self._published = 0
        self._published_at = 0.0
        self._training: list[int] = []

    def steps(self, count: int) -> list[float]:
        """When each of the first `count` steps has ended, in seconds."""
        ends: list[float] = []
        while len(ends) < count:
            self._fill()
            self._train()
            self._now, _, kind, which = heapq.heappop(self._events)
            if kind == "member":
                self._member_done(which)
            elif kind == "trained":
                ends.append(self._now)
                self._step_done()
            else:
                self._published = which
        return ends

    def _at(self, when: float, kind: str, which: int) -> None:
        self._order += 1
        heapq.heappush(self._events, (when, self._order, kind, which))

    def _fill(self) -> None:
        while self._slots and (self._waiting or self._admit()):
            group, length = self._waiting.popleft()
            self._slots -= 1
            self._at(self._now + length * self._pace.token_s, "member", group)

    def _admit(self) -> bool:
        under_way = len(self._left) + len(self._ready) + len(self._training)
        if under_way + 1 > (self._bound + 1 - (self._trained - self._published)) * self._shape.groups:
            return False
        group, self._next = self._next, self._next + 1
        lengths = self._lengths(group)
        self._left[group], self._began[group] = len(lengths), self._published
        self._waiting.extend((group, length) for length in lengths)
        return True

    def _member_done(self, group: int) -> None:
        self._slots += 1
        self._left[group] -= 1
        if not self._left[group]:
            del self._left[group]
            self._ready.add(group)

    def _train(self) -> None:
        if self._training or len(self._ready) < self._shape.groups:
            return
        if any(self._trained - self._began[group] + 1 > self._bound for group in self._left):
            return
        self._training = sorted(self._ready, key=lambda g: (self._began[g], g))[: self._shape.groups]
        self._ready.difference_update(self._training)
        tokens = sum(sum(self._lengths(group)) for group in self._training)
        self._at(self._now + self._turns[0] + tokens * self._pace.train_token_s, "trained", 0)

    def _step_done(self) -> None:
        for group in self._training:
            del self._began[group]
        self._training = []
        self._trained += 1
        self._published_at = max(self._now, self._published_at) + self._pace.publish_s + self._turns[1]
        self._at(self._published_at, "published", self._trained)


def stages(shape: Shape, pace: Pace, steps: range) -> tuple[float, float]:
    """Mean seconds a step of generation with every slot in use, and of training: no way of running can be faster than
    the longer of the two, whatever staleness it allows."""
    tokens = statistics.fmean(sum(map(sum, batch(shape, number))) for number in steps)
    return tokens * pace.token_s / shape.all_slots, tokens * pace.train_token_s


def gaps(ends: list[float], skip: int) -> Iterator[float]:
    """Seconds of each step after the first few."""
    return (b - a for a, b in zip(ends[skip - 1 :], ends[skip:], strict=False))
