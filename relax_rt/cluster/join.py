"""``relax-rt up --join``: takes a seat in a run, stays below it as long as it lasts, and takes another when it is lost.

Each seat has a keeper and an agent of its own, so that nothing of a lost one is left in the next.
"""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from relax_rt.cluster.launch import lock_run_dir
from relax_rt.cluster.nodes.api import DOOR, Facts, HeadApi, NameTaken, Seat
from relax_rt.cluster.nodes.keys import ENVIRONMENT, FILE, curve_keys, read_key, write_key
from relax_rt.cluster.nodes.machine import count_gpus, physical_mib
from relax_rt.cluster.nodes.seat import End, Taken, node_paths, read_end, write_seat
from relax_rt.config.checks import check_listen
from relax_rt.config.version import VERSION
from relax_rt.process import procfs
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths, clean_stale_runs, update_run
from relax_rt.transport.rpc.address import parse_address
from relax_rt.transport.rpc.backoff import Backoff, BackoffPolicy
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import Client, make_hello

ATTEMPT_S = 5.0
LEAVE_S = 1.0
AGAIN = BackoffPolicy(base_s=0.5, cap_s=10.0)


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """How a node wants to join.

    Attributes:
        head: address of the head's door.
        key: text of the run's key.
        name: what it wants to be called.
        run_dir: where this node's logs and events go; None: in the run's own directory, under ``nodes/<name>``.
        host: address at which other nodes reach it; empty: the one that it reaches the head from.
        wait_s: how long to try, each time that there is no seat.
    """

    head: str
    key: str
    name: str
    run_dir: Path | None = None
    host: str = ""
    wait_s: float = 120.0


def wish_of(
    head: str,
    *,
    key: Path | None = None,
    name: str = "",
    run_dir: Path | None = None,
    host: str = "",
    wait_s: float = 120.0,
) -> Wish:
    """What people give, checked.

    Args:
        head: HOST:PORT where the head listens.
        key: file of the run's key; None: its text is in the environment variable RELAX_JOIN_KEY.
        name, run_dir, host, wait_s: see Wish; the name is the host's own if it is empty.

    Raises:
        RelaxError: the address or the key is none.
    """
    where = check_listen(head)
    text = os.environ.pop(ENVIRONMENT, "") if key is None else read_key(key)
    if not text:
        hint = f"--key {FILE} of the run directory on the head, or its text in {ENVIRONMENT}"
        raise Refused(f"joining {head}", why="there is no key", hint=hint)
    curve_keys(text, str(key or ENVIRONMENT))
    return Wish(head=where, key=text, name=name or own_name(), run_dir=run_dir, host=host, wait_s=wait_s)


def join(wish: Wish, *, say: Callable[[str], None] = lambda line: None) -> int:
    """Take part in a run until it ends; answers with the exit code.

    Exit codes: that of the run when it has ended; 0 asked to leave (Ctrl-C or SIGTERM once: the node's roles are
    stopped in order and started elsewhere; twice: they are killed, 130); 2 this node cannot take part.

    Args:
        say: takes lines for people.

    Raises:
        RelaxError: no head was reached for wait_s, or it refuses this node.
    """
    return Joiner(wish, say).run()


class Joiner:
    """The process of `up --join`: one seat after the other."""

    def __init__(self, wish: Wish, say: Callable[[str], None]) -> None:
        self._wish, self._say = wish, say
        self._keys = curve_keys(wish.key)
        self._keeper: subprocess.Popen[bytes] | None = None
        self._orphan = 0
        self._asked = 0

    def run(self) -> int:
        """See `join`."""
        clean_stale_runs()
        # An agent whose keeper was killed becomes our child.
        procfs.become_subreaper()
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                taken = asyncio.run(self._take_seat())
                if taken is None:
                    return 128 + signal.SIGINT
                end = self._sit(taken)
                self._say(f"{taken.joined.seat}: {end.reason}")
                if end.over or self._asked:
                    return end.exit_code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _frame: object) -> None:
        self._asked += 1
        if self._orphan:
            os.kill(self._orphan, number)
        elif self._keeper is not None and number == signal.SIGTERM:
            # Ctrl-C goes to the whole group of the terminal by itself.
            self._keeper.send_signal(number)

    async def _take_seat(self) -> Taken | None:
        """Join, trying again until wait_s is over; None when told to give up.

        Raises:
            RelaxError: the head refuses this node, or was not reached.
        """
        deadline = time.monotonic() + self._wish.wait_s
        token, backoff = secrets.token_hex(8), Backoff(AGAIN, random.Random())
        self._say(f"joining {self._wish.head} as {self._wish.name}")
        trouble = ""
        while not self._asked:
            left_s = deadline - time.monotonic()
            try:
                facts = gather_facts(self._wish)
                async with self._head(0, min(ATTEMPT_S, max(0.2, left_s))) as head_api:
                    joined = await head_api.join(facts, token)
                return Taken(head=self._wish.head, host=facts.host, joined=joined)
            except (Unreachable, DeadlineExceeded, NameTaken) as error:
                if left_s <= 0:
                    why = f"tried for {self._wish.wait_s:g} s: {error}"
                    hint = "does the head run and listen there, and is it this run's key?"
                    raise Unreachable(f"joining {self._wish.head}", why=why, hint=hint) from error
                if str(error) != trouble:
                    self._say(f"not yet: {error}")
                trouble = str(error)
            delay_s = backoff.next_delay_s() or 0.0
            await asyncio.sleep(max(0.0, min(delay_s, deadline - time.monotonic())))
        return None

    @asynccontextmanager
    async def _head(self, epoch: int, timeout_s: float) -> AsyncIterator[HeadApi]:
        client = Client(self._wish.head, make_hello(DOOR, Incarnation(f"{self._wish.name}/0", epoch)), curve=self._keys)
        try:
            yield client.bind(HeadApi, timeout_s=timeout_s)
        finally:
            await client.close()

    def _sit(self, taken: Taken) -> End:
        """Run keeper and agent of one seat; answers with how it ended, once nothing of it is left here."""
        joined = taken.joined
        try:
            paths, held = self._prepare(taken)
        except (OSError, RelaxError) as error:
            asyncio.run(self._take_leave(joined.seat, f"it cannot take part: {error}"))
            raise
        try:
            self._say(f"joined run {joined.seat.run_id} as {joined.seat.node}; logs in {paths.logs}")
            code, left = self._keep(paths, held)
        finally:
            paths.remove_private()
            os.close(held)
        end = read_end(paths.run_dir, str(joined.seat))
        if left:
            # Not a word of leaving: the head waits for the lease, and what is left is fenced by its epochs.
            self._say(f"these processes of the run could not be killed: {', '.join(map(str, left))}")
            return end or End(seat=str(joined.seat), over=True, exit_code=1, reason="what is left cannot be killed")
        if end is not None and end.over:
            if end.exit_code == 2:
                asyncio.run(self._take_leave(joined.seat, end.reason))
            return end
        reason = end.reason if end is not None else f"its agent died (exit code {code}); its roles were ended"
        # The keeper has seen all of it dead: the head need not wait for the lease.
        asyncio.run(self._take_leave(joined.seat, reason))
        return End(seat=str(joined.seat), over=False, exit_code=code, reason=reason)

    def _prepare(self, taken: Taken) -> tuple[RunPaths, int]:
        joined = taken.joined
        run_dir = self._wish.run_dir or Path(
            msgspec.json.decode(joined.config)["run"]["dir"], "nodes", joined.seat.node
        )
        run_dir = run_dir.absolute()
        held = lock_run_dir(run_dir)
        paths = node_paths(joined, run_dir)
        try:
            paths.make_private()
            write_seat(paths, taken)
            write_key(paths.socket_dir / FILE, self._wish.key)
            (run_dir / RESOLVED_CONFIG).write_text(joined.config)
            update_run(
                run_dir,
                run_id=paths.run_id,
                name=joined.seat.node,
                status="joined",
                node=joined.seat.node,
                head=taken.head,
                started_at=time.time(),
                **dict.fromkeys(("exit_code", "reason", "agent", "ended_at")),
            )
        except BaseException:
            paths.remove_private()
            os.close(held)
            raise
        return paths, held

    def _keep(self, paths: RunPaths, held: int) -> tuple[int, list[int]]:
        """Start keeper and agent, and wait until nothing of them lives; answers with the exit code and with what would
        not die."""
        keeper = [sys.executable, "-m", "relax_rt.supervision.keeper"]
        names = ["--run-id", paths.run_id, "--run-dir", str(paths.run_dir)]
        command = [*keeper, *names, "--", sys.executable, "-m", "relax_rt.cluster.nodes", *names]
        env = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
        os.set_inheritable(held, True)
        others = procfs.descendants(os.getpid())
        self._keeper = subprocess.Popen(command, env=env, pass_fds=[held], preexec_fn=_end_with_parent)
        try:
            if self._asked:
                self._keeper.send_signal(signal.SIGTERM)
            code = self._keeper.wait()
            for pid in procfs.children(os.getpid()):
                if pid not in others and _is_agent(pid):
                    # The keeper was killed, which is not the end: the agent has a stand-in by now, and goes on.
                    code = self._outlast(pid)
        finally:
            self._keeper = None
        left = procfs.kill_until_none(
            lambda: (procfs.descendants(os.getpid()) - others) | procfs.members_of_run(paths.run_id), reap=True
        )
        return code, left

    def _outlast(self, agent: int) -> int:
        """Wait for an agent that is our own child."""
        self._orphan = agent
        try:
            # Reaped only once signals are no longer handed on: its pid is its own until then.
            os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT)
        finally:
            self._orphan = 0
        code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        return code if code >= 0 else 128 - code

    async def _take_leave(self, seat: Seat, reason: str) -> None:
        """Tell the head that nothing is left of this seat, if it can be told."""
        try:
            async with self._head(seat.epoch, LEAVE_S) as head_api:
                await head_api.leave(seat, reason)
        except RelaxError as error:
            self._say(f"the head could not be told: {error}")


def _end_with_parent() -> None:
    """When the process of `up --join` is killed, the keeper ends this node's part in order."""
    procfs.prctl(procfs.PR_SET_PDEATHSIG, signal.SIGTERM)


def _is_agent(pid: int) -> bool:
    """Whether a process is a node's agent, or about to become one."""
    try:
        return b"relax_rt.cluster.nodes" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def own_name() -> str:
    """The host's name, as a node may be called."""
    host = socket.gethostname().partition(".")[0]
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in host)[:40] or "node"


def gather_facts(wish: Wish) -> Facts:
    """What this machine is.

    Raises:
        Unreachable: there is no way to the head's network.
    """
    return Facts(
        name=wish.name,
        host=wish.host or own_address(wish.head),
        machine=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=physical_mib(),
        gpus=count_gpus(),
        python=sys.version.split()[0],
        version=VERSION,
        pid=os.getpid(),
    )


def own_address(head: str) -> str:
    """The address of this machine that packets to the head come from.

    Raises:
        Unreachable: there is no way there.
    """
    target = parse_address(head)
    try:
        family, _, _, _, place = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unreachable(head, why=str(error), hint="is the network between the nodes up?") from error
