"""The runtime's part of roles.toml. A job (relax_rt.jobs entry point) adds its own top-level tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from relax_rt.config.problems import KeyPath, Problem, dotted
from relax_rt.transport.rpc.errors import RelaxError

Seconds = Annotated[float, Field(gt=0)]
Filled = Annotated[str, Field(min_length=1)]
"""A path or a name: empty, it would name the folder that it is relative to."""
MIB = 1 << 20
RESERVED_ENV = "RELAX_"
"""Prefix of the variables by which the agent configures a role's process."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

T = TypeVar("T", bound="Table")
S = TypeVar("S", bound="RoleSettings")


class Table(BaseModel):
    """A table of roles.toml: unknown keys are errors, values are not coerced across types."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    meant: ClassVar[Mapping[str, str]] = {}
    """Keys of other trainers, that are none here -> what to write instead."""

    def problems(self, path: KeyPath) -> Iterable[Problem]:
        """Check the table's own keys against each other, beyond their types and bounds.

        Args:
            path: where the table stands in the config.
        """
        return ()


class RunTable(Table):
    """Name, directory and seed of the run."""

    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,40}$")]
    """Name of the run: lower-case letters, digits, - and _."""
    dir: Filled = "runs/{name}"
    """Run directory, relative to the working directory; {name} stands for the name. An existing run is resumed."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Seed of the prompt order and of every sample. The number of workers and restarts do not change them."""
    job: str = "rl"
    """Kind of job: the name of an entry point relax_rt.jobs."""


class RestartTable(Table):
    """Restarts of roles that died, and the limits after which the run ends."""

    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 5
    """Restarts of one slot allowed within `period_s`; one more escalates to a restart of the whole role."""
    period_s: Seconds = 120.0
    """Window in which restarts of a slot are counted; only the time that the slot is ready counts."""
    backoff_first_s: Seconds = 0.1
    """Longest wait before the first restart; doubled for each further one. The wait is drawn below it (full jitter)."""
    backoff_max_s: Seconds = 5.0
    """Upper limit of the wait before a restart."""
    role_restarts: Annotated[int, Field(ge=0, le=1000)] = 1
    """Restarts of a whole role allowed within `role_period_s` once one of its slots has used up its own; one more
    ends the run with a diagnosis."""
    role_period_s: Seconds = 3600.0
    """Length of the window in which restarts of a whole role are counted."""

    @property
    def longest_backoff_s(self) -> float:
        """Upper limit of all waits together until the restarts of a window are used up."""
        return sum(min(self.backoff_first_s * 2.0**n, self.backoff_max_s) for n in range(self.max_restarts))

    def problems(self, path: KeyPath) -> Iterator[Problem]:
        """Refuse limits that can never fire: intensity and back-off are judged together."""
        if self.backoff_first_s > self.backoff_max_s:
            message = f"backoff_first_s = {self.backoff_first_s:g} is above backoff_max_s = {self.backoff_max_s:g}"
            yield Problem((*path, "backoff_first_s"), message, "the first wait is the shortest one")
            return
        waits_s = self.longest_backoff_s
        if waits_s >= self.period_s:
            message = (
                f"a limit of {self.max_restarts} restarts in {self.period_s:g} s can never fire: "
                f"the waits before them alone may take {waits_s:g} s"
            )
            hint = "raise period_s, or lower max_restarts or backoff_max_s"
            yield Problem((*path, "max_restarts"), message, hint)
            return
        # Before a role is restarted as a whole, one of its slots has used up its own restarts; once more at the end.
        waits_s = waits_s * (self.role_restarts + 1) + self.backoff_max_s * self.role_restarts
        if self.role_restarts and waits_s >= self.role_period_s:
            message = (
                f"a limit of {self.role_restarts} restarts of a role in {self.role_period_s:g} s can never fire: "
                f"the waits of its slots alone may take {waits_s:g} s"
            )
            yield Problem((*path, "role_restarts"), message, "raise role_period_s, or lower role_restarts")


class NodesTable(Table):
    """Further nodes of the run."""

    listen: str = ""
    """HOST:PORT at which other nodes join this run (port 0: any free one); empty: the run has this node alone. HOST is
    an address of this machine that the others reach."""
    lease_s: Seconds = 10.0
    """A node without a renewal for this long is lost: its slots are failed, and it is fenced if it returns."""
    on_loss: Literal["replace", "wait"] = "replace"
    """What happens to the slots of a lost node: replace starts them on other nodes with room, wait keeps them for its
    return."""


class SupervisionTable(Table):
    """How the node agent supervises roles."""

    restart: RestartTable = RestartTable()
    start_timeout_s: Seconds = 180.0
    """Time in which a role must become ready. Otherwise it is killed, which counts as a failure. The time starts again
    for a role that waits for another one."""
    stop_timeout_s: Seconds = 20.0
    """Time in which a role must stop after a stop request, before it is killed."""
    drain_timeout_s: Seconds = 600.0
    """Upper limit of the time in which a role must stop, however often it makes progress: a trainer that finishes its
    step and writes a checkpoint gets `stop_timeout_s` again at each progress."""
    lease_s: Seconds = 10.0
    """Lease of a role in the registry: its entry expires without a renewal for this long."""
    zygote: bool = True
    """Fork roles from a zygote that has done the heavy imports; false starts a new interpreter for each."""
    chaos: bool = True
    """Let `relax-rt chaos` inject faults into the roles of this run; false refuses them."""
    nodes: NodesTable = NodesTable()

    def problems(self, path: KeyPath) -> Iterable[Problem]:
        """Check the inner table [supervision.restart]."""
        return self.restart.problems((*path, "restart"))


class QueueTable(Table):
    """The TransferQueue, which holds samples between rollout and trainer."""

    capacity_mib: Annotated[int, Field(ge=8, le=1 << 20)] = 256
    """Shared memory for payloads, MiB; producers wait when it is full."""
    slab_mib: Annotated[int, Field(ge=1, le=4096)] = 16
    """Size of one slab of shared memory; each producing process pre-faults at least one."""
    spill_mib: Annotated[int, Field(ge=0, le=1 << 24)] = 0
    """Payload that may be spilled to the run directory when shared memory is full, MiB; 0: none, producers wait."""
    high_water: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Fraction of capacity_mib above which payload is spilled and an early checkpoint is requested."""
    durability: Literal["memory", "disk"] = "memory"
    """memory: payloads are lost when the node agent dies. disk: they are files in the run directory and are kept."""
    max_sample_mib: Annotated[int, Field(ge=1, le=1 << 20)] = 1024
    """A sample with more payload is refused."""
    marks_mib: Annotated[int, Field(ge=0, le=65_536)] = 32
    """Partial completions kept in the queue's journal (8 bytes a token), so that another rollout can resume them; they
    count against capacity_mib. Tokens beyond it are sampled again when their rollout dies."""
    keep_steps: Annotated[int, Field(ge=1)] = 10_000
    """Steps to which a roll-back is possible; of older ones only counts are kept."""
    lease_s: Seconds = 60.0
    """A consumer or producer that does not renew its lease for this long loses it; the work is offered again."""
    quarantine_after: Annotated[int, Field(ge=1, le=100)] = 3
    """A sample is quarantined after this many deaths of its consumers."""
    fsync_every_s: Seconds = 1.0
    """Interval of fsync of the journal. It matters for a crash of the host only, not for the death of a process."""

    def problems(self, path: KeyPath) -> Iterator[Problem]:
        """Refuse a slab that the queue has no room for."""
        if self.slab_mib > self.capacity_mib:
            message = f"a slab of {self.slab_mib} MiB is larger than the queue's capacity of {self.capacity_mib} MiB"
            yield Problem((*path, "slab_mib"), message, "lower slab_mib or raise capacity_mib")


class EventsTable(Table):
    """The event log."""

    segment_mib: Annotated[int, Field(ge=1, le=1024)] = 16
    keep_segments: Annotated[int, Field(ge=2, le=10_000)] = 64
    """Number of full segments to keep; older ones are removed."""
    role_log_mib: Annotated[int, Field(ge=1, le=1024)] = 8
    """A role's log file is rotated at this size (two older ones are kept)."""


class RoleSettings(Table):
    """Settings that every role has; each kind adds its own."""

    count: Annotated[int, Field(ge=0, le=4096)] = 1
    """Number of slots."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """Compute threads of one process (OMP_NUM_THREADS and torch)."""
    nice: Annotated[int, Field(ge=0, le=19)] = 0
    """Niceness of the process, and of its session if the kernel groups processes by session (autogroup)."""
    hang_after_s: Seconds = 120.0
    """A role hangs if it is busy without progress, or idle without a sign of life, for this long. Its stacks are dumped
    to the log, then it is killed."""
    start_timeout_s: Seconds | None = None
    """Time in which the role must become ready; unset: that of [supervision]."""
    live_every_s: Seconds | None = None
    """Interval of the role's own `live()` check; unset: never."""
    min_ready: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Slots that must be ready before higher tiers start, and that must be left when one is given up; unset: all of
    them."""
    strategy: Literal["one_for_one", "one_for_all", "rest_for_one"] | None = None
    """Slots that are restarted when one fails: that one, all, or it and those with a higher index; unset: the default
    of the role's class."""
    spares: Annotated[int, Field(ge=0, le=64)] = 0
    """Spare processes that are kept ready and replace one that dies."""
    node: Filled | None = None
    """Node on which the slots must run; unset: any with room."""
    gpus: Annotated[float, Field(ge=0, le=1024)] = 0
    """GPUs of each slot; below 1: a share of one GPU."""
    cpus: list[Annotated[int, Field(ge=0)]] | None = None
    """CPU cores on which the processes may run; unset: all."""
    memory_mib: Annotated[int, Field(ge=1)] | None = None
    """Resident memory above which a process is killed, as measured by a watchdog; unset: no limit."""
    open_files: Annotated[int, Field(ge=64)] | None = None
    """Limit of open files of a process; unset: the agent's own."""
    python: Filled | None = None
    """Python interpreter of this role, if it needs another environment."""
    env: dict[str, str] = {}
    """Environment variables of this role."""
    target: str | None = None
    """Class of your own role, `file.py:Class` (relative to the config file) or `package.module:Class`."""

    def problems(self, path: KeyPath) -> Iterator[Problem]:
        """Refuse a `min_ready` above `count`, and variables that no role can be given."""
        if self.min_ready is not None and self.min_ready > self.count:
            message = f"min_ready = {self.min_ready} of {self.count} slots can never be ready"
            yield Problem((*path, "min_ready"), message, f"raise {dotted(path)}.count, or lower min_ready")
        for name in self.env:
            if not _ENV_NAME.fullmatch(name):
                message = f"'{name}' is not a name of an environment variable"
                yield Problem((*path, "env", name), message, at="key")
            elif name.startswith(RESERVED_ENV):
                message = f"variables that begin with {RESERVED_ENV} belong to the runtime"
                yield Problem((*path, "env", name), message, at="key")


class Chosen(Table):
    """A setting that was filled in for the user: its value, and why it is that."""

    value: str
    why: str


class RunConfig(BaseModel):
    """A whole roles.toml. The job's tables are further attributes."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    run: RunTable
    supervision: SupervisionTable = SupervisionTable()
    queue: QueueTable = QueueTable()
    events: EventsTable = EventsTable()
    roles: dict[str, Any] = {}
    """One table a role; each becomes that role's own RoleSettings type when loaded."""
    config_dir: str = ""
    """Folder of roles.toml, absolute: paths in it are relative to this. Filled in by the loader."""
    chosen: dict[str, Chosen] = {}
    """Settings that the job may choose itself (`auto`), by key: what each is in this run, and why. Filled in by the
    loader."""

    def table(self, kind: type[T]) -> T:
        """Return the table of this type: a job has each of its tables as a type of its own.

        Raises:
            RelaxError: the run's job has no such table.
        """
        for found in vars(self).values():
            if isinstance(found, kind):
                return found
        raise RelaxError(
            f"no table of type {kind.__name__} in the config of job '{self.run.job}'",
            why=f"{type(self).__name__} has no such field",
        )

    def role(self, kind: str, settings: type[S]) -> S:
        """Return a role's table; the defaults if there is none, or if a role of the user's own takes its place."""
        found = self.roles.get(kind)
        return found if isinstance(found, settings) else settings()
