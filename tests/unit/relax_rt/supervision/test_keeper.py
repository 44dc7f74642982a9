"""The keeper over a stand-in for the agent: exit status, signals, and nothing left behind."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from waiting import eventually_blocking

from relax_rt.process import procfs
from relax_rt.supervision.rundir import (
    OWNER,
    RunPaths,
    clean_stale_runs,
    owner_lives,
    owner_of,
    read_run,
    stale_runs,
    update_run,
    write_json,
)

DAEMON = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)\n"
    "    os._exit(0)\n"
    "os.wait()\n"
)


SERVER = (
    "import os, signal, time\n"
    "from multiprocessing import resource_tracker, shared_memory\n"
    "segment = shared_memory.SharedMemory(create=True, size=4096)\n"
    "os.kill(resource_tracker._resource_tracker._pid, signal.SIGKILL)\n"
    "print(segment.name, flush=True)\n"
    "time.sleep(600)\n"
)
AGENT_OF_A_GUARD = (
    "import os, pathlib, subprocess, sys, time\n"
    "log, server = pathlib.Path(sys.argv[1]), sys.argv[2]\n"
    "reading, writing = os.pipe()\n"
    "guard = [sys.executable, '-m', 'relax_rt.process.guard', '--lifeline', str(reading), '--log', str(log)]\n"
    "guard += ['--log-mib', '1', '--', sys.executable, '-c', server]\n"
    "subprocess.Popen(guard, pass_fds=(reading,), start_new_session=True)\n"
    "while not (log.exists() and log.read_text().endswith('\\n')):\n"
    "    time.sleep(0.01)\n"
    "os.kill(os.getpid(), 9)\n"
)


@pytest.fixture
def paths(tmp_path: Path) -> Iterator[RunPaths]:
    found = RunPaths(secrets.token_hex(4), tmp_path)
    found.make_private()
    update_run(tmp_path, run_id=found.run_id, status="running")
    yield found
    found.remove_private()


def keeper(paths: RunPaths, code: str, *argv: str, **env: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "relax_rt.supervision.keeper", "--run-id", paths.run_id]
    command += ["--run-dir", str(paths.run_dir), "--", sys.executable, "-c", code, *argv]
    return subprocess.Popen(command, start_new_session=True, env={**os.environ, **env})


@pytest.mark.parametrize(
    ("code", "status"), [("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 128 + 9)]
)
def test_keeper_ends_with_the_exit_status_of_the_agent(paths: RunPaths, code: str, status: int) -> None:
    assert keeper(paths, code).wait(120) == status
    assert not paths.socket_dir.exists() and not paths.shm_dir.exists()


def test_keeper_records_that_the_agent_died(paths: RunPaths) -> None:
    keeper(paths, "import os; os.kill(os.getpid(), 11)").wait(120)
    run = read_run(paths.run_dir)
    assert run is not None and run["status"] == "agent died" and "SIGSEGV" in run["reason"]
    (line,) = (paths.run_dir / "events" / "current.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "agent_died"


def test_keeper_keeps_the_record_of_an_agent_that_ended_in_order(paths: RunPaths) -> None:
    code = "import sys, pathlib; from relax_rt.supervision.rundir import update_run\n"
    code += "update_run(pathlib.Path(sys.argv[1]), status='finished', exit_code=0)"
    assert keeper(paths, code, str(paths.run_dir)).wait(120) == 0
    run = read_run(paths.run_dir)
    assert run is not None and run["status"] == "finished"
    assert not (paths.run_dir / "events").exists()


def test_keeper_kills_daemons_that_left_the_tree_of_processes(paths: RunPaths, tmp_path: Path) -> None:
    pid_file = tmp_path / "daemon"
    process = keeper(paths, DAEMON + "time.sleep(600)", str(pid_file))
    eventually_blocking(lambda: pid_file.exists() and pid_file.read_text())
    daemon = int(pid_file.read_text())
    (agent,) = (pid for pid in procfs.children(process.pid) if pid != daemon)
    os.kill(agent, signal.SIGKILL)
    process.wait(120)
    assert procfs.start_time(daemon) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_keeper_forwards_signals(paths: RunPaths, tmp_path: Path, number: signal.Signals) -> None:
    code = "import signal, sys, time, pathlib\n"
    code += f"signal.signal({int(number)}, lambda *a: sys.exit(5))\n"
    code += "pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    process = keeper(paths, code, str(tmp_path / "up"))
    eventually_blocking((tmp_path / "up").exists)
    process.send_signal(number)
    assert process.wait(120) == 5


def test_keeper_imports_the_standard_library_only() -> None:
    code = "import sys, relax_rt.supervision.keeper\n"
    code += "print(*sorted({m.split('.')[0] for m in sys.modules} - set(sys.stdlib_module_names)))"
    before = subprocess.run(
        [sys.executable, "-c", code.replace(", relax_rt.supervision.keeper", "")], capture_output=True
    )
    after = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert set(after.stdout.split()) - set(before.stdout.split()) == {b"relax_rt"}


def test_owner_is_distinguished_from_another_process_with_its_pid() -> None:
    owner = owner_of(os.getpid())
    assert owner_lives(owner) is True
    assert owner_lives({**owner, "start": owner["start"] + 1}) is False
    assert owner_lives({**owner, "boot": "another"}) is False
    assert owner_lives({**owner, "pid_namespace": "another"}) is None


def test_environment_is_found_also_during_execve() -> None:
    """A spawner goes on before /proc shows the environment; a member of a run that is overlooked then would live on."""
    for number in range(150):
        child = subprocess.Popen(["sleep", "600"], env={"RELAX_RUN_ID": str(number), "PATH": os.environ["PATH"]})
        try:
            assert procfs.has_environment(child.pid, f"RELAX_RUN_ID={number}")
        finally:
            child.kill()
            child.wait()


def test_stale_runs_are_those_whose_owner_is_dead(paths: RunPaths) -> None:
    assert paths.run_id not in [p.run_id for p in stale_runs()]
    owner = {**owner_of(os.getpid()), "run_dir": str(paths.run_dir)}
    write_json(paths.socket_dir / OWNER, {**owner, "pid_namespace": "another", "start": 1})
    assert paths.run_id not in [p.run_id for p in stale_runs()], "what another namespace owns is left alone"
    (paths.socket_dir / OWNER).unlink()
    assert paths.run_id not in [p.run_id for p in stale_runs()], "one that is just being made is left alone"
    write_json(paths.socket_dir / OWNER, {**owner, "start": 1})
    child = subprocess.Popen(["sleep", "600"], env={**os.environ, "RELAX_RUN_ID": paths.run_id})
    assert paths.run_id in clean_stale_runs()
    assert child.wait(120) == -signal.SIGKILL
    assert not paths.socket_dir.exists() and not paths.shm_dir.exists()
    run = read_run(paths.run_dir)
    assert run is not None and run["status"] == "agent died"


def test_directories_of_other_programs_with_a_similar_name_are_kept(paths: RunPaths) -> None:
    others = paths.shm_dir.with_name(f"{paths.shm_dir.name}-of-others")
    others.mkdir()
    try:
        os.utime(others, (1, 1))
        clean_stale_runs()
        assert others.is_dir()
    finally:
        others.rmdir()


def test_a_guard_removes_the_shared_memory_of_its_server_when_the_agent_is_killed(paths: RunPaths) -> None:
    log = paths.run_dir / "server.log"
    assert keeper(paths, AGENT_OF_A_GUARD, str(log), SERVER).wait(120) == 128 + 9
    assert not (Path("/dev/shm") / log.read_text().strip()).exists()
