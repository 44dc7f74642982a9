"""The reward of a run: its components, where each of them runs, and their weighted sum.

`Rewards` is what the reward role, the env role, dry runs and evaluation score completions with.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from relax_rt.config.problems import KeyPath, Problem, dotted
from relax_rt.process.sandbox import SandboxFailed, SandboxMode, require_level
from relax_rt.roles.rewards.library.code import SandboxOptions
from relax_rt.roles.rewards.library.functions import RewardFunction, RunsIn, read_options, rewards
from relax_rt.roles.rewards.scoring import (
    CONCURRENT_CALLS,
    RewardCaller,
    RewardFailed,
    RewardRequest,
    Score,
    ThreadScorer,
)
from relax_rt.roles.rewards.settings import ComponentTable, RewardTable
from relax_rt.roles.rewards.worker import FunctionSpec, RewardWorkerSetup, TaskSpec, load_function, task_verifier
from relax_rt.roles.rewards.workers import RewardWorkers
from relax_rt.transport.rpc.errors import RelaxError, did_you_mean

REWARD: KeyPath = ("reward",)
UNSCORED = RewardFailed("it was not scored")


@dataclass(frozen=True, slots=True)
class Component:
    """A component as its table describes it.

    Attributes:
        runs_in: inline or worker; a user's function always runs in a worker.
        zero_failures: count a failure as 0. zero_excess: count one that took too much time or memory as 0: in a named
            reward, that is the completion's doing.
        sandbox: limits of the programs that it runs; None: it runs none.
    """

    label: str
    weight: float
    function: FunctionSpec
    runs_in: RunsIn
    zero_failures: bool
    zero_excess: bool
    sandbox: SandboxOptions | None = None


def read_components(
    table: RewardTable, path: KeyPath = REWARD, key: str = "components"
) -> list[Component] | list[Problem]:
    """Return the components of a table, or everything that is wrong with it. No user code is loaded.

    Args:
        path: of the table in the config. key: of its components there.
    """
    if bool(table.function) == bool(table.components):
        both = bool(table.function)
        message = "function and components are both set" if both else "neither function nor components is set"
        hint = 'give one: function = "reward.py:score", or components = [{ name = "math" }]'
        return [Problem((*path, key) if both else path, message, hint, at="key")]
    if table.components:
        given = [((*path, key, index), one) for index, one in enumerate(table.components)]
    else:
        function = str(table.function)
        users = ":" in function or (function not in rewards() and function.endswith(".py"))
        fields = {"function" if users else "name": function, "group": table.group}
        given = [(path, ComponentTable.model_validate(fields))]
    problems: list[Problem] = []
    found: list[Component] = []
    for at, one in given:
        read = _read_component(table, one, at)
        if isinstance(read, Component):
            found.append(read)
        else:
            problems += read
    if found and not any(one.weight for one in found):
        message = "all weights are 0: every reward would be the same"
        problems.append(Problem((*path, key), message, "give at least one component a weight"))
    for label, times in Counter(one.label for one in found).items():
        if times > 1:
            message = f"{times} components are called '{label}'"
            problems.append(Problem((*path, key), message, 'tell them apart: label = "…"'))
    if table.components and table.group:
        message = "group belongs to reward.function; components say it for themselves"
        problems.append(Problem((*path, "group"), message, "[[reward.components]] group = true", at="key"))
    return problems or found


def _read_component(table: RewardTable, one: ComponentTable, at: KeyPath) -> Component | list[Problem]:
    zero_failures = (one.on_failure or table.on_failure) == "zero"
    if (one.name is None) == (one.function is None):
        both = one.name is not None
        message = "name and function are both set" if both else "neither name nor function says what it is"
        hint = f"rewards with names: {', '.join(rewards())}"
        return [Problem((*at, "function") if both else at, message, hint)]
    if not math.isfinite(one.weight):
        return [Problem((*at, "weight"), f"{dotted((*at, 'weight'))} must be finite")]
    if one.function is not None:
        if one.options:
            key = next(iter(one.options))
            hint = did_you_mean(key, [*ComponentTable.model_fields])
            hint = hint or "a function takes what it needs from the item's metadata"
            message = f"unknown key '{key}' in [{dotted(at)}]: a function has no options"
            return [Problem((*at, key), message, hint, at="key")]
        spec = FunctionSpec(one.function, {}, dotted((*at, "function")), one.group)
        label = one.label or one.function.rpartition(":")[2]
        return Component(label, one.weight, spec, "worker", zero_failures, zero_excess=False)
    name, key = str(one.name), "name" if table.components else "function"
    options = read_options(name, one.options, at, key)
    if isinstance(options, list):
        return options
    if one.group:
        message = f"'{name}' scores each completion by itself"
        return [Problem((*at, "group"), message, "group = true is for functions of yours", at="key")]
    spec = FunctionSpec(name, one.options, dotted((*at, key)))
    sandbox = options if isinstance(options, SandboxOptions) else None
    return Component(
        one.label or name, one.weight, spec, rewards()[name].runs_in, zero_failures, zero_excess=True, sandbox=sandbox
    )


def components_of(table: RewardTable, path: KeyPath = REWARD, key: str = "components") -> list[Component]:
    """Return the components of a table that was checked; see `read_components`.

    Raises:
        RelaxError: something is wrong with it.
    """
    found = read_components(table, path, key)
    wrong = [one for one in found if isinstance(one, Problem)]
    if wrong:
        raise RelaxError(f"[{dotted(path)}]", why="; ".join(one.message for one in wrong), hint=wrong[0].hint)
    return [one for one in found if isinstance(one, Component)]


def requested_info(table: RewardTable, config_dir: Path) -> frozenset[str] | None:
    """Return the names of information that the components ask for; None: everything. Imports the user's code.

    Raises:
        RelaxError: a function cannot be loaded.
    """
    names: frozenset[str] = frozenset()
    for one in components_of(table):
        wants = load_function(one.function, config_dir).wants
        if wants is None:
            return None
        names |= wants
    return names


def takes_groups(table: RewardTable) -> bool:
    """Return whether any component scores whole groups."""
    return table.group or any(one.group for one in table.components)


class ScoreCall(Protocol):
    """Scores requests with one component, in order."""

    async def __call__(
        self, requests: Sequence[RewardRequest], after_each: Callable[[], None]
    ) -> list[Score | RewardFailed]: ...


class Rewards:
    """Scores completions by all components. `start` it, and `close` it whatever happens.

    Args:
        config_dir: folder that files of functions are relative to.
        task: the reasoning-gym task of the prompts, for functions that take its verdict.
        on_lost: called with the reason for each worker that was lost.
        path, key: of the components in the config, for errors.
    """

    def __init__(
        self,
        table: RewardTable,
        config_dir: Path,
        task: TaskSpec | None = None,
        on_lost: Callable[[str], None] = lambda why: None,
        *,
        path: KeyPath = REWARD,
        key: str = "components",
    ) -> None:
        self._table, self._config_dir, self._task, self._on_lost = table, config_dir, task, on_lost
        self.components = components_of(table, path, key)
        self.groups = any(one.function.group for one in self.components)
        self.sandbox: SandboxMode | None = None
        """How programs are isolated, once started; None if none are run."""
        self._scores: list[ScoreCall] = []
        self._workers: RewardWorkers | None = None
        self._threads: list[ThreadScorer] = []
        self._inline: list[RewardFunction] = []

    @classmethod
    def of_function(cls, function: Callable[..., Any], timeout_s: float) -> Rewards:
        """Score with one plain function, called in a thread of this process: for tests and users' own programs."""
        made = cls(RewardTable(function="exact", timeout_s=timeout_s, workers=0), Path())
        scorer = ThreadScorer(RewardCaller(RewardFunction(function, "f"), timeout_s), timeout_s)
        made.components = [Component("f", 1.0, FunctionSpec("f"), "worker", zero_failures=False, zero_excess=False)]
        made._threads.append(scorer)
        made._scores.append(scorer.score)
        return made

    async def start(self) -> None:
        """Load all functions, in the processes where they run.

        Raises:
            RelaxError: one cannot be loaded, no process started for it, or programs cannot be isolated as it asks.
        """
        table, in_workers = self._table, [one.function for one in self.components if one.runs_in == "worker"]
        try:
            for one in self.components:
                if one.sandbox is None:
                    continue
                try:
                    mode = await require_level(one.sandbox.box, one.sandbox.command)
                except SandboxFailed as error:
                    what = f"{one.function.setting} = {one.function.target!r}"
                    raise RelaxError(what, why=f"{error.what}: {error.why}", hint=error.hint) from error
                if self.sandbox is None or mode.level == "limits":
                    self.sandbox = mode
            if in_workers and table.workers:
                setup = RewardWorkerSetup(in_workers, str(self._config_dir), table.timeout_s, self._task)
                self._workers = RewardWorkers(
                    setup,
                    table.workers,
                    processes=table.processes,
                    memory_mib=table.memory_mib,
                    on_lost=self._on_lost,
                )
                await self._workers.start()
            for one in self.components:
                self._scores.append(await self._load(one, in_workers))
        except BaseException:
            await self.close()
            raise

    async def _load(self, one: Component, in_workers: list[FunctionSpec]) -> ScoreCall:
        if one.runs_in == "worker" and self._workers is not None:
            workers, number = self._workers, in_workers.index(one.function)

            async def score(
                requests: Sequence[RewardRequest], after_each: Callable[[], None]
            ) -> list[Score | RewardFailed]:
                return await workers.score(number, requests, after_each)

            return score
        # In a thread: imports may take long, and this process has deadlines to keep.
        function = await asyncio.to_thread(load_function, one.function, self._config_dir)
        if one.runs_in == "inline" and function.is_async:
            self._inline.append(function)
            inline = RewardCaller(function, None)

            async def score_inline(
                requests: Sequence[RewardRequest], after_each: Callable[[], None]
            ) -> list[Score | RewardFailed]:
                """Await calls that have deadlines of their own in this process's event loop."""
                results: list[Score | RewardFailed] = [UNSCORED] * len(requests)
                for first in range(0, len(requests), CONCURRENT_CALLS):

                    def done(index: int, result: Score | RewardFailed, first: int = first) -> None:
                        results[first + index] = result
                        after_each()

                    await inline.together(requests[first : first + CONCURRENT_CALLS], done)
                return results

            return score_inline
        timeout_s = self._table.timeout_s
        caller = RewardCaller(function, timeout_s, task_verifier(self._task))
        scorer = ThreadScorer(caller, timeout_s, groups=one.function.group)
        self._threads.append(scorer)
        return scorer.score

    @property
    def concurrency(self) -> int:
        """Number of completions that are scored concurrently, once started."""
        is_async = bool(self._inline) or (self._workers is not None and any(self._workers.is_async))
        return CONCURRENT_CALLS if is_async else self._table.workers or 1

    @property
    def level(self) -> str:
        """How workers are isolated: `namespaces` or `limits`; empty without workers."""
        return self._workers.pool.level if self._workers is not None else ""

    async def score(
        self, requests: Sequence[RewardRequest], after_each: Callable[[], None] = lambda: None
    ) -> list[Score | RewardFailed]:
        """Return scores in order. Where a component scores groups, requests of one `group` fail together.

        Args:
            after_each: called for each result of each component, as a sign of progress.
        """
        if not requests:
            return []
        order = sorted(range(len(requests)), key=lambda index: requests[index].group)
        sorted_requests = [requests[index] for index in order]
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(score(sorted_requests, after_each)) for score in self._scores]
        results = [combine(self.components, parts) for parts in zip(*(task.result() for task in asked), strict=True)]
        if self.groups:
            # The group of a failed member is regenerated as a whole, or its function would score only a part of it.
            failed: dict[int, RewardFailed] = {}
            for request, result in zip(sorted_requests, results, strict=True):
                if isinstance(result, RewardFailed):
                    failed.setdefault(request.group, result)
            for index, request in enumerate(sorted_requests):
                if (why := failed.get(request.group)) is not None and not isinstance(results[index], RewardFailed):
                    reason = f"another completion of its group failed: {why.reason}"
                    results[index] = RewardFailed(reason, excess=why.excess)
        found = dict(zip(order, results, strict=True))
        return [found[index] for index in range(len(requests))]

    async def score_one(self, request: RewardRequest) -> Score | RewardFailed:
        """Score one completion."""
        (result,) = await self.score([request])
        return result

    async def close(self) -> None:
        """End all processes, and what they started."""
        if self._workers is not None:
            await self._workers.close()
        for scorer in self._threads:
            await scorer.close()
        for function in self._inline:
            if (close := getattr(function.function, "aclose", None)) is not None:
                await close()


def combine(components: Sequence[Component], results: Sequence[Score | RewardFailed]) -> Score | RewardFailed:
    """Return the weighted sum of one completion's scores. Pure.

    An unreadable answer of the data makes its component 0 for the whole group, which gives zero advantage. Failing the
    sample instead would regenerate it indefinitely.

    Its components are their totals by label, unweighted, and those of a function that returned several as label.name.
    """
    if len(components) == 1 and components[0].weight == 1 and isinstance(results[0], Score):
        return results[0]
    total, parts, forgiven, unreadable = 0.0, {}, [], ""
    turns: list[float] = []
    for one, result in zip(components, results, strict=True):
        if isinstance(result, RewardFailed):
            why = f"{one.label}: {result.reason}" if len(components) > 1 else result.reason
            if result.unreadable:
                unreadable = unreadable or why
            elif not (one.zero_failures or (result.excess and one.zero_excess)):
                return RewardFailed(why, stuck=result.stuck, excess=result.excess)
            forgiven.append(why)
            parts[one.label] = 0.0
            continue
        total += one.weight * result.total
        parts[one.label] = result.total
        if len(result.components) > 1:
            parts |= {f"{one.label}.{name}": value for name, value in result.components.items()}
        if result.turns:
            if turns and len(turns) != len(result.turns):
                return RewardFailed(f"{one.label} has {len(result.turns)} turn_rewards, and others have {len(turns)}")
            turns = [a + one.weight * b for a, b in zip(turns or [0.0] * len(result.turns), result.turns, strict=True)]
    return Score(total, parts, tuple(turns), tuple(forgiven), unreadable)
