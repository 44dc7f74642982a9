"""What a role is given, against a registry that comes, goes, forgets and fences."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar, Protocol

import pytest
from waiting import eventually

from relax_rt.config.problems import BadInput
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.hosting.context import HostContext, HostEnvironment, ProgressReporter, derive_seed
from relax_rt.hosting.host import LiveProbeFailed, probe, run_role
from relax_rt.interfaces.registry import Changes, Member, RegistryApi, Renewed
from relax_rt.interfaces.role import Role
from relax_rt.observe.events import read_events
from relax_rt.observe.metrics import read_metrics
from relax_rt.process.child import packet_pair
from relax_rt.supervision.channel import ProgressMsg, ReadyMsg, decode_from_role
from relax_rt.supervision.rundir import RunPaths
from relax_rt.supervision.system_roles import SystemRoles
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Refused, RelaxError, StaleEpoch
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcServer, caller, make_hello

RUN = "0badcafe"


class Registry:
    """RegistryApi, in memory, with moods."""

    def __init__(self) -> None:
        self.epoch = 0
        self.tokens: list[str] = []
        self.announced: list[Incarnation] = []
        self.renewals: list[tuple[str, int, str, int]] = []
        self.left: list[str] = []
        self.gone_ones: list[tuple[Incarnation, str]] = []
        self.error: RelaxError | None = None

    async def issue_epoch(self, slot: str, token: str = "") -> int:
        self.tokens.append(token)
        self.epoch += 1
        return self.epoch

    async def announce(self, pid: int, address: str, ttl_s: float, node: str = "", remote: str = "") -> Renewed:
        self.announced.append(caller().who)
        return Renewed(ttl_s, 0)

    async def renew(self, state: str, progress: int, detail: str, policy_version: int) -> Renewed:
        if self.error is not None:
            raise self.error
        self.renewals.append((state, progress, detail, policy_version))
        return Renewed(1.0, 3)

    async def leave(self, reason: str) -> None:
        self.left.append(reason)

    async def process_exited(self, who: Incarnation, reason: str) -> None:
        self.gone_ones.append((who, reason))

    async def watch(self, since: int, wait_s: float) -> Changes:
        return Changes(0, True, [Member(who=w) for w in self.announced])

    async def issue_version(self) -> int:
        return 1

    async def commit_version(self, record: VersionRecord) -> VersionRecord:
        return record

    async def versions(self) -> list[VersionRecord]:
        return []


class Place:
    """A run's directories, and a registry in them that can be taken down."""

    def __init__(self, root: Path) -> None:
        self.run_dir = root / "run"
        self.sockets = root
        self.run_dir.mkdir()
        self.registry = Registry()
        self.server: RpcServer | None = None
        self.ours, self.theirs = packet_pair()
        self.contexts: list[HostContext] = []

    async def registry_up(self) -> None:
        (self.sockets / "registry-0.sock").unlink(missing_ok=True)
        self.server = RpcServer(make_hello(RUN, Incarnation("registry/0", 0)))
        self.server.offer(RegistryApi, self.registry)
        await self.server.listen(f"unix://{self.sockets / 'registry-0.sock'}")

    async def registry_down(self) -> None:
        if self.server is not None:
            await self.server.close(grace_s=0.1)
            self.server = None

    def context(self, slot: str = "rollout/0", *, has_registry: bool = True) -> HostContext:
        host = HostEnvironment(
            who=Incarnation(slot, 4),
            run_id=RUN,
            run_dir=self.run_dir,
            socket_dir=self.sockets,
            shm_dir=self.sockets,
            control_fd=-1,
            agent_pid=0,
            target="",
            has_registry=has_registry,
        )
        config = RunConfig.model_validate({"run": {"name": "t"}, "supervision": {"lease_s": 0.3}})
        ctx = HostContext(host, config, RoleSettings(), self.theirs)
        self.contexts.append(ctx)
        return ctx

    def heard(self) -> list[Any]:
        self.ours.setblocking(False)
        found = []
        while True:
            try:
                found.append(decode_from_role(self.ours.recv(65536)))
            except BlockingIOError:
                return found


@pytest.fixture
async def place(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Place]:
    found = Place(tmp_path_factory.mktemp("p"))
    await found.registry_up()
    yield found
    for ctx in found.contexts:
        await ctx.close()
    await found.registry_down()
    found.ours.close()
    found.theirs.close()


async def stop(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_membership_is_announced_and_renewed_and_left(place: Place) -> None:
    ctx = place.context()
    assert ctx.registry_lease is not None
    task = asyncio.create_task(ctx.registry_lease.keep())
    ctx.progress.advance(5, "decoding")
    await ctx.ready(policy_version=2)
    assert place.registry.renewals[-1] == ("ready", 5, "decoding", 2)
    assert ctx.registry_lease.committed == 3
    await eventually(lambda: len(place.registry.renewals) > 3)
    assert place.registry.announced == [Incarnation("rollout/0", 4)]
    await stop(task)
    await ctx.close()
    assert place.registry.left == ["finished"]


class Engine(Role):
    """Ends as a test says."""

    kind = "rollout"
    end: ClassVar[Exception | None] = None

    async def run(self) -> None:
        await self.ctx.ready()
        if self.end is not None:
            raise self.end


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (None, "finished"),
        (RelaxError("the SGLang server ended", why="struck"), "exception: the SGLang server ended: struck"),
        (KeyError("x"), "exception: KeyError: 'x'"),
        (BadInput("the folder cannot be written"), "config: the folder cannot be written"),
    ],
)
async def test_others_hear_how_a_role_ended(
    place: Place, monkeypatch: pytest.MonkeyPatch, end: Exception | None, told: str
) -> None:
    """The registry believes the role's own word first, and the trainer tells of a lost engine by it."""
    monkeypatch.setattr(Engine, "end", end)
    finished: list[str] = []
    with pytest.raises(type(end)) if end is not None else nullcontext():
        await run_role(Engine, place.context(), lambda: finished.append("so it says"))
    assert place.registry.left == [told]
    assert bool(finished) == (end is None)


async def test_registry_that_is_away_does_not_hurt(place: Place) -> None:
    await place.registry_down()
    ctx = place.context()
    assert ctx.registry_lease is not None
    task = asyncio.create_task(ctx.registry_lease.keep())
    await ctx.ready()
    assert ReadyMsg() in place.heard(), "the agent hears of it all the same"
    await place.registry_up()
    await eventually(lambda: place.registry.renewals)
    await place.registry_down()
    count = len(place.registry.renewals)
    await place.registry_up()
    await eventually(lambda: len(place.registry.renewals) > count)
    assert not task.done()
    await stop(task)


async def test_registry_that_forgot_is_told_again(place: Place) -> None:
    ctx = place.context()
    assert ctx.registry_lease is not None
    task = asyncio.create_task(ctx.registry_lease.keep())
    await eventually(lambda: place.registry.renewals)
    place.registry.error = Refused("no such member")
    await eventually(lambda: len(place.registry.announced) > 1)
    place.registry.error = None
    count = len(place.registry.renewals)
    await eventually(lambda: len(place.registry.renewals) > count)
    await stop(task)


async def test_fenced_incarnation_ends(place: Place) -> None:
    ctx = place.context()
    assert ctx.registry_lease is not None
    place.registry.error = StaleEpoch("rollout/0#4", why="rollout/0#5 holds the slot")
    with pytest.raises(StaleEpoch, match="rollout/0#5"):
        await asyncio.wait_for(ctx.registry_lease.keep(), 120)


async def test_role_without_registry_is_told_why(place: Place) -> None:
    with pytest.raises(RelaxError, match="has no registry"):
        await place.context(has_registry=False).registry.versions()
    own = place.context("registry/0")
    with pytest.raises(RelaxError, match="this is the registry"):
        await own.registry.versions()
    own.serve(RegistryApi, place.registry)
    assert await own.registry.issue_version() == 1, "once it is offered, the registry's own object stands there"


class Greeter(Protocol):
    async def greet(self, name: str) -> str: ...


class Friendly:
    async def greet(self, name: str) -> str:
        return f"hello {name}"


async def test_peers_follow_a_slot_to_its_next_incarnation(place: Place) -> None:
    asker = place.context("rollout/0")
    peer = await asker.peer("reward/0", Greeter, timeout_s=60)
    for _ in range(2):
        server = place.context("reward/0")
        server.serve(Greeter, Friendly())
        await server.listen()
        assert await peer.greet("you") == "hello you"
        await server.close()
    with pytest.raises(RelaxError, match="too late"):
        server.serve(Greeter, Friendly())


async def test_events_metrics_and_seed_name_the_incarnation(place: Place) -> None:
    ctx = place.context()
    ctx.event("swap", version=1)
    ctx.metrics({"kind": "step", "n": 1})
    assert [(e["by"], e["version"]) for e in read_events(place.run_dir)] == [("rollout/0#4", 1)]
    assert [r["by"] for r in read_metrics(place.run_dir)] == ["rollout/0#4"]
    assert ctx.seed == derive_seed(0, Incarnation("rollout/0", 4))
    seeds = {derive_seed(s, Incarnation(f"r/{n}", e)) for s in range(3) for n in range(3) for e in range(3)}
    assert len(seeds) == 27


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = packet_pair()
    ours.settimeout(60)
    yield ours, theirs
    ours.close()
    theirs.close()


def test_progress_is_gathered_and_nothing_is_lost(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    progress = ProgressReporter(theirs)
    for _ in range(1000):
        progress.advance(2, "x")
        progress.extend(0.5, "loading")
    progress.waiting("for samples")
    n = extended = packets = 0
    waiting = ""
    while n < 2000 or not waiting:
        message = decode_from_role(ours.recv(65536))
        assert isinstance(message, ProgressMsg)
        n, waiting, extended, packets = message.n, message.waiting, extended + message.extend_s, packets + 1
    assert (n, waiting, extended) == (2000, "for samples", 500.0) and packets < 10
    assert progress.state == (2000, "waiting: for samples")


def test_progress_survives_an_agent_that_does_not_read(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    theirs.setblocking(False)
    filler = 0
    try:
        while True:
            theirs.send(b"x" * 200)
            filler += 1
    except BlockingIOError:
        theirs.setblocking(True)
    progress = ProgressReporter(theirs)
    progress.extend(5.0, "loading")
    progress.advance(1)
    for _ in range(filler):
        ours.recv(65536)
    extended = 0.0
    while extended < 5.0:
        message = decode_from_role(ours.recv(65536))
        assert isinstance(message, ProgressMsg)
        extended += message.extend_s


def beats(ours: socket.socket, within_s: float) -> int:
    """Packets that say why the role waits."""
    ours.settimeout(within_s)
    found = 0
    end = time.monotonic() + within_s
    try:
        while time.monotonic() < end:
            message = decode_from_role(ours.recv(65536))
            assert isinstance(message, ProgressMsg) and message.waiting == "for samples"
            found += 1
    except TimeoutError:
        pass
    return found


async def test_waiting_role_beats_while_its_loop_answers(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    progress = ProgressReporter(theirs, heartbeat_s=0.02)
    progress.watch_loop(asyncio.get_running_loop())
    progress.waiting("for samples")
    while await asyncio.to_thread(beats, ours, 0.5) < 2:
        pass
    # The loop does not answer while this blocks it: what was asked before may still be told, then nothing.
    beats(ours, 1.0)
    assert beats(ours, 0.3) == 0
    while not await asyncio.to_thread(beats, ours, 0.5):
        pass
    progress.waiting("")


def test_busy_role_does_not_beat(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    progress = ProgressReporter(theirs, heartbeat_s=0.02)
    progress.advance(1, "computing")
    ours.recv(65536)
    ours.settimeout(0.3)
    with pytest.raises(TimeoutError):
        ours.recv(65536)


class Patient(Role):
    """Its probe does what it is told to."""

    def __init__(self, *does: float | Exception) -> None:
        self.does = list(does)

    async def live(self) -> None:
        does = self.does.pop(0)
        if isinstance(does, Exception):
            raise does
        await asyncio.sleep(does)


async def test_live_probe_ends_the_role_that_fails_it() -> None:
    with pytest.raises(LiveProbeFailed, match="live probe failed: ValueError: the socket is gone"):
        await probe(Patient(0, 0, ValueError("the socket is gone")), 0.2)
    with pytest.raises(LiveProbeFailed, match="no answer within live_every_s"):
        await probe(Patient(0, 60), 0.05)


class HalfSetUp(Role):
    """Fails before it has what its teardown wants."""

    settings_class = RoleSettings

    async def setup(self) -> None:
        raise ValueError("the model has no such layer")

    async def teardown(self) -> None:
        self.engine.close()  # type: ignore[attr-defined]


async def test_a_teardown_that_fails_too_does_not_hide_why_the_role_ended(place: Place) -> None:
    with pytest.raises(ValueError, match="no such layer") as caught:
        await run_role(HalfSetUp, place.context(), lambda: None)
    assert caught.value.__notes__ == [
        "its teardown failed as well: AttributeError: 'HalfSetUp' object has no attribute 'engine'"
    ]


async def test_exits_and_epochs_wait_for_the_system_roles(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunPaths, "socket_dir", property(lambda self: place.sockets))
    await place.registry_down()
    system = SystemRoles(RunPaths(RUN, place.run_dir), has_registry=True, has_queue=False)
    system.start()
    assert await system.issue_epoch("registry/0") == 0, "the registry issues its own"
    asking = asyncio.create_task(system.issue_epoch("rollout/0"))
    system.report_exit(Incarnation("rollout/0", 1), "killed")
    system.report_exit(Incarnation("rollout/1", 2), "killed")
    system.report_exit(Incarnation("registry/0", 0), "killed")
    await asyncio.sleep(0.05)
    assert not asking.done()
    await place.registry_up()
    assert await asyncio.wait_for(asking, 120) == 1
    assert await system.issue_epoch("rollout/0") == 2
    assert all(place.registry.tokens) and len(set(place.registry.tokens)) == 2, "each asking has a token of its own"
    await eventually(lambda: len(place.registry.gone_ones) == 2)
    assert [who.slot for who, _ in place.registry.gone_ones] == ["rollout/0", "rollout/1"]
    await system.close()


async def test_epochs_are_counted_by_the_agent_without_a_registry(place: Place) -> None:
    system = SystemRoles(RunPaths(RUN, place.run_dir), has_registry=False, has_queue=False)
    assert [await system.issue_epoch("a/0"), await system.issue_epoch("b/0")] == [1, 2]
