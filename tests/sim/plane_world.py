"""A whole run under a virtual clock: supervisor, nodes, registry, queue, roles, and what befalls them."""

from __future__ import annotations

import traceback
from collections import Counter, deque
from itertools import count
from typing import Any
from unittest.mock import patch

from plane_agent import NODE_LEASE_S, Agent, Executor, NodeAgent
from plane_checker import ENDED, LEFT, OVERDUE, UNANSWERED, UNESCALATED, PlaneChecker
from plane_parts import Clock, Host, Net, Process
from plane_roles import Doomed, Meeting, Rank, Reward, Role, Rollout
from plane_servers import Broker, Queue, Registry, RegistryDisk, Stage
from sim_checker import STANDSTILL, UNEXPECTED, Trained
from sim_kernel import Kernel, Steps, Thread
from sim_memory import Memory
from sim_world import Disk

from relax_rt.cluster.nodes import table as table_module
from relax_rt.cluster.nodes.api import NodeFacts
from relax_rt.supervision.executor import GangRendezvous, StartOrder
from relax_rt.supervision.protocol import DrainRequested, RestartRequested, ScaleRequested
from relax_rt.supervision.tree import RoleSpec, SlotSpec
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.rpc.errors import Refused

FAULTS_S = 14.0
PATIENCE_S = 150.0
MEAN_FAULT_S = 1.2
HANG_S = 5.0
"""Silence of a role after which it is taken for hung."""
FAULT_KINDS = (
    "kill",
    "stop",
    "hang",
    "clock jump",
    "server stop",
    "agent stop",
    "agent crash",
    "operator",
    "partition",
)
KINDS = ("one host", "two hosts", "three hosts", "one host", "doomed", "three hosts")
STORY = 80
LIMITS = QueueLimits(lease_s=4.0, quarantine_after=100, keep_steps=1000)
STATE_S = {"requested": 6.0, "starting": 6.0, "hung": 0.2, "stopping": 2.0, "killing": 12.0, "backoff": 12.0}
"""The longest that a slot may be in a state; those that wait for others have these others' time besides."""
MAKE: dict[str, type[Role]] = {
    "registry": Registry,
    "queue": Queue,
    "reward": Reward,
    "rollout": Rollout,
    "trainer": Rank,
    "doomed": Doomed,
}


class World:
    """One run. Everything in it follows from the seed.

    Args:
        faults_s: so long there are faults.
        target: steps to train; None: as many as keep it busy for about as long as there are faults.
        period_s: so long a slot's failures are remembered.
    """

    def __init__(
        self, seed: int, *, faults_s: float = FAULTS_S, target: int | None = None, period_s: float = 1000.0
    ) -> None:
        self.seed, self.faults_s, self._period_s = seed, faults_s, period_s
        self.kernel = Kernel(seed)
        rng = self.kernel.random
        self.story: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=STORY)
        self.happened: Counter[str] = Counter()
        self.run = 1
        self.ttl_s = 2.0
        self.limits = LIMITS
        self.no_memory = Memory()
        self.policy = LedgerPolicy(
            tasks={"reward": ("tokens",), "train": ("tokens", "reward")},
            group_size=2,
            prompts_per_step=2,
            max_staleness=float(rng.choice([0, 1, 1, 2])),
            straggler_wait_s=3.0,
            on_straggler=rng.choice(["wait", "requeue"]),
            failures_per_prompt=1000,
        )
        chosen = rng.randint(5, 9)
        self.target = chosen if target is None else target
        self.checker = PlaneChecker(self.policy.max_staleness)
        self.net = Net(self)
        self.faulty, self.crash_rate = True, rng.choice([0.0, 0.003, 0.01])
        self.servers: dict[str, Process] = {}
        self.roles: list[Role] = []
        self.deaths: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self.meetings: dict[GangRendezvous, Meeting] = {}
        self.gangs, self.gang_of = 0, dict[str, int]()
        self.registry_disk, self.stage = RegistryDisk(), Stage(self)
        self.disk = Disk()
        self.broker = Broker(self, self.policy, self.limits)
        self.path: dict[int, list[Trained]] = {}
        self.restarts, self.restless = Counter[str](), Counter[str]()
        self._pids, self._digests = count(1), count(1)
        self._shape(seed, rng)
        self.here = Host("head")
        self.away = [Host(name) for name in self.nodes]
        self.node_agents: dict[str, NodeAgent] = {}
        self.drained_nodes: set[str] = set()
        self.agent = Agent(self, self.here)
        for host in self.away:
            Joiner(self, host)

    def _shape(self, seed: int, rng: Any) -> None:
        """What kind of run it is."""
        self.kind = KINDS[seed % len(KINDS)]
        self.nodes = {"two hosts": ["b"], "three hosts": ["b", "c"]}.get(self.kind, [])
        self.head_node = "head" if self.nodes else ""
        # A gang of two on one host or spread, and with a place to go to when a host is lost, or without.
        self.head_gpus = rng.choice([0, 1] if len(self.nodes) > 1 else [1, 2]) if self.nodes else 0
        self.node_gpus = 1 if self.head_gpus else 2
        self.wait_for_lost = rng.random() < 0.3
        self.doomed = rng.choice(["spared", "ends the run"]) if self.kind == "doomed" else ""
        gpus = 1.0 if self.nodes else 0.0
        slots: list[tuple[str, int, dict[str, Any]]] = [("registry/0", 0, {}), ("queue/0", 10, {})]
        slots += [("reward/0", 40, {}), ("rollout/0", 40, {})]
        slots += [("rollout/1", 40, {}), ("trainer/0", 40, {"gpus": gpus}), ("trainer/1", 40, {"gpus": gpus})]
        self.rules = [
            RoleSpec(kind="trainer", gang=True, role_restarts=100),
            RoleSpec(kind="rollout", min_ready=1),
        ]
        if self.doomed:
            slots += [("doomed/0", 40, {})]
            spared = self.doomed == "spared"
            self.rules.append(RoleSpec(kind="doomed", min_ready=0 if spared else 1, role_restarts=1))
        kinds = {
            "kill": 4,
            "stop": 3,
            "hang": 1,
            "clock jump": 1,
            "server stop": 3,
            "agent stop": 1,
            "agent crash": 0.5,
        }
        kinds |= {"operator": 1} | ({"node": 4} if self.nodes else {})
        self.mix = {kind: weight for kind, weight in kinds.items() if rng.random() < 0.6} or {"kill": 1}
        self.net.loss = rng.choice([0.0, 0.0, 0.02, 0.05])
        self.net.late = rng.choice([0.0, 0.01, 0.05])
        self.specs = [_spec(slot, tier, self.head_node, self._period_s, **more) for slot, tier, more in slots]

    # --- what the parts ask for

    def new_pid(self) -> int:
        return next(self._pids)

    def new_digest(self, what: str) -> str:
        return f"{what}#{next(self._digests)}"

    def make(self, order: StartOrder, host: Host, executor: Executor) -> Role:
        return MAKE[order.slot.partition("/")[0]](self, order, host, executor)

    def living(self, who: Any) -> Role | None:
        return next((role for role in self.roles if role.alive and role.who == who), None)

    def note(self, what: str, /, **fields: Any) -> None:
        """For the story that comes with a failure."""
        self.story.append((self.kernel.now, what, fields))

    def emitted(self, kind: str, fields: dict[str, Any]) -> None:
        """A line of the supervisor's event log."""
        self.happened[kind] += 1
        if kind in ("slot_exited", "slot_spawned", "slot_ready"):
            return
        self.note(kind, **fields)
        if kind == "slot_restarting":
            slot = fields["slot"]
            self.restarts[slot] += 1
            self.restless[slot] = 0 if fields["wait_s"] else self.restless[slot] + 1
            if slot.startswith("doomed/") and self.restarts[slot] == 40:
                self.checker.found(UNESCALATED, f"{slot} was restarted 40 times in {self.kernel.now:.1f} s")
            if slot.startswith("doomed/") and self.restless[slot] == 3:
                self.checker.found(UNESCALATED, f"{slot} was restarted three times without any wait")

    def died(self, role: Role) -> None:
        if role.run == self.run and not any(other.alive and other.slot == role.slot for other in self.roles):
            self.deaths.setdefault(role.slot, self.kernel.now)

    # --- faults

    def _faults(self) -> Steps:
        rng = self.kernel.random
        yield 1.0
        while True:
            yield rng.expovariate(1 / MEAN_FAULT_S)
            if self.kernel.now > self.faults_s:
                break
            self._harm()
        self.faulty = self.net.faulty = False
        self.crash_rate = self.broker.crash_rate = 0.0
        self.note("faults end")

    def _harm(self) -> None:
        """One fault of those that this world knows; worlds with few kinds see what many kinds would cover up."""
        rng = self.kernel.random
        alive = [role for role in self.roles if role.alive]
        what = rng.choices(list(self.mix), list(self.mix.values()))[0]
        seconds = rng.choice([rng.uniform(0.2, 2.0), rng.uniform(2.0, 9.0)])
        match what:
            case "node":
                self._harm_node(rng.choice(self.away), rng.random())
            case "agent stop":
                self._do(what, self.agent, lambda agent: agent.stop(rng.uniform(0.3, 6.0)))
            case "agent crash":
                self._crash_agent()
            case "operator":
                self._operate()
            case "server stop":
                for role in [role for role in alive if role.slot in ("registry/0", "queue/0")]:
                    if rng.random() < 0.6:
                        self._do(what, role, lambda role: role.stop(seconds))
            case _ if alive:
                do = {
                    "kill": lambda role: role.exit("killed", "SIGKILL from outside"),
                    "stop": lambda role: role.stop(seconds),
                    "hang": lambda role: role.stop(1e6),
                    "clock jump": lambda role: role.now.jump(seconds),
                }[what]
                self._do(what, rng.choice(alive), do)

    def _do(self, what: str, whom: Any, do: Any) -> None:
        if whom.alive:
            self.happened[what] += 1
            self.note(f"FAULT {what}", whom=str(whom))
            do(whom)

    def _crash_agent(self) -> None:
        if self.agent.done is not None or not self.agent.alive:
            return
        self._do("agent crash", self.agent, lambda agent: agent.die())
        self.kernel.after(self.kernel.random.uniform(1.6, 4.0), self._up_again)

    def _up_again(self) -> None:
        """The same run directory with a new run id, once nothing of the old run lives on this host."""
        if any(role.alive and role.host is self.here for role in self.roles):
            self.kernel.after(0.2, self._up_again)
            return
        self.run += 1
        self.deaths.clear()
        self.stage = Stage(self)
        self.note("up again", run=self.run)
        self.agent = Agent(self, self.here)

    def _operate(self) -> None:
        rng = self.kernel.random
        what: Any = rng.choice(
            [
                ScaleRequested("rollout", rng.randint(1, 3)),
                RestartRequested(rng.choice(["trainer/0", "trainer/1", "rollout/0", "reward/0", "queue/0"])),
                DrainRequested(rng.choice(["rollout/1", *self.nodes])),
            ]
        )
        if isinstance(what, DrainRequested) and what.what in self.node_agents:
            self.drained_nodes.add(what.what)
        self._ask_agent(what)

    def _ask_agent(self, what: Any) -> None:
        self.happened["operator"] += 1
        self.note("OPERATOR", wants=str(what))

        def post() -> None:
            try:
                self.agent.post(what)
            except Refused as error:
                self.note("refused", why=str(error))

        self.agent.take(post)

    def _harm_node(self, host: Host, what: float) -> None:
        rng, node_agent = self.kernel.random, self.node_agents.get(host.name)
        there = [role for role in self.roles if role.alive and role.host is host]
        if what < 0.45:
            seconds = rng.choice([rng.uniform(0.2, 2.0), rng.uniform(2.0, 12.0)])
            host.cut_until = max(host.cut_until, self.kernel.now + seconds)
            self.happened["partition"] += 1
            self.note("FAULT partition", host=host.name, seconds=round(seconds, 2))
            for one in there:
                one.troubled(host.cut_until)
            if node_agent is not None:
                node_agent.troubled(host.cut_until)
        elif what < 0.6:
            if node_agent is not None:
                self._do("node_agent crash", node_agent, lambda node_agent: node_agent.die())
        elif node_agent is not None:
            # The machine is suspended as a whole, or its agent alone stands still.
            seconds, whole = rng.uniform(1.0, 14.0), rng.random() < 0.7
            # The agent is not always the first to wake, and takes a moment to see how late it is.
            later = rng.choice([0.0, rng.uniform(0.0, 1.5)])
            host.excused_until = max(host.excused_until, self.kernel.now + seconds + later + 1.5)
            self._do(
                "suspend" if whole else "node_agent stop",
                node_agent,
                lambda node_agent: node_agent.stop(seconds + later),
            )
            for role in there if whole else []:
                self._do("suspend", role, lambda role: role.stop(seconds))

    # --- judging on the way

    def _monitor(self) -> Steps:
        while True:
            yield 1.0
            agent, now = self.agent, self.kernel.now
            if not agent.alive or agent.done is not None or now < agent.stopped_until + 3.0:
                continue
            views = {view.slot: view for view in agent.core.view(agent.now())}
            for view in views.values():
                over = view.state == "ended" and not agent.core.draining
                if over and view.last is not None and view.last.failed and not view.given_up and not view.waiting:
                    self.checker.found(UNANSWERED, f"{view.slot} has failed, and nothing came of it: {view.last}")
                limit = STATE_S.get(view.state)
                if view.state == "starting" and view.waiting:
                    self.waited[view.slot] = agent.now()
                # A start has its time anew while it says that it waits for others; that is seen up to a second late.
                since = max(agent.now() - view.state_s, self.waited.get(view.slot, 0.0) + 1.0)
                if limit is not None and agent.now() - since > limit * 1.02 + 1.0:
                    self.checker.found(OVERDUE, f"{view.slot} is {view.state} for {view.state_s:.1f} s")
            if views and agent.core.next_deadline() is None and any(v.state in STATE_S for v in views.values()):
                self.checker.found(OVERDUE, "a slot is on its way without any deadline")
            for slot, at in list(self.deaths.items()):
                found = views.get(slot)
                if found is None or found.state == "ended" or (found.state == "pending" and found.waiting):
                    del self.deaths[slot]
                elif now - at > 30.0 and not agent.core.draining:
                    self.checker.found(UNANSWERED, f"{slot} died at {at:.1f} and is {found.state}")
            self._judge_still(agent)

    def _judge_still(self, agent: Agent) -> None:
        """What stands still for long must be found and ended."""
        for role in self.roles:
            if role.alive and role.stopped and role.run == self.run and role.host.cut_until <= self.kernel.now:
                since = role.still_since
                if self.kernel.now - max(since, agent.stopped_until) > HANG_S * 3 and role.host is self.here:
                    self.checker.found(OVERDUE, f"{role.name} stands still since {since:.1f}, and nobody ends it")

    # --- the run

    def play(self) -> World:
        """Until it is over, or it is plain that it will not be."""
        Thread(self.kernel, self._faults())
        Thread(self.kernel, self._monitor())
        Thread(self.kernel, self._mend())
        try:
            # Agents of nodes begin at once here, so they need not be given the time that a process takes.
            with patch.object(table_module, "AGENT_START_S", 3.0 * NODE_LEASE_S):
                over = self.kernel.run(self._is_over, self.faults_s + PATIENCE_S)
        except Exception:  # noqa: BLE001 whatever a part raises is judged like what it does
            self.checker.found(UNEXPECTED, traceback.format_exc(limit=-4))
            return self
        if not over:
            step = max(self.path, default=0)
            self.checker.found(STANDSTILL, f"at {self.kernel.now:.0f} s, step {step}: {self._why()}")
        else:
            still = max([0.0, *(host.excused_until for host in self.away)])
            self.kernel.run(lambda: False, max(still, self.kernel.now) + 2.5 * NODE_LEASE_S)
            self._judge_end()
        self._judge_samples()
        return self

    def _is_over(self) -> bool:
        return self.agent.done is not None

    def _mend(self) -> Steps:
        """After the faults an operator puts right what was taken down on purpose."""
        while self.faulty:
            yield 0.5
        yield 3.0
        while True:
            if self.agent.alive and self.agent.done is None:
                if sum(view.kind == "rollout" for view in self.agent.core.view()) != 2:
                    self._ask_agent(ScaleRequested("rollout", 2))
                for name in self.drained_nodes:
                    # It takes part again once it has left.
                    self.node_agents[name].die()
                self.drained_nodes.clear()
                for view in self.agent.core.view():
                    if view.state == "ended" and view.waiting.startswith("drained"):
                        self._ask_agent(RestartRequested(view.slot))
            yield 10.0

    def _why(self) -> str:
        views = [f"{v.slot} {v.state}{f' ({v.waiting})' if v.waiting else ''}" for v in self.agent.core.view()]
        ledger = self.broker.ledger
        return f"{'; '.join(views)}; queue {ledger.account() if ledger else 'down'}"

    def _judge_end(self) -> None:
        done = self.agent.done
        assert done is not None
        if self.doomed == "ends the run":
            right = done.exit_code == 1 and done.diagnosis is not None and done.diagnosis.slot == "doomed/0"
            if not right and self.disk.newest()[0] < self.target:
                self.checker.found(ENDED, f"{done}, and the cause was doomed/0")
        elif done.exit_code != 0:
            self.checker.found(ENDED, str(done))
        elif (step := self.disk.newest()[0]) < self.target:
            self.checker.found(ENDED, f"at step {step} of {self.target}: {done.reason}")
        left = [role.name for role in self.roles if role.alive]
        if left:
            self.checker.found(LEFT, ", ".join(left))

    def _judge_samples(self) -> None:
        self.checker.judge_path(self.path, 0, set())
        broker = self.broker
        if broker.ledger is None:
            return
        for wrong in broker.ledger.audit():
            self.checker.found(UNEXPECTED, wrong)
        there = broker.ledger.state.groups
        notices = [notice for n in sorted(broker.notices) for notice in broker.notices[n]]
        self.checker.given_up.update(
            made.kept_as for made in self.checker.produced.values() if made.kept_as and made.kept_as.group in there
        )
        self.checker.judge_samples(notices, self.checker.stepped_on)

    def describe(self) -> str:
        """The last that happened."""
        lines = [f"{at:8.3f}  {what}  {fields}" for at, what, fields in self.story]
        return "\n".join([f"seed {self.seed}: {self.kind} {self.doomed}", *lines])


class Joiner(Process):
    """On a node: takes part in the run, again and again."""

    def __init__(self, world: World, host: Host) -> None:
        super().__init__(world, f"joiner of {host.name}", host)
        self.thread(self._join())

    def _join(self) -> Steps:
        world, name = self.world, self.host.name
        for attempt in count():
            facts, token = NodeFacts(name=name, host=name, cores=4, gpus=world.node_gpus), f"token-{attempt}"
            while True:
                made, self.run = self.now(), world.run
                try:
                    membership = yield from self.ask("door", "join", facts, token, give_up_s=0.0)
                    break
                except (Refused, TimeoutError):
                    yield 0.5
            if world.run != self.run:
                continue
            node_agent = world.node_agents[name] = NodeAgent(world, self.host, membership, made, Clock.like(self.now))
            while node_agent.alive:
                yield 0.3
            if node_agent.over:
                return
            # What ran there has ended with it, at the latest when its keeper has seen to it.
            while any(role.alive and role.host is self.host for role in world.roles):
                yield 0.2


def _spec(slot: str, tier: int, head: str, period_s: float, **more: Any) -> SlotSpec:
    kind = slot.partition("/")[0]
    return SlotSpec(
        slot=slot,
        kind=kind,
        tier=tier,
        significant=kind == "trainer",
        system=kind in ("registry", "queue"),
        spawn_timeout_s=6.0,
        start_timeout_s=6.0,
        stop_timeout_s=2.0,
        hang_after_s=HANG_S,
        dump_grace_s=0.2,
        max_restarts=3 if kind == "doomed" else 500,
        period_s=period_s,
        backoff_first_s=0.05,
        backoff_max_s=0.5,
        node=head if kind in ("registry", "queue") else "",
        **more,
    )
