"""A run's past, read back from metrics.jsonl and the event log."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from relax_rt.observe.events import read_events
from relax_rt.observe.losses import Losses, ReportedLoss
from relax_rt.observe.metrics import read_metrics

NAN = float("nan")
MAIN = "held_out"


class ColdStartLosses(msgspec.Struct):
    """The trainer's records of a cold start.

    Attributes:
        phase: sft or dpo. of: steps that it was to make.
        losses, validation: by step; steps that a restart did again replace the earlier ones.
    """

    phase: str = ""
    of: int = 0
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record of kind `cold_start`."""
        step, of = record.get("step"), record.get("of")
        if not isinstance(step, int) or not isinstance(of, int):
            return
        self.phase, self.of = str(record.get("phase", "")), of
        for key, found in (("loss", self.losses), ("validation_loss", self.validation)):
            if isinstance(value := record.get(key), int | float):
                found[step] = float(value)


class SetScore(msgspec.Struct, frozen=True, kw_only=True):
    """One evaluation of a set.

    Attributes:
        pass_at: by k: the value and the ends of its 95% interval.
        reward: mean, where a reward function judges; greedy: share of right greedy completions; None: not measured.
    """

    when: str
    step: int
    items: int
    samples: int
    pass_at: dict[str, tuple[float, float, float]]
    exact: float | None
    reward: float | None
    greedy: float | None


def set_of(record: Mapping[str, Any]) -> str:
    """Return the set of a record; empty where the summary's other lines cover it."""
    if record.get("kind") == "evaluation_set":
        return str(record.get("set", ""))
    samples = record.get("samples")
    several = isinstance(samples, int) and samples > 1
    return MAIN if several or "greedy" in record else ""


def read_score(record: Mapping[str, Any]) -> SetScore:
    """Read an evaluation's record; malformed values are skipped."""
    ends = [_inner_table(record, f"pass_at{end}") for end in ("", "_low", "_high")]
    greedy = _inner_table(record, "greedy")
    return SetScore(
        when=str(record.get("when", "during")),
        step=int(_finite(record, "step") or 0),
        items=int(_finite(record, "items") or 0),
        samples=int(_finite(record, "samples") or 1),
        pass_at={
            k: (value, low if low is not None else 0.0, high if high is not None else 1.0)
            for k in ends[0]
            if (value := _finite(ends[0], k)) is not None
            for low, high in [(_finite(ends[1], k), _finite(ends[2], k))]
        },
        exact=_finite(record, "exact"),
        reward=_finite(record, "reward"),
        greedy=_finite(greedy, "success" if "success" in greedy else "exact"),
    )


def _inner_table(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = record.get(key)
    return value if isinstance(value, Mapping) else {}


def _finite(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step.

    Times in seconds, `t` wall-clock at its end; `staleness` counts samples by staleness; `skipped` says why the step
    was skipped, if it was (not finite). `empty`: it was applied, but no sample contributed to the gradient.
    """

    step: int
    epoch: int
    t: float
    reward: float
    wait_s: float
    train_s: float
    publish_s: float
    tokens: float
    computed_tokens: float
    staleness: dict[int, int]
    keys: list[int]
    skipped: str
    empty: bool = False

    @property
    def began(self) -> float:
        """When the trainer began to wait for its samples."""
        return self.t - sum(s for s in (self.wait_s, self.train_s, self.publish_s) if s == s)


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One held-out evaluation; `low` and `high` are ends of 95% intervals, the gain's is over the one before."""

    when: str
    step: int
    t: float
    items: int
    exact: float
    exact_low: float
    exact_high: float
    lenient: float
    format: float
    constant_answer: str
    constant: float
    gain_low: float = NAN
    gain_high: float = NAN
    reward: float = NAN
    """Mean over episodes, where held-out tasks are played."""


class SlotLife(msgspec.Struct, kw_only=True):
    """One process in a slot. `ready` is None until it did its work; `failure` is the kind of a death, or empty; `cut`:
    it ended with the agent, which recorded no end."""

    slot: str
    start: float
    ready: float | None = None
    end: float = NAN
    failure: str = ""
    cause: str = ""
    cut: bool = False


class Restarts(msgspec.Struct):
    """Restarts of one role: how many, of what, and for how long its slots were away together (s)."""

    count: int = 0
    causes: Counter[str] = msgspec.field(default_factory=Counter)
    away_s: float = 0.0


class History(msgspec.Struct):
    """Everything that summary and plots are made from.

    Attributes:
        steps: the path that led to the end, in order: for each step its last doing.
        redone: steps that were done again after a restart.
        evaluations: of what [data] holds out, in the order made. sets: those of further sets, and of the same where
            there are several completions an item; by name.
        cold: of the cold start, if there was one.
        generated_tokens: by all rollouts together, as far as they reported; generated_s: from their first record of
            each session to the last one that reported more.
        lives: every process of the run, in the order started.
        restarts: by role.
        account: the queue's last account of itself, if it gave one.
        losses: samples lost in all starts of the run, by cause, the most frequent first.
        sessions: start and end of each `up` (wall-clock s); a resumed run has several.
    """

    steps: list[StepRecord] = []
    redone: list[StepRecord] = []
    evaluations: list[Evaluation] = []
    sets: dict[str, list[SetScore]] = {}
    cold: ColdStartLosses = msgspec.field(default_factory=ColdStartLosses)
    generated_tokens: int = 0
    generated_s: float = 0.0
    lives: list[SlotLife] = []
    restarts: dict[str, Restarts] = {}
    account: dict[str, int] | None = None
    losses: list[ReportedLoss] = []
    sessions: list[tuple[float, float]] = []

    def active(self, t: float) -> float:
        """Seconds of running up to wall-clock t: the time between two sessions does not count."""
        return sum(max(0.0, min(t, end) - start) for start, end in self.sessions if start <= t)

    @property
    def incomplete(self) -> bool:
        """Whether a rollout ended without its last word, so that some of what it generated is in no record."""
        return any((life.failure or life.cut) and life.slot.startswith("rollout/") for life in self.lives)

    @property
    def wall_s(self) -> float:
        """Seconds of running in all."""
        return sum(end - start for start, end in self.sessions)


def read_history(run_dir: Path) -> History:
    """Read a run's files; those that are missing leave their part empty."""
    history = History()
    starts = [t for event in read_events(run_dir) if event.get("kind") == "run_started" and (t := _t(event)) == t]
    sessions = _Sessions(starts)
    path = _StepPath(history)
    rollouts: dict[str, int] = {}
    reports: list[tuple[float, bool]] = []
    for record in read_metrics(run_dir):
        t = _t(record)
        if t != t:
            continue
        sessions.extend(t)
        match record.get("kind"):
            case "step":
                path.add(_step(record))
            case "evaluation":
                history.evaluations.append(_evaluation(record))
                if name := set_of(record):
                    history.sets.setdefault(name, []).append(read_score(record))
            case "evaluation_set":
                history.sets.setdefault(set_of(record), []).append(read_score(record))
            case "cold_start":
                history.cold.add(record)
            case "rollout":
                who = str(record.get("by") or record.get("slot"))
                tokens, before = int(_number(record, "tokens", 0.0)), rollouts.get(who, 0)
                rollouts[who] = max(before, tokens)
                reports.append((t, tokens > before))
    losses = Losses()
    for event in read_events(run_dir):
        sessions.extend(_t(event))
        losses.update(event)
    history.losses = losses.total
    history.sessions = sessions.spans()
    history.steps = path.steps()
    history.generated_tokens = sum(rollouts.values())
    history.generated_s = sum(_generating_s(reports, start, end) for start, end in history.sessions)
    _Supervision(history).read(read_events(run_dir))
    return history


def _generating_s(reports: Sequence[tuple[float, bool]], start: float, end: float) -> float:
    """Return the seconds of a session in which a rollout generated; idle time after a start does not count."""
    within = [(t, more) for t, more in reports if start <= t <= end]
    if not within:
        return 0.0
    begun = within[0][0]
    return max((t for t, more in within if more), default=begun) - begun


class _StepPath:
    """Finds the steps that count: a restarted trainer replaces the steps that it does again, and all after them."""

    def __init__(self, history: History) -> None:
        self._kept: dict[int, StepRecord] = {}
        self._redone = history.redone
        self._epoch = -1

    def add(self, step: StepRecord) -> None:
        if step.epoch < self._epoch:
            self._redone.append(step)
            return
        if step.epoch > self._epoch:
            self._epoch = step.epoch
            for n in [n for n in self._kept if n >= step.step]:
                self._redone.append(self._kept.pop(n))
        self._kept[step.step] = step

    def steps(self) -> list[StepRecord]:
        return [self._kept[n] for n in sorted(self._kept)]


class _Sessions:
    def __init__(self, starts: list[float]) -> None:
        self._starts = sorted(starts)
        self._ends = list(self._starts)

    def extend(self, t: float) -> None:
        if t != t:
            return
        at = bisect_right(self._starts, t) - 1
        if at >= 0:
            self._ends[at] = max(self._ends[at], t)
        elif self._starts and len(self._starts) == len(self._ends):
            self._starts[0] = t
        else:
            self._starts, self._ends = [t], [t]

    def spans(self) -> list[tuple[float, float]]:
        return list(zip(self._starts, self._ends, strict=True))


class _Supervision:
    """Lives and restarts, from the agent's events."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._open: dict[str, SlotLife] = {}
        self._exits: dict[str, tuple[float, str]] = {}
        self._down: dict[str, float] = {}

    def read(self, events: Iterator[dict[str, Any]]) -> None:
        for event in events:
            t, slot = _t(event), str(event.get("slot", ""))
            match event.get("kind"):
                case "run_started":
                    self._close_all(t)
                case "queue_account":
                    counts = {k: v for k, v in event.items() if k not in ("t", "m") and isinstance(v, int)}
                    self._history.account = counts
                case "slot_spawned":
                    life = SlotLife(slot=slot, start=t)
                    self._open[slot] = life
                    self._history.lives.append(life)
                case "slot_ready":
                    if slot in self._open:
                        self._open[slot].ready = t
                    self._ready_again(slot, t)
                case "slot_exited":
                    self._exited(slot, t, event.get("diagnosis"))
                case "slot_restarting":
                    self._restarting(slot)
        self._close_all(math.inf)

    def _exited(self, slot: str, t: float, diagnosis: Any) -> None:
        diagnosis = diagnosis if isinstance(diagnosis, dict) else {}
        kind = str(diagnosis.get("kind", "unknown"))
        self._exits[slot] = (t, "" if kind == "clean" else kind)
        life = self._open.pop(slot, None)
        if life is not None:
            life.end = t
            life.failure, life.cause = self._exits[slot][1], str(diagnosis.get("cause", ""))

    def _restarting(self, slot: str) -> None:
        t, kind = self._exits.get(slot, (NAN, ""))
        role = self._role(slot)
        role.count += 1
        role.causes[kind or "requested"] += 1
        if t == t:
            self._down.setdefault(slot, t)

    def _ready_again(self, slot: str, t: float) -> None:
        since = self._down.pop(slot, None)
        if since is not None:
            self._role(slot).away_s += max(0.0, t - since)

    def _close_all(self, t: float) -> None:
        """The agent ended, and every process with it, at the latest at the end of their session."""
        before = [end for start, end in self._history.sessions if start < t]
        end = before[-1] if before else NAN
        for life in self._open.values():
            life.end, life.cut = end, True
        for slot in list(self._down):
            self._ready_again(slot, end)
        self._open.clear()

    def _role(self, slot: str) -> Restarts:
        return self._history.restarts.setdefault(slot.partition("/")[0], Restarts())


def _step(record: dict[str, Any]) -> StepRecord:
    staleness = record.get("staleness")
    keys = record.get("keys")
    return StepRecord(
        step=int(_number(record, "step", 0.0)),
        epoch=int(_number(record, "epoch", 0.0)),
        t=_t(record),
        reward=_number(record, "reward_mean"),
        wait_s=_number(record, "wait_s"),
        train_s=_number(record, "train_s"),
        publish_s=_number(record, "publish_s"),
        tokens=_number(record, "tokens", 0.0),
        computed_tokens=_number(record, "computed_tokens", 0.0),
        staleness=dict(Counter(int(s) for s in staleness)) if isinstance(staleness, list) else {},
        keys=[_key(str(key)) for key in keys] if isinstance(keys, list) else [],
        skipped=str(record.get("skipped") or ""),
        # A skipped step has the count of the step before.
        empty=bool(record.get("empty_steps")) and not record.get("skipped"),
    )


def _key(text: str) -> int:
    """``group.member`` as one number: a long run has millions of them."""
    group, _, member = text.partition(".")
    return int(group) << 20 | int(member)


def _evaluation(record: dict[str, Any]) -> Evaluation:
    return Evaluation(
        when=str(record.get("when", "during")),
        step=int(_number(record, "step", 0.0)),
        t=_t(record),
        items=int(_number(record, "items", 0.0)),
        exact=_number(record, "exact"),
        exact_low=_number(record, "exact_low"),
        exact_high=_number(record, "exact_high"),
        lenient=_number(record, "lenient"),
        format=_number(record, "format"),
        constant_answer=str(record.get("constant_answer", "")),
        constant=_number(record, "constant"),
        gain_low=_number(record, "gain_low"),
        gain_high=_number(record, "gain_high"),
        reward=_number(record, "reward"),
    )


def _t(record: dict[str, Any]) -> float:
    return _number(record, "t")


def _number(record: dict[str, Any], key: str, default: float = NAN) -> float:
    """A number of the record; what is missing, or was not a number when written (null), gives the default."""
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else default
