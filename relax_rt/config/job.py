"""The job interface: the part of a run that knows what its roles are for. Found by entry point `relax_rt.jobs`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import msgspec

from relax_rt.config.problems import Problem, did_you_mean
from relax_rt.config.schema import RoleSettings, RunConfig, SupervisionTable
from relax_rt.transport.rpc.errors import Refused, RelaxError

if TYPE_CHECKING:
    from relax_rt.config.inventory import Inventory
    from relax_rt.transport.queue.ledger.policy import LedgerPolicy

JOB_GROUP = "relax_rt.jobs"


class PlanLine(msgspec.Struct, frozen=True):
    """One line of `relax-rt plan`: what a run will need or do, before it starts.

    Attributes:
        section: heading it stands under, ``memory``, ``data``, ``steps``.
        name: what is counted.
        value: the amount, with its unit, ``412 MiB``.
        how: where the number comes from, ``135 M parameters x 4 bytes``.
    """

    section: str
    name: str
    value: str
    how: str = ""


class Pacing(msgspec.Struct, frozen=True):
    """Which metrics the time of a step consists of, for the estimate of the time left.

    Attributes:
        wait: key in a step's record: seconds waiting for input.
        work: keys of its other durations (s).
        ahead: steps whose input may be produced before the first has its own; 0: input and work alternate.
        repeated: kinds of record whose `seconds` with `when` = "before" are spent again after the last step.
        contention: slowdown of steps and evaluations while both run (1: none).
    """

    wait: str = ""
    work: tuple[str, ...] = ()
    ahead: int = 0
    repeated: tuple[str, ...] = ()
    contention: float = 1.0


class Column(msgspec.Struct, frozen=True):
    """A column of the live screen: what the newest metrics records of one kind say.

    Attributes:
        kind: the `kind` of the metrics record it is taken from, ``step``.
        key: the record's key: a number, or a list of numbers.
        title: heading; empty: only lines show it.
        form: format specification for the value, ``.3f``.
        aggregate: ``last`` the newest record's value; ``mean_max`` mean and maximum of its list; ``rate`` of a counter
            that each sender keeps: its growth a second over the last 20 s, of all live senders together.
        of: a second key of the same record, shown after a slash (``outstanding`` of ``bound``).
        spark: draw the last 40 values.
        line: template of the line that is printed for each record as it comes, ``held out {when}: {exact:.3f}``, if
            the record has the key; without it the column stands in the line that is printed for each step.
    """

    kind: str
    key: str
    title: str
    form: str = ""
    aggregate: Literal["last", "mean_max", "rate"] = "last"
    of: str = ""
    spark: bool = False
    line: str = ""


class TriedSample(msgspec.Struct, frozen=True, kw_only=True):
    """One sample as a run would make and score it. T tokens = prompt and completion.

    Attributes:
        model: folder of the weights. step: optimizer steps of the checkpoint; None for the model of the config.
        split: train, held_out, or own for a prompt of the command line.
        index: place in the run's order (train) or among the held-out items. item: id of the data item, "" without one.
        prompt: rendered, special tokens written out: what `tokens` says, not what was meant.
        completion: as the reward function gets it, special tokens left out.
        tokens, loss_mask, behaviour_logprobs: length T; the mask is 1 on sampled tokens, and the log-probability is 0
            where the mask is 0.
        stop_token: spelling of the token that ended it, "" if none did.
        mean_logprob: over the sampled tokens.
        answer: the right one, None if it is not known.
        reward, rewards: total and components; None and empty when it was not scored, for the reason in `unscored`.
        note: what else a run would do with it.
    """

    model: str
    step: int | None
    split: str
    index: int
    item: str
    prompt: str
    completion: str
    tokens: list[int]
    loss_mask: list[int]
    behaviour_logprobs: list[float]
    finish_reason: str
    stop_token: str
    temperature: float
    mean_logprob: float
    answer: str | None
    reward: float | None
    rewards: dict[str, float]
    unscored: str = ""
    note: str = ""


class UnreadableAnswer(msgspec.Struct, frozen=True):
    """A right answer of the data that does not get 1 against itself: file and line, the answer, and the reason."""

    where: str
    answer: str
    why: str


MAX_WRONG = 0.5
"""If a larger share of the right answers cannot be read, the reward does not fit the data."""


class AnswerReport(msgspec.Struct):
    """Result of scoring the right answers of the data with one reward.

    Attributes:
        checked: number of rows scored, of `rows` in total. wrong: rows that do not get 1, the first ones in `examples`.
    """

    reward: str
    rows: int
    checked: int = 0
    wrong: int = 0
    examples: list[UnreadableAnswer] = []

    def lines(self, most: int) -> list[str]:
        """Render the report with at most `most` examples; empty if all answers get 1."""
        if not self.wrong:
            return []
        head = (
            f"{self.wrong} of {self.checked} right answers that were checked (of {self.rows}) do not get 1 from "
            f"'{self.reward}' against themselves; completions of such rows get wrong scores:"
        )
        shown = [f"  {one.where}: {one.answer!r}: {one.why}" for one in self.examples[:most]]
        left = [f"  … and {self.wrong - len(shown)} more"] if self.wrong > len(shown) else []
        return [head, *shown, *left]

    def problem(self, most: int) -> Problem | None:
        """Return the problem of a reward that does not fit the data, with at most `most` examples; None: it fits."""
        if self.wrong <= MAX_WRONG * self.checked:
            return None
        hint = "name the column that holds the answer alone, or take a reward that fits: docs/guides/rewards.md"
        return Problem(("reward",), "\n".join(self.lines(most)), hint)


class Job(ABC):
    """Base class of a kind of run. What a job does not override has the default of a run without model and data.

    The module that defines it is imported by the command line, the agent and every role: it must import nothing
    heavy (numpy, torch) at its top. Checks return all problems at once, with the key each is about.
    """

    Config: ClassVar[type[RunConfig]] = RunConfig
    """The whole roles.toml: the runtime's tables and the job's own."""
    Roles: ClassVar[Mapping[str, type[RoleSettings]]] = {}
    """The kinds of role that the job runs, with their settings; one without a table in roles.toml gets defaults."""
    headline: ClassVar[Sequence[Column]] = ()
    """What the live screen shows of the metrics."""
    one_node: ClassVar[Sequence[str]] = ()
    """Roles that run on the head's node only, because they share memory and files."""
    changeable: ClassVar[frozenset[str]] = frozenset()
    """Keys of roles.toml that may differ when a run is resumed."""

    @abstractmethod
    def ledger_policy(self, config: Any) -> LedgerPolicy:
        """Return the policy of the queue's ledger."""

    def assumed(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the tables to add to a roles.toml that leaves them out.

        Args:
            data: the parsed roles.toml.
        """
        return {}

    def settled(self, roles: dict[str, RoleSettings], supervision: SupervisionTable) -> dict[str, RoleSettings]:
        """Adjust the settings of roles that depend on other roles or on the supervision table."""
        return roles

    def choose(self, config: Any, recorded: Mapping[str, Any], *, measured: bool, here: bool) -> RunConfig:
        """Fill in the settings that the job chooses, and `config.chosen`.

        Args:
            recorded: the resolved config that the run was started with; empty for a new run.
            measured: whether the choice may take seconds of measurement; False: return at once.
            here: whether the run starts on this machine; False for a plan for other machines.
        """
        resolved: RunConfig = config
        return resolved

    def absent(self, config: Any) -> Sequence[str]:
        """Return the kinds of role that have no work in this run and are not started."""
        return ()

    def past(self, run_dir: Path) -> dict[str, str]:
        """Return the `changeable` keys that no longer have an effect in this run, each with the reason."""
        return {}

    def resumes_at(self, run_dir: Path) -> int | None:
        """Return the step of the checkpoint that a resumed run continues from; 0: from the beginning.

        None: the job has no checkpoints.
        """
        return None

    def check(self, config: Any, config_dir: Path) -> list[Problem]:
        """Run the cheap checks across keys: no model, data or user code is loaded."""
        return []

    def missing_inputs(self, config: Any, config_dir: Path) -> list[Problem]:
        """Return a problem for each file that the config names and that does not exist.

        Belongs to the quick checks: no file is opened.
        """
        return []

    def preflight(self, config: Any, config_dir: Path, *, answers: bool = True) -> list[Problem]:
        """Run the slow checks before anything starts: the model, the data, a dry run of the reward function.

        Called only when the quick checks found nothing; each stage prints to standard error what it does before it
        begins.

        Args:
            answers: whether to score some right answers of the data; False: `check_answers` is called for all of them.
        """
        return []

    def check_answers(self, config: Any) -> list[AnswerReport] | None:
        """Score every right answer of the data against itself, a report for each reward that compares with them.

        None: the job has no right answers.
        """
        return None

    def plan(self, config: Any) -> list[PlanLine]:
        """Return what the run will need and do."""
        return []

    def shm_bytes(self, config: Any) -> int:
        """Return the shared memory in bytes that the run needs on this node besides the queue's capacity."""
        return 0

    def steps(self, config: Any) -> int | None:
        """Return the number of steps of the run, for the progress bar; None if it has no such end."""
        return None

    def pacing(self, config: Any) -> Pacing:
        """Return which metrics the time of a step consists of, for the estimate of the time left."""
        return Pacing()

    def stall_after_s(self, config: Any) -> float | None:
        """Return after how many seconds without progress in any slot the run ends; None: never."""
        return None

    def advice(self, config: Any, loss: Mapping[str, Any]) -> str:
        """Return the setting that helps against a loss in the queue; empty if there is none.

        Args:
            loss: fields of a `Loss` of the queue.
        """
        return ""

    def finished(self, config: Any) -> str:
        """Return what has been done when every significant role has finished; empty: the last role is named."""
        return ""

    def finish(self, run_dir: Path, config: Any) -> dict[str, Any]:
        """Write plots and return the summary, after the last role has ended."""
        return {}

    def closing(self, summary: dict[str, Any]) -> list[str]:
        """Render the summary that `finish` returned as lines for people."""
        return []

    def sample(
        self, config: Any, run_dir: Path | None, items: int, *, held_out: bool = False, prompts: Sequence[str] = ()
    ) -> list[TriedSample]:
        """Generate and score samples as in a run, without starting one.

        Args:
            run_dir: sample from the newest checkpoint of this run; None: from the model that the config names.
            items: number of prompts, from the first of the run's order, or of the held-out ones.
            prompts: questions to ask instead; they have no answer and so no reward.

        Raises:
            Refused: the job has no model.
        """
        raise Refused(
            f"samples of a run of job '{config.run.job}'",
            why="it has no model",
            hint="set run.job to the job that has one",
        )


class InventoryPlan(Protocol):
    """A plan for the machines of an inventory. Itself plain data (a msgspec struct), so that it prints as JSON."""

    def render(self) -> str:
        """Render the plan for people: plain text, the same on every terminal."""


@runtime_checkable
class Planner(Protocol):
    """A job that also plans for hardware that is not here."""

    Planned: ClassVar[Mapping[str, type[RoleSettings]]]
    """Kinds of role that a config may name, besides `Job.Roles`: without a table there is none. `startable` says which
    of them this version only plans."""

    def startable(self, config: Any) -> list[Problem]:
        """Return what a config asks for that this version can plan but not start."""

    def plan_on(self, config: Any, inventory: Inventory) -> InventoryPlan | list[Problem]:
        """Return the plan for these machines, or every reason why the run does not fit on them."""


def job_names() -> list[str]:
    """Return the kinds of job that are installed."""
    return sorted({entry.name for entry in entry_points(group=JOB_GROUP)})


def load_job(name: str) -> Job:
    """Return the job of that name.

    Raises:
        RelaxError: no package offers it, its module cannot be imported, or it is not a subclass of Job.
    """
    for entry in entry_points(group=JOB_GROUP):
        if entry.name != name:
            continue
        try:
            found = entry.load()
        except (ImportError, AttributeError) as error:
            raise RelaxError(
                f"job '{name}' ({entry.value}) cannot be loaded",
                why=str(error),
                hint="install the extra that it needs, as relax-rt[cpu] or relax-rt[gpu]",
            ) from error
        if not (isinstance(found, type) and issubclass(found, Job)):
            raise RelaxError(f"job '{name}' ({entry.value}) is not a subclass of relax_rt.config.job.Job")
        return found()
    known = job_names()
    raise RelaxError(
        f"unknown job '{name}'",
        hint=did_you_mean(name, known) or f"known jobs: {', '.join(known) or 'none; is relax-rt installed?'}",
    )


def absent_kinds(config: RunConfig) -> frozenset[str]:
    """Return the kinds of role that have no work in this run, from its job."""
    return frozenset(load_job(config.run.job).absent(config))


def pacing_of(config: RunConfig) -> Pacing:
    """Which metrics the time of a step consists of, from the run's job."""
    return load_job(config.run.job).pacing(config)


def finished(config: RunConfig) -> str:
    """What has been done when every significant role has finished, from the run's job."""
    return load_job(config.run.job).finished(config)


def advice(config: RunConfig, loss: Mapping[str, Any]) -> str:
    """The setting that helps against a loss in the queue, from the run's job."""
    return load_job(config.run.job).advice(config, loss)


def stall_after_s(config: RunConfig) -> float | None:
    """After how many seconds without progress the run ends, from the run's job; None: never."""
    return load_job(config.run.job).stall_after_s(config)
