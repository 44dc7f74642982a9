"""``relax-rt up --join``: joins a run, runs this node's agent while the membership lasts, joins again when it is lost.

Each membership has a keeper and an agent of its own, so that nothing of a lost one is left in the next.
"""

from __future__ import annotations

import asyncio
import functools
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
import psutil  # type: ignore[import-untyped]

from relax_rt.cluster.launch import lock_run_dir
from relax_rt.cluster.nodes.api import HELLO_NAME, HeadApi, NameTaken, NodeFacts, NodeMembership
from relax_rt.cluster.nodes.join_key import ENVIRONMENT, FILE, curve_keys, read_key, write_key
from relax_rt.cluster.nodes.membership import JoinRecord, MembershipEnd, node_paths, read_end, write_record
from relax_rt.config.checks import check_listen
from relax_rt.config.version import VERSION
from relax_rt.process import procfs
from relax_rt.supervision.devices import count_gpus
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths, clean_stale_runs, members_of_run, update_run
from relax_rt.transport.rpc.backoff import Backoff, BackoffPolicy
from relax_rt.transport.rpc.channel import parse_address
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.rpc import RpcClient, make_hello

JOIN_TIMEOUT_S = 5.0
LEAVE_TIMEOUT_S = 1.0
MIB = 1 << 20
RETRY = BackoffPolicy(base_s=0.5, cap_s=10.0)


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to join a run.

    Attributes:
        head: address of the head's listener.
        key: text of the run's key.
        name: of the node.
        run_dir: where this node's logs and events go; None: in the run's own directory, under ``nodes/<name>``.
        host: address at which other nodes reach it; empty: the one that it reaches the head from.
        wait_s: how long to try, each time it has no membership.
    """

    head: str
    key: str
    name: str
    run_dir: Path | None = None
    host: str = ""
    wait_s: float = 120.0


def join_request(
    head: str,
    *,
    key: Path | None = None,
    name: str = "",
    run_dir: Path | None = None,
    host: str = "",
    wait_s: float = 120.0,
) -> JoinRequest:
    """Check what the command line gives.

    Args:
        head: HOST:PORT where the head listens.
        key: file of the run's key; None: its text is in the environment variable RELAX_JOIN_KEY.
        name, run_dir, host, wait_s: see JoinRequest; the name is the host's own if it is empty.

    Raises:
        RelaxError: the address or the key is not valid.
    """
    where = check_listen(head)
    text = os.environ.pop(ENVIRONMENT, "") if key is None else read_key(key)
    if not text:
        hint = f"--key {FILE} of the run directory on the head, or its text in {ENVIRONMENT}"
        raise Refused(f"joining {head}", why="there is no key", hint=hint)
    curve_keys(text, str(key or ENVIRONMENT))
    return JoinRequest(head=where, key=text, name=name or default_name(), run_dir=run_dir, host=host, wait_s=wait_s)


def join(request: JoinRequest, *, say: Callable[[str], None] = lambda line: None) -> int:
    """Take part in a run until it ends; returns the exit code.

    Exit codes: that of the run when it has ended; 0 asked to leave (Ctrl-C or SIGTERM once: the node's roles are
    stopped in order and started elsewhere; twice: they are killed, 130); 2 this node cannot take part.

    Args:
        say: prints a line.

    Raises:
        RelaxError: no head was reached for wait_s, or it refuses this node.
    """
    return Joiner(request, say).run()


class Joiner:
    """The process of `up --join`: one membership after the other."""

    def __init__(self, request: JoinRequest, say: Callable[[str], None]) -> None:
        self._request, self._say = request, say
        self._keys = curve_keys(request.key)
        self._keeper: subprocess.Popen[bytes] | None = None
        self._adopted_agent = 0
        self._signals = 0

    def run(self) -> int:
        """Join, run the agent to its end, and join again while that makes sense; returns the exit code."""
        clean_stale_runs()
        # An agent whose keeper was killed becomes our child.
        procfs.become_subreaper()
        before = {number: signal.signal(number, self._signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while True:
                record = asyncio.run(self._join())
                if record is None:
                    return 128 + signal.SIGINT
                end = self._run_member(record)
                self._say(f"{record.reply.membership}: {end.reason}")
                if end.over or self._signals:
                    return end.exit_code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _signalled(self, number: int, _frame: object) -> None:
        self._signals += 1
        if self._adopted_agent:
            os.kill(self._adopted_agent, number)
        elif self._keeper is not None and number == signal.SIGTERM:
            # Ctrl-C goes to the whole group of the terminal by itself.
            self._keeper.send_signal(number)

    async def _join(self) -> JoinRecord | None:
        """Join, trying again until wait_s is over; None after Ctrl-C. Raises RelaxError: the head refuses this node, or
        was not reached."""
        deadline = time.monotonic() + self._request.wait_s
        token, backoff = secrets.token_hex(8), Backoff(RETRY, random.Random())
        self._say(f"joining {self._request.head} as {self._request.name}")
        last_error = ""
        while not self._signals:
            left_s = deadline - time.monotonic()
            try:
                facts = node_facts(self._request)
                async with self._head(0, min(JOIN_TIMEOUT_S, max(0.2, left_s))) as head_api:
                    reply = await head_api.join(facts, token)
                return JoinRecord(head=self._request.head, host=facts.host, reply=reply)
            except (Unreachable, DeadlineExceeded, NameTaken) as error:
                if left_s <= 0:
                    why = f"tried for {self._request.wait_s:g} s: {error}"
                    hint = "does the head run and listen there, and is it this run's key?"
                    raise Unreachable(f"joining {self._request.head}", why=why, hint=hint) from error
                if str(error) != last_error:
                    self._say(f"not yet: {error}")
                last_error = str(error)
            delay_s = backoff.next_delay_s() or 0.0
            await asyncio.sleep(max(0.0, min(delay_s, deadline - time.monotonic())))
        return None

    @asynccontextmanager
    async def _head(self, epoch: int, timeout_s: float) -> AsyncIterator[HeadApi]:
        client = RpcClient(
            self._request.head, make_hello(HELLO_NAME, Incarnation(f"{self._request.name}/0", epoch)), curve=self._keys
        )
        try:
            yield client.bind(HeadApi, timeout_s=timeout_s)
        finally:
            await client.close()

    def _run_member(self, record: JoinRecord) -> MembershipEnd:
        """Run keeper and agent of one membership; returns how it ended, once nothing of it is left here."""
        reply = record.reply
        try:
            paths, held = self._prepare(record)
        except (OSError, RelaxError) as error:
            asyncio.run(self._leave(reply.membership, f"it cannot take part: {error}"))
            raise
        try:
            self._say(f"joined run {reply.membership.run_id} as {reply.membership.node}; logs in {paths.logs}")
            code, left = self._run_agent(paths, held)
        finally:
            paths.remove_private()
            os.close(held)
        end = read_end(paths.run_dir, str(reply.membership))
        if left:
            # Do not leave: the head waits for the lease to end, and the processes left are fenced by their epochs.
            self._say(f"these processes of the run could not be killed: {', '.join(map(str, left))}")
            return end or MembershipEnd(
                membership=str(reply.membership),
                over=True,
                exit_code=1,
                reason="processes of the run could not be killed",
            )
        if end is not None and end.over:
            if end.exit_code == 2:
                asyncio.run(self._leave(reply.membership, end.reason))
            return end
        reason = end.reason if end is not None else f"its agent died (exit code {code}); its roles were ended"
        # The keeper has seen every process dead: the head need not wait for the lease.
        asyncio.run(self._leave(reply.membership, reason))
        return MembershipEnd(membership=str(reply.membership), over=False, exit_code=code, reason=reason)

    def _prepare(self, record: JoinRecord) -> tuple[RunPaths, int]:
        reply = record.reply
        run_dir = self._request.run_dir or Path(
            msgspec.json.decode(reply.config)["run"]["dir"], "nodes", reply.membership.node
        )
        run_dir = run_dir.absolute()
        held = lock_run_dir(run_dir)
        paths = node_paths(reply, run_dir)
        try:
            paths.make_private()
            write_record(paths, record)
            write_key(paths.socket_dir / FILE, self._request.key)
            (run_dir / RESOLVED_CONFIG).write_text(reply.config)
            update_run(
                run_dir,
                run_id=paths.run_id,
                name=reply.membership.node,
                status="joined",
                node=reply.membership.node,
                head=record.head,
                started_at=time.time(),
                **dict.fromkeys(("exit_code", "reason", "agent", "ended_at")),
            )
        except BaseException:
            paths.remove_private()
            os.close(held)
            raise
        return paths, held

    def _run_agent(self, paths: RunPaths, held: int) -> tuple[int, list[int]]:
        """Start keeper and agent and wait until they are dead; returns the exit code and the pids that could not be
        killed."""
        keeper = [sys.executable, "-m", "relax_rt.supervision.keeper"]
        names = ["--run-id", paths.run_id, "--run-dir", str(paths.run_dir)]
        command = [*keeper, *names, "--", sys.executable, "-m", "relax_rt.cluster.nodes.agent", *names]
        env = {name: value for name, value in os.environ.items() if name != ENVIRONMENT}
        os.set_inheritable(held, True)
        others = procfs.descendants(os.getpid())
        # When the process of `up --join` is killed, the keeper ends this node's agent in order.
        end_with_parent = functools.partial(procfs.prctl, procfs.PR_SET_PDEATHSIG, signal.SIGTERM)
        self._keeper = subprocess.Popen(command, env=env, pass_fds=[held], preexec_fn=end_with_parent)
        try:
            if self._signals:
                self._keeper.send_signal(signal.SIGTERM)
            code = self._keeper.wait()
            for pid in procfs.children(os.getpid()):
                if pid not in others and _is_agent(pid):
                    # Only the keeper was killed: the agent has started another one and continues.
                    code = self._wait_for_agent(pid)
        finally:
            self._keeper = None
        left = procfs.kill_until_none(
            lambda: (procfs.descendants(os.getpid()) - others) | members_of_run(paths.run_id), reap=True
        )
        return code, left

    def _wait_for_agent(self, agent: int) -> int:
        """Wait for an agent that became our child."""
        self._adopted_agent = agent
        try:
            # Do not reap it while signals are forwarded: until then nothing else can have its pid.
            os.waitid(os.P_PID, agent, os.WEXITED | os.WNOWAIT)
        finally:
            self._adopted_agent = 0
        code = os.waitstatus_to_exitcode(os.waitpid(agent, 0)[1])
        return code if code >= 0 else 128 - code

    async def _leave(self, membership: NodeMembership, reason: str) -> None:
        """Report to the head that nothing is left of this membership, if it answers."""
        try:
            async with self._head(membership.epoch, LEAVE_TIMEOUT_S) as head_api:
                await head_api.leave(membership, reason)
        except RelaxError as error:
            self._say(f"the head was not notified: {error}")


def _is_agent(pid: int) -> bool:
    """Whether a process is a node's agent, or is about to exec it."""
    try:
        return b"relax_rt.cluster.nodes.agent" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


def default_name() -> str:
    """The host's name in the form of a node's name."""
    host = socket.gethostname().partition(".")[0]
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "-" for c in host)[:40] or "node"


def node_facts(request: JoinRequest) -> NodeFacts:
    """Describe this machine to the head. Raises Unreachable: there is no way to the head's network."""
    return NodeFacts(
        name=request.name,
        host=request.host or address_towards(request.head),
        machine=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=psutil.virtual_memory().total // MIB,
        gpus=count_gpus(),
        python=sys.version.split()[0],
        version=VERSION,
        pid=os.getpid(),
    )


def address_towards(head: str) -> str:
    """The address of this machine that packets to the head come from. Raises Unreachable: there is no way there."""
    target = parse_address(head)
    try:
        family, _, _, _, place = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise Unreachable(head, why=str(error), hint="is the network between the nodes up?") from error
