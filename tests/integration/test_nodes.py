"""Runs over two hosts made of network namespaces: who joins, who is lost, who is fenced, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from live_nodes import FILE_TOYS, LEASE_S, Far, has_room, nodes_table, slots, spread, two_hosts
from live_run import TOYS, WAIT_S, LiveRun, environment, until
from netns import Nodes, cut, mend

from relax_rt.cluster.nodes.join_key import make_key
from relax_rt.cluster.nodes.table import patience_s
from relax_rt.process import procfs
from relax_rt.supervision import control
from relax_rt.supervision.rundir import members_of_run
from relax_rt.transport.rpc.errors import Refused

pytestmark = pytest.mark.integration

WORKERS = '[roles.worker]\ncount = 0\n[roles.aide]\nnode = "head"\n'
"""None at first: `spread` starts them once there are two hosts; the aide keeps the run going."""
CORES = len(os.sched_getaffinity(0))
APART = FILE_TOYS.format(echo='node = "b"', caller='node = "head"')


def test_slots_on_both_hosts_call_each_other_and_nothing_is_left(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, APART) as (run, far):
        answer = run.event("echoed")["answer"]
        assert answer.endswith("on b: hello")
        found = slots(run)
        assert (found["echo/0"].node, found["caller/0"].node) == ("b", "head")
        assert found["echo/0"].log == f"b:{far.run_dir}/logs/echo-0.log"
        os.kill(found["echo/0"].pid, signal.SIGKILL)
        end = run.event("slot_exited", slot="echo/0")
        assert end["diagnosis"]["signal"] == "SIGKILL" and end["diagnosis"]["pid"] == found["echo/0"].pid
        again = run.event("echoed", nth=1)["answer"]
        assert again != answer and again.endswith("on b: hello")
        (head, b) = control.nodes(run.run_dir)
        assert (head.node, head.slots) == ("head", ["registry/0", "caller/0"])
        assert (b.node, b.state, b.slots, b.agent_pid) == ("b", "alive", ["echo/0"], far.agent_pid)
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and far.ends() == 0
        assert run.left() == [] and far.left() == []
        assert any(e.get("by") == "echo/0#2" or e.get("node") == "b" for e in run.poll()), "events come to the head"


def test_a_drained_node_says_so_and_takes_slots_again_once_it_is_restarted(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, APART) as (run, far):
        run.event("echoed")

        def state() -> str:
            return next(n.state for n in control.nodes(run.run_dir) if n.node == "b")

        control.drain(run.run_dir, "b")
        until("it is empty", lambda: state() == "drained")
        assert "restart b" in slots(run)["echo/0"].waiting
        with pytest.raises(Refused, match="there can be no room for it"):
            control.restart(run.run_dir, "echo/0")
        control.restart(run.run_dir, "b")
        run.event("slot_ready", slot="echo/0", nth=1)
        assert state() == "alive" and slots(run)["echo/0"].node == "b"
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and far.ends() == 0


@pytest.mark.long
def test_the_other_way_round(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, FILE_TOYS.format(echo='node = "head"', caller='node = "b"')) as (run, far):
        assert run.event("echoed")["answer"].endswith("on head: hello")
        os.kill(slots(run)["echo/0"].pid, signal.SIGKILL)
        # A new port: the caller looks for it again.
        assert run.event("echoed", nth=1)["answer"].endswith("on head: hello")
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and far.ends() == 0 and run.left() == [] and far.left() == []


def test_a_killed_agent_costs_its_slots_which_start_on_the_head_and_the_node_comes_back(
    tmp_path: Path, nodes: Nodes
) -> None:
    # More threads than the head has to spare, once the caller is there.
    roles = FILE_TOYS.format(echo="count = 0\nthreads = 2", caller='node = "head"\nthreads = 2')
    with two_hosts(tmp_path, nodes, roles) as (run, far):
        run.ready("caller/0")
        control.scale(run.run_dir, "echo", 1)
        assert run.event("echoed")["answer"].endswith("on b: hello")
        echo = slots(run)["echo/0"]
        os.kill(far.agent_pid, signal.SIGKILL)
        gone = run.event("node_left", node="b")
        assert "died" in gone["reason"] and gone["slots"] == ["echo/0"]
        assert procfs.start_time(echo.pid) == 0, "its roles are dead when it is told"
        end = run.event("slot_exited", slot="echo/0")
        assert end["diagnosis"]["kind"] == "node_lost"
        assert run.event("echoed", nth=1)["answer"].endswith("on head: hello")
        assert run.event("node_joined", node="b", nth=1)["node_epoch"] == 2


def test_a_program_connects_by_the_directory_of_a_joined_node(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, APART) as (run, far):
        run.ready("echo/0", "caller/0")
        for run_dir in (run.run_dir, far.run_dir):
            # By unix sockets of that host, and from it by tcp.
            code = f"from node_toys import ask; ask({str(run_dir)!r})"
            where = nodes.second if run_dir == far.run_dir else nodes.first
            asked = subprocess.run(
                [*where, sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=WAIT_S
            )
            assert asked.stdout.startswith(f"{run.record['run_id']} echo/0"), asked.stderr
            assert asked.stdout.endswith("on b: hello\n"), asked.stdout
        assert control.status(far.run_dir).status == "joined"
        with pytest.raises(control.NoRun, match="ask the head"):
            control.stop(far.run_dir)
        os.kill(far.agent_pid, signal.SIGKILL)
        died = '"agent_died"'
        until("its keeper says so", lambda: died in (far.run_dir / "events" / "current.jsonl").read_text())


def test_a_killed_keeper_costs_nothing(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, WORKERS) as (run, far):
        there = spread(run)
        agent = far.agent_pid
        os.kill(far.keeper_pid, signal.SIGKILL)
        until("a stand-in", lambda: [e for e in run.poll() if e["kind"] == "keeper_started"])
        # The head would have given the node up by then.
        time.sleep(patience_s(LEASE_S) + 1.0)
        assert {name: slots(run)[name].pid for name in there} == {name: slot.pid for name, slot in there.items()}
        assert all(slots(run)[name].state == "ready" for name in there) and far.agent_pid == agent
        assert not [e for e in run.poll() if e["kind"] in ("node_lost", "node_left", "slot_exited")]
        # And it can still be asked to leave.
        far.process.terminate()
        assert far.ends() == 0 and far.left() == []
        assert run.event("node_left", node="b")["slots"] == []


def test_keeper_and_agent_killed_at_once_leave_nothing(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, WORKERS) as (run, far):
        there = spread(run)
        left = far.paths
        pids = (far.keeper_pid, far.agent_pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert sorted(run.event("node_left", node="b")["slots"]) == sorted(there)
        assert members_of_run(left.run_id) == set() and not left.socket_dir.exists()
        assert run.event("node_joined", node="b", nth=1)["node_epoch"] == 2


def test_a_host_that_dies_at_once_is_lost_when_its_lease_is_over(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, WORKERS) as (run, far):
        there = spread(run)
        victims = {far.process.pid, far.keeper_pid, far.agent_pid} | members_of_run(far.paths.run_id)
        for pid in victims:
            os.kill(pid, signal.SIGSTOP)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        lost = run.event("node_lost", node="b")
        assert sorted(lost["slots"]) == sorted(there)
        for name in there:
            assert run.event("slot_ready", slot=name, nth=1)
            assert slots(run)[name].node == "head"
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and run.left() == []


def test_a_partition_ends_the_roles_there_before_others_take_their_place(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, WORKERS) as (run, far):
        there = spread(run)
        _ = far.paths
        cut(nodes.second)
        lost = run.event("node_lost", node="b")
        assert not any(procfs.start_time(slot.pid) for slot in there.values()), "the node ended its roles before"
        assert sorted(lost["slots"]) == sorted(there)
        for name in there:
            run.event("slot_ready", slot=name, nth=1)
        mend(nodes.second)
        assert run.event("node_joined", node="b", nth=1)["node_epoch"] == 2
        has_room(run)
        control.scale(run.run_dir, "worker", 8)
        until("slots run there again", lambda: any(s.node == "b" and s.state == "ready" for s in slots(run).values()))
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and far.ends() == 0 and run.left() == [] and far.left() == []


@pytest.mark.long
def test_a_node_whose_clock_stood_still_is_fenced_by_epochs(tmp_path: Path, nodes: Nodes) -> None:
    """Its agent is stopped, its roles go on: time does not fence them, the registry does."""
    tables = "[supervision]\nlease_s = 0.6\n"
    with two_hosts(tmp_path, nodes, WORKERS, tables) as (run, far):
        there = spread(run)
        agent = far.agent_pid
        os.kill(agent, signal.SIGSTOP)
        run.event("node_lost", node="b")
        for name, old in there.items():
            assert run.event("slot_ready", slot=name, nth=1)["epoch"] > old.epoch
        until("the old ones have ended", lambda: not any(procfs.start_time(s.pid) for s in there.values()))
        log = (far.run_dir / "logs" / f"{next(iter(there)).replace('/', '-')}.log").read_text()
        assert "is fenced" in log or "has ended" in log
        os.kill(agent, signal.SIGCONT)
        assert run.event("node_joined", node="b", nth=1)["node_epoch"] == 2
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and far.ends() == 0


@pytest.mark.long
def test_waiting_for_a_lost_node_keeps_its_slots_for_it(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, WORKERS, on_loss="wait") as (run, _):
        there = spread(run)
        cut(nodes.second)
        run.event("node_lost", node="b")
        until("they wait", lambda: all("'b', which it was on" in slots(run)[name].waiting for name in there))
        mend(nodes.second)
        for name in there:
            run.event("slot_ready", slot=name, nth=1)
            assert slots(run)[name].node == "b"


def test_a_node_that_is_asked_to_leave_moves_its_slots_in_order(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, WORKERS) as (run, far):
        there = spread(run)
        far.process.terminate()
        assert far.ends() == 0
        assert run.event("node_left", node="b")["slots"] == []
        for name in there:
            assert run.event("slot_exited", slot=name)["diagnosis"]["kind"] == "clean"
            run.event("slot_ready", slot=name, nth=1)
            assert slots(run)[name].node == "head"
        assert far.left() == []


@pytest.mark.long
def test_a_killed_head_costs_the_roles_everywhere_and_its_nodes_join_the_next(tmp_path: Path, nodes: Nodes) -> None:
    with two_hosts(tmp_path, nodes, WORKERS) as (run, far):
        spread(run)
        everywhere = [slot.pid for slot in slots(run).values()]
        _ = far.paths
        os.kill(run.agent_pid, signal.SIGKILL)
        run.ends()
        assert run.process.stdout is not None
        run.process.stdout.close()
        until("all roles are dead", lambda: not any(procfs.start_time(pid) for pid in everywhere))
        run.start()
        run.event("node_joined", node="b", nth=1)
        has_room(run)
        until("they run on both", lambda: spread(run, count=8))
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and far.ends() == 0 and run.left() == [] and far.left() == []


def test_another_key_gets_nothing_and_is_told_so(tmp_path: Path, nodes: Nodes) -> None:
    run = LiveRun(tmp_path, "[roles.worker]\n", nodes_table(nodes.host), system=("registry",))
    run.prefix = nodes.first
    with run:
        run.ready("worker/0")
        (tmp_path / "other").mkdir()
        stranger = Far(run, nodes.second, make_key(tmp_path / "other"), wait_s=2.0).start()
        assert stranger.ends() == 1
        said = stranger.output.read_text()
        assert "is it this run's key?" in said, said
        assert not [e for e in run.poll() if e["kind"] == "node_joined"]
        assert not stranger.run_dir.exists()


@pytest.mark.skipif(CORES < 2, reason="one core each holds no gang of three")
@pytest.mark.long
def test_a_gang_over_both_hosts_meets_and_meets_again(tmp_path: Path, nodes: Nodes) -> None:
    # The registry takes one core of the head, so that there is room for one rank there, and for two on b.
    roles = f"[roles.ranks]\ncount = 3\nthreads = {CORES // 2}\n"
    with two_hosts(tmp_path, nodes, roles, "[supervision.restart]\nbackoff_first_s = 0.05\n") as (run, _):
        run.ready("ranks/0", "ranks/1", "ranks/2")
        # It may have begun before the node had joined.
        control.restart(run.run_dir, "ranks/0")
        generation = 2
        assert run.event("added", rank=2, step=20, generations=3 * generation)["ranks"] == 3
        found = slots(run)
        assert [found[f"ranks/{n}"].node for n in range(3)] == ["head", "b", "b"]
        os.kill(found["ranks/2"].pid, signal.SIGKILL)
        assert run.event("added", rank=0, step=20, generations=3 * (generation + 1))["ranks"] == 3
        cut(nodes.second)
        run.event("node_lost", node="b")
        # All on the head now: they share its cores.
        run.event("added", rank=2, step=20, generations=3 * (generation + 2))
        assert {slot.node for name, slot in slots(run).items() if name.startswith("ranks")} == {"head"}


def at_queue(**nodes: str) -> str:
    toys = {"producer": "Producer", "judge": "Judge", "reader": "ReadBack"}
    return "".join(
        f'[roles.{kind}]\ntarget = "{TOYS}/node_toys.py:{toys[kind]}"\nnode = "{node}"\n'
        for kind, node in nodes.items()
    )


@pytest.mark.long
def test_samples_are_judged_on_another_host_and_read_back_through_deaths(tmp_path: Path, nodes: Nodes) -> None:
    roles = at_queue(producer="head", judge="b", reader="head")
    tables = "[queue]\ncapacity_mib = 32\n[supervision.restart]\nbackoff_first_s = 0.05\n"
    with two_hosts(tmp_path, nodes, roles, tables, system=("registry", "queue"), job="judged") as (run, far):
        assert run.event("read", samples=50)["bytes_in"] >= 50 * 10_000 * 8, "rewards come over the wire"
        shm = far.paths.shm_dir
        (before,) = shm.glob("of-judge-0-*")
        os.kill(slots(run)["judge/0"].pid, signal.SIGKILL)
        run.event("slot_ready", slot="judge/0", nth=1)
        run.event("read", samples=200)
        assert not before.exists(), "the memory of the dead one is gone"
        os.kill(slots(run)["queue/0"].pid, signal.SIGKILL)
        run.event("slot_ready", slot="queue/0", nth=1)
        run.event("read", samples=400)
        assert not [e for e in run.poll() if e["kind"] == "slot_exited" and e["diagnosis"]["kind"] == "exception"]
        control.stop(run.run_dir, wait_s=120)
        assert run.ends() == 0 and far.ends() == 0 and run.left() == [] and far.left() == []


@pytest.mark.long
def test_a_producer_on_another_host_is_lost_with_it_and_the_others_go_on(tmp_path: Path, nodes: Nodes) -> None:
    roles = at_queue(producer="b", judge="b", reader="head").replace('node = "b"', "threads = 9")
    tables = "[queue]\ncapacity_mib = 32\n"
    with two_hosts(tmp_path, nodes, roles, tables, system=("registry", "queue"), job="judged") as (run, far):
        run.event("read", samples=50)
        _ = far.paths
        cut(nodes.second)
        run.event("node_lost", node="b")
        seen = len([e for e in run.poll() if e["kind"] == "read"])
        # What lay there is lost; what is made anew on the head is judged and read there.
        run.event("read", nth=seen + 1)
        assert {slot.node for slot in slots(run).values()} == {"head"}
