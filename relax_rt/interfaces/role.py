"""What a role is: a class that the host process runs in a slot, the context it is given, and how it is found."""

from __future__ import annotations

import asyncio
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from structlog.typing import FilteringBoundLogger

from relax_rt.config.loader import ROLE_GROUP
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.config.target import TargetError, load_target
from relax_rt.interfaces.registry import RegistryApi
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.rpc.identity import Incarnation

if TYPE_CHECKING:
    from relax_rt.transport.memory.payload_fetcher import Fetcher

T = TypeVar("T")


class Progress(Protocol):
    """How a role reports progress. The watchdog reads the counter, never at a ticking thread.

    While `waiting` has a reason the role is idle and the watchdog leaves it alone; the reason is shown by `ps`
    and `why`. Otherwise the counter must move within the role's `hang_after_s`.
    """

    def advance(self, n: int = 1, detail: str = "") -> None:
        """Count n units of work done (tokens, samples, steps); detail says the current activity. Thread-safe."""

    def waiting(self, reason: str) -> None:
        """The role is idle because of `reason`; the empty string ends the wait. Thread-safe."""

    def extend(self, seconds: float, reason: str) -> None:
        """Known slow work (loading, compiling): the deadline moves out by `seconds`, once. Thread-safe."""


class RoleContext(Protocol):
    """What the host gives a role. Everything is ready before `Role.run` is called."""

    config: RunConfig
    settings: RoleSettings
    """The role's own table of roles.toml, as the type that the role names in `Settings`."""
    who: Incarnation
    run_id: str
    run_dir: Path
    shm_dir: Path
    """Private directory in shared memory for this run; removed when the run ends, also after kills."""
    payload_dir: Path
    """Folder of the TransferQueue's payloads: shm_dir, or a folder of the run with [queue] durability = "disk"."""
    spill_dir: Path | None
    """Where the queue moves payloads when shared memory fills; None on nodes other than the queue's."""
    seed: int
    """Derived from (run seed, slot, epoch)."""
    log: FilteringBoundLogger
    progress: Progress
    registry: RegistryApi
    stopping: asyncio.Event
    """Set when the role is asked to finish: end the work in hand and return from `run`."""

    @property
    def fetcher(self) -> Fetcher | None:
        """Fetches payloads from other nodes, for QueueClient; None in a run of one node."""

    async def queue(self) -> QueueApi:
        """The TransferQueue's broker, as its typed interface; reconnects by itself."""

    async def peer(self, slot: str, api: type[T], *, timeout_s: float) -> T:
        """Another role's typed interface; follows the slot through restarts."""

    def actor(self, name: str, api: type[T], *, timeout_s: float = 60.0) -> T:
        """A reference to the actor in a slot (``reward/0``), or to the ready ones of a role (``reward``).

        timeout_s is the deadline of each call, seconds. See docs/guides/actors.md.
        """

    def serve(self, api: type[T], implementation: T, *, max_calls: int | None = None) -> None:
        """Offer an interface at this role's address. Call it in `setup`.

        max_calls bounds the calls at work here, for all that this role offers; who sends more is not read.
        """

    async def ready(self, policy_version: int = 0) -> None:
        """Say that the role does its work from now on; call it again when the policy version changes."""

    def event(self, kind: str, /, **fields: Any) -> None:
        """Append to the run's event log."""

    def metrics(self, record: dict[str, Any]) -> None:
        """Append one line to the run's metrics.jsonl; `kind` in the record names what it measures."""


class Role:
    """Base of every role.

    The host creates it, awaits `setup`, then `run`, then `teardown` (also after an error). `run` returns when
    the role has finished (exit 0) or `ctx.stopping` is set; an exception ends the process with a diagnosis.
    `relax_rt.config.problems.BadInput` (what was asked for cannot be) and `rpc.errors.GivenUp` (a limit
    is reached) say that no restart would change anything: they end the run.
    """

    kind: ClassVar[str]
    Settings: ClassVar[type[RoleSettings]] = RoleSettings
    tier: ClassVar[int] = 50
    """Start order: lower tiers are ready before higher ones start; stop runs in reverse."""
    restart: ClassVar[str] = "permanent"
    """permanent: always restarted; transient: only after a failure; temporary: never."""
    significant: ClassVar[bool] = False
    """The run ends in order when every significant role has finished (exit 0)."""
    drains: ClassVar[bool] = False
    """It has work to bring to safety when it is asked to stop: as long as it makes progress it gets `stop_timeout_s`
    again, up to `[supervision] drain_timeout_s` in all."""
    strategy: ClassVar[str] = "one_for_one"
    """Which slots start again when one fails: one_for_one, one_for_all, rest_for_one (it and higher indices)."""
    gang: ClassVar[bool] = False
    """The slots are ranks of one whole: they start, fail and come back together, with a rendezvous of their own."""

    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to import and that `setup` will need. They are imported beforehand, in the process that
    roles are forked from: they must start no thread and touch no GPU when they are imported."""

    def __init__(self, ctx: RoleContext) -> None:
        self.ctx = ctx

    @classmethod
    def is_gang(cls, settings: RoleSettings) -> bool:
        """Whether the slots are ranks of a gang; where that depends on the role's table, override it."""
        return cls.gang

    @classmethod
    def prepare(cls, config: RunConfig, settings: RoleSettings) -> None:
        """Do what takes long and needs no slot, in a process that waits as a spare (`spares` in the role's table), and
        keep it in the class for `setup`. No GPU: which one it will be is not known yet."""

    async def setup(self) -> None:
        """Load and connect; offer interfaces with ctx.serve. The address is announced after it."""

    async def run(self) -> None:
        """Do the work."""
        raise NotImplementedError(f"{type(self).__name__}.run")

    async def live(self) -> None:
        """Check that the role still works; raise if it does not. Called every `live_every_s` (a setting; unset: never)
        during `run`, with as long to answer: after that the process ends and is started again."""

    async def teardown(self) -> None:
        """Release what setup took."""


def role_target(kind: str, target: str | None = None) -> str:
    """Return where a kind of role is implemented: the target given, else that of the installed package that offers it.

    Raises:
        TargetError: no package offers it and no target is given.
    """
    if target:
        return target
    known = {entry.name: entry.value for entry in entry_points(group=ROLE_GROUP)}
    if kind not in known:
        raise TargetError(
            f"no role is called {kind!r}",
            why=f"installed packages offer: {', '.join(sorted(known)) or 'nothing'}",
            hint='install the package that offers it, or give roles.<name>.target = "file.py:Class"',
        )
    return known[kind]


def load_role(target: str) -> type[Role]:
    """Import a role class: ``package.module:Class`` or ``/path/file.py:Class``.

    Raises:
        TargetError: it cannot be imported, or names something that is no role.
    """
    found = load_target(target)
    if not (isinstance(found, type) and issubclass(found, Role)):
        raise TargetError(f"{target} is not a subclass of relax_rt.interfaces.role.Role")
    return found
