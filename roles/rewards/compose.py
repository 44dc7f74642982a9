"""The reward of a run: its components, each where it runs, and their weighted sum."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_rt.config.problems import KeyPath, Problem, dotted
from relax_rt.roles.rewards.box.run import BoxFailed, Mode, closed_in
from relax_rt.roles.rewards.library.code import BoxOptions
from relax_rt.roles.rewards.loader import RewardFunction
from relax_rt.roles.rewards.registry import Place, bind, names, rewards
from relax_rt.roles.rewards.scoring import CONCURRENT_CALLS, Caller, Failed, Request, Score, Scorer
from relax_rt.roles.rewards.settings import ComponentTable, RewardTable
from relax_rt.roles.rewards.workers.messages import Part, Setup, TaskSpec
from relax_rt.roles.rewards.workers.pool import Pool, WorkerLimits
from relax_rt.roles.rewards.workers.serve import load_part, verdict_of
from relax_rt.transport.base.targets import did_you_mean
from relax_rt.transport.rpc.errors import RelaxError

REWARD: KeyPath = ("reward",)


@dataclass(frozen=True, slots=True)
class Component:
    """A component as its table says.

    Attributes:
        place: inline or worker; a user's function is always a worker's.
        box: what bounds the programs that it runs; None: it runs none.
        forgive: whether a failure counts 0. forgive_excess: whether one does that took too much time or memory: in a
            reward that is known, that is the completion's doing.
    """

    label: str
    weight: float
    part: Part
    place: Place
    forgive: bool
    forgive_excess: bool
    box: BoxOptions | None = None


def read_components(
    table: RewardTable, place: KeyPath = REWARD, key: str = "components"
) -> list[Component] | list[Problem]:
    """What a table names, or everything that is wrong with it. No user code is loaded.

    Args:
        place: of the table in the config. key: of its components there.
    """
    problems: list[Problem] = []
    if bool(table.function) == bool(table.components):
        both = bool(table.function)
        message = "function and components are both set" if both else "neither function nor components is set"
        hint = 'give one: function = "reward.py:score", or components = [{ name = "math" }]'
        return [Problem((*place, key) if both else place, message, hint, at="key")]
    found: list[Component] = []
    for at, one in _tables(table, place, key):
        read = _read(table, one, at, alone=not table.components)
        if isinstance(read, Component):
            found.append(read)
        else:
            problems += read
    problems += _across(found, table, place, key)
    return problems or found


def _tables(table: RewardTable, place: KeyPath, key: str) -> list[tuple[KeyPath, ComponentTable]]:
    if table.components:
        return [((*place, key, index), one) for index, one in enumerate(table.components)]
    function = str(table.function)
    if ":" in function or (function not in names() and function.endswith(".py")):
        return [(place, ComponentTable(function=function, group=table.group))]
    return [(place, ComponentTable(name=function, group=table.group))]


def _read(table: RewardTable, one: ComponentTable, at: KeyPath, *, alone: bool) -> Component | list[Problem]:
    forgive = (one.on_failure or table.on_failure) == "zero"
    if (one.name is None) == (one.function is None):
        both = one.name is not None
        message = "name and function are both set" if both else "neither name nor function says what it is"
        return [Problem((*at, "function") if both else at, message, f"rewards with names: {', '.join(names())}")]
    if not math.isfinite(one.weight):
        return [Problem((*at, "weight"), f"{dotted((*at, 'weight'))} must be finite")]
    if one.function is not None:
        if one.options:
            known = [*ComponentTable.model_fields]
            key = next(iter(one.options))
            hint = did_you_mean(key, known) or "a function takes what it needs from the item's metadata"
            message = f"unknown key '{key}' in [{dotted(at)}]: a function has no options"
            return [Problem((*at, key), message, hint, at="key")]
        setting = dotted((*at, "function"))
        part = Part(one.function, {}, setting, one.group)
        return Component(one.label or one.function.rpartition(":")[2], one.weight, part, "worker", forgive, False)
    name = str(one.name)
    options = bind(name, one.options, at, "function" if alone else "name")
    if isinstance(options, list):
        return options
    if one.group:
        message = f"'{name}' scores each completion by itself"
        return [Problem((*at, "group"), message, "group = true is for functions of yours", at="key")]
    part = Part(name, one.options, dotted((*at, "function" if alone else "name")))
    box = options if isinstance(options, BoxOptions) else None
    return Component(one.label or name, one.weight, part, rewards()[name].place, forgive, True, box)


def _across(found: Sequence[Component], table: RewardTable, place: KeyPath, key: str) -> list[Problem]:
    problems = []
    if found and not any(one.weight for one in found):
        message = "all weights are 0: every reward would be the same"
        problems.append(Problem((*place, key), message, "give at least one component a weight"))
    for label, times in Counter(one.label for one in found).items():
        if times > 1:
            message = f"{times} components are called '{label}'"
            problems.append(Problem((*place, key), message, 'tell them apart: label = "…"'))
    if table.components and table.group:
        message = "group belongs to reward.function; components say it for themselves"
        problems.append(Problem((*place, "group"), message, "[[reward.components]] group = true", at="key"))
    return problems


def components_of(table: RewardTable, place: KeyPath = REWARD, key: str = "components") -> list[Component]:
    """What a table names, once it was checked; see `read_components`.

    Raises:
        RelaxError: something is wrong with it.
    """
    found = read_components(table, place, key)
    wrong = [one for one in found if isinstance(one, Problem)]
    if wrong:
        raise RelaxError(f"[{dotted(place)}]", why="; ".join(one.message for one in wrong), hint=wrong[0].hint)
    return [one for one in found if isinstance(one, Component)]


def wanted(table: RewardTable, config_dir: Path) -> frozenset[str] | None:
    """The names of information that the components take together; None: everything. Imports the user's code.

    Raises:
        RelaxError: a function cannot be loaded.
    """
    every: frozenset[str] = frozenset()
    for one in components_of(table):
        wants = load_part(one.part, config_dir).wants
        if wants is None:
            return None
        every |= wants
    return every


def takes_groups(table: RewardTable) -> bool:
    """Whether any component must see whole groups."""
    return table.group or any(one.group for one in table.components)


class _Scores(Protocol):
    async def __call__(self, requests: Sequence[Request], after_each: Callable[[], None]) -> list[Score | Failed]: ...


class Rewards:
    """Scores completions by all components. `start` it, and `close` it whatever happens.

    Args:
        config_dir: what relative files of functions are relative to.
        task: the reasoning-gym task of the prompts, for functions that take its verdict.
        say: told of each worker that was lost, in words.
        place, key: of the components in the config, for what is wrong with them.
    """

    def __init__(
        self,
        table: RewardTable,
        config_dir: Path,
        task: TaskSpec | None = None,
        say: Callable[[str], None] = lambda why: None,
        *,
        place: KeyPath = REWARD,
        key: str = "components",
    ) -> None:
        self._table, self._config_dir, self._task, self._say = table, config_dir, task, say
        self.components = components_of(table, place, key)
        self.groups = any(one.part.group for one in self.components)
        self.boxes: Mode | None = None
        """How programs are closed in, once it is started; None: none are run."""
        self._scores: list[_Scores] = []
        self._pool: Pool | None = None
        self._threads: list[Scorer] = []
        self._inline: list[RewardFunction] = []

    @classmethod
    def of_function(cls, function: Callable[..., Any], timeout_s: float) -> Rewards:
        """One plain function, called in a thread of this process: for tests and programs of one's own."""
        made = cls(RewardTable(function="exact", timeout_s=timeout_s, workers=0), Path())
        scorer = Scorer(Caller(RewardFunction(function, "f"), timeout_s), timeout_s)
        made.components = [Component("f", 1.0, Part("f"), "worker", forgive=False, forgive_excess=False)]
        made._threads.append(scorer)
        made._scores.append(scorer.score)
        return made

    async def start(self) -> None:
        """Load all functions, in the processes where they run.

        Raises:
            RelaxError: one cannot be loaded, no process started for it, or programs cannot be closed in as it asks.
        """
        table, theirs = self._table, [one.part for one in self.components if one.place == "worker"]
        try:
            await self._look_at_boxes()
            if theirs and table.workers:
                setup = Setup(theirs, str(self._config_dir), table.timeout_s, self._task)
                limits = WorkerLimits(processes=table.processes, total_mib=table.memory_mib)
                self._pool = Pool(setup, limits, table.workers, self._say)
                await self._pool.start()
            for one in self.components:
                self._scores.append(await self._place(one, theirs))
        except BaseException:
            await self.close()
            raise

    async def _look_at_boxes(self) -> None:
        for one in self.components:
            if one.box is None:
                continue
            try:
                mode = await closed_in(one.box.box, one.box.command)
            except BoxFailed as error:
                what = f"{one.part.setting} = {one.part.target!r}"
                raise RelaxError(what, why=f"{error.what}: {error.why}", hint=error.hint) from error
            if self.boxes is None or mode.level == "limits":
                self.boxes = mode

    async def _place(self, one: Component, theirs: list[Part]) -> _Scores:
        if one.place == "worker" and self._pool is not None:
            pool, part = self._pool, theirs.index(one.part)

            async def by_workers(requests: Sequence[Request], after_each: Callable[[], None]) -> list[Score | Failed]:
                return await pool.score(part, requests, after_each)

            return by_workers
        # Imports may take long, and this process has deadlines to keep.
        function = await asyncio.to_thread(load_part, one.part, self._config_dir)
        if one.place == "inline" and function.is_async:
            self._inline.append(function)
            return Awaited(Caller(function, None))
        timeout_s = self._table.timeout_s
        scorer = Scorer(Caller(function, timeout_s, verdict_of(self._task)), timeout_s, groups=one.part.group)
        self._threads.append(scorer)
        return scorer.score

    @property
    def at_a_time(self) -> int:
        """How many completions are at work at once, once it is started."""
        functions = [] if self._pool is None else self._pool.functions
        return CONCURRENT_CALLS if self._inline or any(one.is_async for one in functions) else self._table.workers or 1

    @property
    def level(self) -> str:
        """How well the workers are closed in: `namespaces` or `limits`; empty without workers."""
        return self._pool.level if self._pool is not None else ""

    async def score(
        self, requests: Sequence[Request], after_each: Callable[[], None] = lambda: None
    ) -> list[Score | Failed]:
        """Scores in order. Where a component scores groups, those of one `Request.group` are one, and fail together.

        Args:
            after_each: called for each result of each component: proof of life.
        """
        if not requests:
            return []
        order = sorted(range(len(requests)), key=lambda index: requests[index].group)
        sorted_requests = [requests[index] for index in order]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(score(sorted_requests, after_each)) for score in self._scores]
        results = [combine(self.components, parts) for parts in zip(*(task.result() for task in asked), strict=True)]
        if self.groups:
            _fail_together(sorted_requests, results)
        found = dict(zip(order, results, strict=True))
        return [found[index] for index in range(len(requests))]

    async def score_one(self, request: Request) -> Score | Failed:
        """One completion."""
        (result,) = await self.score([request])
        return result

    async def close(self) -> None:
        """End all processes, and what they started."""
        if self._pool is not None:
            await self._pool.close()
        for scorer in self._threads:
            await scorer.close()
        for function in self._inline:
            if (close := getattr(function.function, "aclose", None)) is not None:
                await close()


class Awaited:
    """An async function of ours that has deadlines of its own, awaited in this very loop."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    async def __call__(self, requests: Sequence[Request], after_each: Callable[[], None]) -> list[Score | Failed]:
        results: list[Score | Failed] = [Failed("it was not scored")] * len(requests)
        for first in range(0, len(requests), CONCURRENT_CALLS):

            def done(index: int, result: Score | Failed, first: int = first) -> None:
                results[first + index] = result
                after_each()

            await self._caller.together(requests[first : first + CONCURRENT_CALLS], done)
        return results


def combine(components: Sequence[Component], results: Sequence[Score | Failed]) -> Score | Failed:
    """The weighted sum of one completion's scores. Pure.

    An unreadable answer of the data makes its component 0 for the whole group, which gives zero advantage. Failing the
    sample instead would regenerate it indefinitely.

    Its components are their totals by label, unweighted, and those of a function that returned several as label.name.
    """
    if len(components) == 1 and components[0].weight == 1 and isinstance(results[0], Score):
        return results[0]
    total, parts, forgiven, unreadable = 0.0, {}, [], ""
    turns: list[float] = []
    for one, result in zip(components, results, strict=True):
        if isinstance(result, Failed):
            why = f"{one.label}: {result.reason}" if len(components) > 1 else result.reason
            if result.unreadable:
                unreadable = unreadable or why
            elif not (one.forgive or (result.excess and one.forgive_excess)):
                return Failed(why, stuck=result.stuck, excess=result.excess)
            forgiven.append(why)
            parts[one.label] = 0.0
            continue
        total += one.weight * result.total
        parts[one.label] = result.total
        if len(result.components) > 1:
            parts |= {f"{one.label}.{name}": value for name, value in result.components.items()}
        if result.turns:
            if turns and len(turns) != len(result.turns):
                return Failed(f"{one.label} has {len(result.turns)} turn_rewards, and others have {len(turns)}")
            turns = [a + one.weight * b for a, b in zip(turns or [0.0] * len(result.turns), result.turns, strict=True)]
    return Score(total, parts, tuple(turns), tuple(forgiven), unreadable)


def _fail_together(requests: Sequence[Request], results: list[Score | Failed]) -> None:
    """A group of which a member failed is made again as a whole, or its function would see a part of it."""
    why: dict[int, Failed] = {}
    for request, result in zip(requests, results, strict=True):
        if isinstance(result, Failed):
            why.setdefault(request.group, result)
    for index, request in enumerate(requests):
        if request.group in why and not isinstance(results[index], Failed):
            first = why[request.group]
            results[index] = Failed(f"another completion of its group failed: {first.reason}", excess=first.excess)
