"""What a job is: the part of a run that knows what the roles are for. Found by entry point `relax_rt.jobs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast, runtime_checkable

import msgspec

from relax_rt.config.problems import Problem, did_you_mean
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.transport.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.config.inventory import Inventory
    from relax_rt.transport.ledger.policy import LedgerPolicy

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
    """What a job's records say of the time that its steps take, for the estimate of the time left.

    Attributes:
        wait: key of a step's record: seconds that it waited for its input.
        work: keys of its other seconds.
        ahead: steps whose input may be made while the first waits for its own; 0: input and work take turns.
        repeated: kinds of record whose `seconds`, where `when` is "before", are needed again after the last step.
    """

    wait: str = ""
    work: tuple[str, ...] = ()
    ahead: int = 0
    repeated: tuple[str, ...] = ()


class Column(msgspec.Struct, frozen=True):
    """A column of the live screen: what the newest metrics records of one kind say.

    Attributes:
        kind: the `kind` of the metrics record it is taken from, ``step``.
        key: the record's key: a number, or a list of numbers.
        title: heading; empty: it is only told of in lines.
        form: format specification for the value, ``.3f``.
        aggregate: ``last`` the newest record's value; ``mean_max`` mean and maximum of its list; ``rate`` of a counter
            that each sender keeps: its growth a second over the last 20 s, of all living senders together.
        of: a second key of the same record, shown after a slash (``outstanding`` of ``bound``).
        spark: draw the last 40 values.
        line: template of the whole line that tells of each record as it comes, ``held out {when}: {exact:.3f}``, if
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


class WrongGold(msgspec.Struct, frozen=True):
    """A right answer of the data that does not get 1 against itself: file and line, what it is, and why."""

    where: str
    answer: str
    why: str


class GoldReport(msgspec.Struct):
    """What became of the right answers of the data with one reward.

    Attributes:
        checked: rows, of `rows` in all. wrong: rows that do not get 1; the first of them are in `examples`.
    """

    reward: str
    rows: int
    checked: int = 0
    wrong: int = 0
    examples: list[WrongGold] = []

    def lines(self, most: int) -> list[str]:
        """The report for people, with as many examples; empty if nothing is wrong."""
        if not self.wrong:
            return []
        head = (
            f"{self.wrong} of {self.checked} right answers that were checked (of {self.rows}) do not get 1 from "
            f"'{self.reward}' against themselves; completions of such rows are not scored as meant:"
        )
        shown = [f"  {one.where}: {one.answer!r:.80}: {one.why}" for one in self.examples[:most]]
        left = [f"  … and {self.wrong - len(shown)} more"] if self.wrong > len(shown) else []
        return [head, *shown, *left]


class Job(Protocol):
    """A kind of run.

    The module that defines it is imported by the command line, the agent and every role: it must import nothing
    heavy (numpy, torch) at its top. Checks return all problems at once, with the key each is about.
    """

    Config: ClassVar[type[RunConfig]]
    """The whole roles.toml: the runtime's tables and the job's own."""
    Roles: ClassVar[Mapping[str, type[RoleSettings]]]
    """The kinds of role that the job runs, with their settings; one without a table in roles.toml gets defaults."""
    headline: ClassVar[Sequence[Column]]
    """What the live screen shows of the metrics."""

    # A job may also name `one_node`, roles that cannot run but on the head's node: they share memory and files there.
    # And `changeable`, keys of roles.toml that may be otherwise when a run is resumed, and `past(run_dir)`, those of
    # them that can change nothing any more in this run, each with the reason. And `assumed(data)`, tables that need not
    # be there beside what is, and `settled(roles, supervision)`, the settings that the roles have beside each other and
    # by the run's rules. And `absent(config)`, roles that there is nothing to do for in a run. And
    # `missing_inputs(config, config_dir)`, a problem for each file that the config names and that is not there; it
    # only looks at names, so it belongs to the quick checks. And `pacing(config)`, a Pacing. And `choose(config,
    # recorded, measured, here)`, the config with the settings filled in that the job chooses, and `config.chosen`;
    # recorded is the resolved config that a run began with, measured = False must answer at once, here = False is for a
    # plan for other machines. And `advice(config, loss)`, the setting that helps against what the queue lost (fields of
    # a Loss), and `stall_after_s(config)`, after how many seconds without any movement a run ends (None: never). And
    # `check_golds(config)`: a GoldReport for each reward that compares with the right answers of the data, all scored.

    def check(self, config: Any, config_dir: Path) -> list[Problem]:
        """Cheap checks across keys: no model, data or user code is loaded."""

    def preflight(self, config: Any, config_dir: Path) -> list[Problem]:
        """Slow checks before anything starts: the model, the data, a dry run of the reward function. They run only when
        the quick ones found nothing; each stage says on standard error what it does before it begins."""

    def plan(self, config: Any) -> list[PlanLine]:
        """What the run will need and do."""

    def ledger_policy(self, config: Any) -> LedgerPolicy:
        """What the queue's ledger holds this job to."""

    def shm_bytes(self, config: Any) -> int:
        """Shared memory that the run needs on this node besides the queue's capacity."""

    def steps(self, config: Any) -> int | None:
        """Steps that the run is to make, for the progress bar; None if it has no such end."""

    def finish(self, run_dir: Path, config: Any) -> dict[str, Any]:
        """After the last role has ended: write plots, return the summary."""

    def closing(self, summary: dict[str, Any]) -> list[str]:
        """The summary that `finish` returned, in lines for people."""

    def sample(
        self, config: Any, run_dir: Path | None, items: int, *, held_out: bool = False, prompts: Sequence[str] = ()
    ) -> list[TriedSample]:
        """Samples made and scored as in a run, without one.

        Args:
            run_dir: sample from the newest checkpoint of this run; None: from the model that the config names.
            items: how many prompts, from the first of the run's order, or of the held-out ones.
            prompts: questions to ask instead; they have no answer and so no reward.
        """


class InventoryPlan(Protocol):
    """A plan for the machines of an inventory. Itself plain data (a msgspec struct), so that it prints as JSON."""

    def render(self) -> str:
        """The plan for people: plain text, the same on every terminal."""


@runtime_checkable
class Planner(Protocol):
    """A job that also plans for hardware that is not here."""

    Planned: ClassVar[Mapping[str, type[RoleSettings]]]
    """Kinds of role that a config may name, besides `Job.Roles`: without a table there is none. `startable` says which
    of them this version only plans."""

    def startable(self, config: Any) -> list[Problem]:
        """What a config asks for that can be planned and not be started by this version."""

    def plan_on(self, config: Any, inventory: Inventory) -> InventoryPlan | list[Problem]:
        """The plan for these machines, or every reason why the run does not fit on them."""


def job_names() -> list[str]:
    """The kinds of job that are installed."""
    return sorted({entry.name for entry in entry_points(group=JOB_GROUP)})


def load_job(name: str) -> Job:
    """The job of that name.

    Raises:
        RelaxError: no package offers it, or its module cannot be imported.
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
        return cast(Job, found() if isinstance(found, type) else found)
    known = job_names()
    raise RelaxError(
        f"unknown job '{name}'",
        hint=did_you_mean(name, known) or f"known jobs: {', '.join(known) or 'none; is relax-rt installed?'}",
    )


def absent_kinds(config: RunConfig) -> frozenset[str]:
    """Roles that there is nothing to do for in this run, by the job's own word."""
    absent = getattr(load_job(config.run.job), "absent", None)
    return frozenset(absent(config)) if absent is not None else frozenset()


def pacing_of(config: RunConfig) -> Pacing:
    """What the run's job says of the time of its steps; nothing, if it does not say."""
    found = getattr(load_job(config.run.job), "pacing", None)
    return found(config) if found is not None else Pacing()


def advice(config: RunConfig, loss: Mapping[str, Any]) -> str:
    """The setting that helps against a loss, by the job's own word."""
    known = getattr(load_job(config.run.job), "advice", None)
    return str(known(config, loss)) if known is not None else ""


def stall_after_s(config: RunConfig) -> float | None:
    """After how long without any movement the run ends, by the job's own word; None: never."""
    known = getattr(load_job(config.run.job), "stall_after_s", None)
    return known(config) if known is not None else None
