"""The server process: guard, options, diagnosis of failed starts and ends. With stand-ins for servers."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_rt.config.problems import Problem
from relax_rt.config.schema import SupervisionTable
from relax_rt.process import procfs
from relax_rt.process.guard import RotatingLog
from relax_rt.roles.config.engine_checks import check_engines
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.rollout.engines.sglang.options import (
    RESERVED_POSITIONS,
    SUPPORTED,
    Boot,
    Option,
    as_arguments,
    check_sglang,
    interpreter,
    query_interpreter,
    server_environment,
    server_options,
    user_options,
)
from relax_rt.roles.rollout.engines.sglang.server import ServerDied, ServerSpec, SglangServer, log_position, read_tail
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.rpc.errors import DeadlineExceeded, ProtocolError, Refused, RelaxError

WAIT_S = 120.0
"""Only what hangs takes so long."""
ANSWERS = """
import http.server, json, os, sys, threading, time
port, name = int(sys.argv[1]), sys.argv[2]
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"served_model_name": name}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
def end():
    began = time.monotonic()
    while not os.path.exists(sys.argv[3]) and time.monotonic() < began + 600.0:
        time.sleep(0.02)
    print("out of cheese", flush=True)
    os._exit(7)
print("serving", flush=True)
threading.Thread(target=end).start()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def stand_in(
    tmp_path: Path,
    script: str,
    on_exit: Callable[[RelaxError], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> SglangServer:
    """A server whose interpreter runs `script` in the shell instead; $PORT and $NAME are those of the start."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\nwhile [ $# -gt 0 ]; do case "$1" in --port) PORT=$2;; --served-model-name) NAME=$2;; esac;'
        f" shift; done\n{script}\n"
    )
    python.chmod(0o755)
    place = ServerSpec(
        python=str(python), folder=tmp_path / "f", log=tmp_path / "logs/server.log", environment=dict(os.environ)
    )

    def options(boot: Boot) -> dict[str, Option]:
        return {"port": boot.port, "served-model-name": boot.name, "config": str(boot.secrets)}

    return SglangServer(place, tmp_path, options, on_exit, tell)


def answering(tmp_path: Path, name: str = "$NAME") -> str:
    """It ends once there is a file `end`, and after a minute."""
    (tmp_path / "answers.py").write_text(ANSWERS)
    return f'exec {sys.executable} {tmp_path / "answers.py"} "$PORT" "{name}" {tmp_path / "end"}'


async def until(condition: Callable[[], bool], limit_s: float = WAIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 what it looks at tells nobody
            await asyncio.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_server_that_dies_at_once_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    server = stand_in(tmp_path, "echo starting; echo no such model >&2; exit 3")
    with pytest.raises(ServerDied, match=r"exit status 3; its last lines: starting \| no such model"):
        await server.start(WAIT_S)
    assert server.pid == 0
    assert not (tmp_path / "f").exists()


async def test_a_server_that_never_answers_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids, log = tmp_path / "pids", tmp_path / "logs/server.log"
    server = stand_in(tmp_path, f"echo $$ > {pids}; (setsid sleep 600 & echo $! >> {pids}); echo thinking; sleep 600")
    start = asyncio.create_task(server.start(600.0))
    await until(lambda: log.exists() and "thinking" in log.read_text())
    # Its time is over as soon as it has said something.
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 600.0)
    monkeypatch.setattr("relax_rt.roles.rollout.engines.sglang.server.time", clock)
    with pytest.raises(DeadlineExceeded, match=r"no answer within 600 s; its last lines: thinking"):
        await start
    assert not any(alive(int(pid)) for pid in pids.read_text().split())


async def test_another_port_is_tried_if_one_is_taken(tmp_path: Path) -> None:
    tries = tmp_path / "tries"
    taken = f'echo "$PORT" >> {tries}; [ $(wc -l < {tries}) -lt 3 ] && {{ echo "Address already in use"; exit 1; }}; '
    server = stand_in(tmp_path, taken + answering(tmp_path))
    await server.start(WAIT_S)
    ports = tries.read_text().split()
    assert len(ports) == 3 and len(set(ports)) > 1, "the kernel may choose one twice"
    await server.stop()


async def test_a_foreign_server_at_the_port_is_refused(tmp_path: Path) -> None:
    server = stand_in(tmp_path, answering(tmp_path, name="another"))
    with pytest.raises(ProtocolError, match="another server answers"):
        await server.start(WAIT_S)
    assert server.pid == 0


async def test_a_key_is_never_taken_for_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("secrets.token_bytes", lambda nbytes=None: b"\xfb" * (nbytes or 32))  # "-_v7…" in base64
    server = stand_in(tmp_path, answering(tmp_path))
    await server.start(WAIT_S)
    given = (tmp_path / "f/key.yaml").read_text()
    await server.stop()
    assert "api-key" in given and not given.split(":")[1].strip(" \n'\"").startswith("-"), given


async def test_an_unrequested_exit_is_reported_once(tmp_path: Path) -> None:
    told: list[RelaxError] = []
    server = stand_in(tmp_path, answering(tmp_path), told.append)
    await server.start(WAIT_S)
    key = (tmp_path / "f/key.yaml").stat()
    assert key.st_mode & 0o777 == 0o600
    (tmp_path / "end").touch()
    await until(lambda: bool(told))
    assert "exit status 7; its last lines: serving | out of cheese" in str(told[0])
    await server.stop()
    assert len(told) == 1


CRASH = """\
[2026-11-21 22:01:02] Received 3 requests
[2026-11-21 22:01:07] Subprocess scheduler_0 (pid=4711) crashed with exit code -9. Triggering SIGQUIT for cleanup...
[2026-11-21 22:01:07] SIGQUIT received. signum=3, frame=<frame>. It usually means one child failed.
"""
RAISED = """\
[2026-11-21 22:01:02] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/scheduler.py", line 1, in run
    raise ValueError
ValueError: there is no Qwen3ForNobody

Traceback (most recent call last):
  File "/x/engine.py", line 2, in launch
RuntimeError: Initialization failed. Please see the error messages above.
"""


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (CRASH, "its scheduler_0 was killed by SIGKILL; exit status 3"),
        (CRASH.replace("-9", "1"), "its scheduler_0 ended with exit code 1; exit status 3"),
        (RAISED, "ValueError: there is no Qwen3ForNobody; exit status 3; its last lines: "),
        ("", "exit status 3; its last lines: none"),
    ],
)
async def test_the_cause_of_a_servers_end_comes_first_and_once(tmp_path: Path, said: str, told: str) -> None:
    (tmp_path / "said").write_text(said)
    server = stand_in(tmp_path, f"cat {tmp_path / 'said'}; exit 3")
    with pytest.raises(ServerDied) as caught:
        await server.start(WAIT_S)
    assert caught.value.why.startswith(told), caught.value.why
    assert caught.value.why.count(told.partition(";")[0]) == 1


async def test_an_error_of_a_living_server_keeps_its_reason_first(tmp_path: Path) -> None:
    """An exception in its log may be of long ago."""
    server = stand_in(tmp_path, answering(tmp_path))
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/server.log").write_text(RAISED)
    told = server.explain(DeadlineExceeded("a token", why="none within 90 s"))
    assert isinstance(told, DeadlineExceeded)
    assert told.why.startswith("none within 90 s; its last lines: ") and "Nobody" in told.why
    assert "server.log" in told.hint


def log_of(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir(exist_ok=True)
    return tmp_path / "logs/server.log"


async def test_an_earlier_servers_end_is_not_ascribed_to_its_successor(tmp_path: Path) -> None:
    """One log is written by all servers of a slot."""
    log, late = log_of(tmp_path), DeadlineExceeded("a token", why="none within 20 s")
    log.write_text(CRASH)
    server = stand_in(tmp_path, answering(tmp_path))
    await server.start(WAIT_S)
    try:
        assert server.explain(late).why == "none within 20 s; its last lines: serving"
        (child,) = procfs.descendants(server.pid)
        with log.open("a") as file:
            file.write(CRASH)  # of a process that is none of this server's: its predecessor's guard was late
        assert server.explain(late).why.startswith("none within 20 s; its last lines: serving")
        with log.open("a") as file:
            assert server.crashed() is None
            file.write(CRASH.replace("4711", str(child)))
        assert str(server.crashed()).startswith("the SGLang server ended: its scheduler_0 was killed by SIGKILL")
        assert server.explain(late).why == "its scheduler_0 was killed by SIGKILL; none within 20 s"
    finally:
        await server.stop()


def test_the_tail_is_found_in_a_rotated_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = RotatingLog(path, 1000)
    log.write(b"before\n" * 50)
    since = log_position(path)
    assert read_tail(path, since) == []
    log.write(b"first of ours\n")
    assert read_tail(path, since) == ["first of ours"]
    log.write(b"x" * 700 + b"\n")
    log.write(b"after\n")
    assert read_tail(path, since)[-1] == "after" and "before" not in read_tail(path, since)
    assert (tmp_path / "log.1").exists()
    log.close()
    assert read_tail(tmp_path / "none", log_position(tmp_path / "none")) == []


ORPHAN = """
import os, signal, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; name = 'multiprocessing.resource_tracker'; time.sleep(600)"])
"""


async def test_an_exit_is_reported_before_the_cleanup(tmp_path: Path) -> None:
    """multiprocessing's trackers may end by themselves: the guard gives them seconds."""
    told: list[bool] = []
    (tmp_path / "orphan.py").write_text(ORPHAN)
    server = stand_in(
        tmp_path,
        f"{sys.executable} {tmp_path / 'orphan.py'}; {answering(tmp_path)}",
        lambda error: told.append(alive(server.pid)),
    )
    await server.start(WAIT_S)
    child = next(pid for pid in procfs.descendants(server.pid) if b"answers.py" in cmdline(pid))
    os.kill(child, signal.SIGKILL)
    await until(lambda: bool(told))
    assert told[0], "the guard cleans up still"
    await server.stop()
    assert len(told) == 1


async def test_a_guard_that_is_killed_is_the_end_of_its_server(tmp_path: Path) -> None:
    told: list[RelaxError] = []
    server = stand_in(tmp_path, answering(tmp_path), told.append)
    await server.start(WAIT_S)
    os.kill(server.pid, signal.SIGKILL)
    await until(lambda: bool(told))
    assert isinstance(told[0], ServerDied)
    await server.stop()


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


async def test_a_start_reports_its_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("relax_rt.roles.rollout.engines.sglang.server.REPORT_EVERY_S", 0.05)
    server = stand_in(tmp_path, "sleep 600", tell=said.append)
    start = asyncio.create_task(server.start(600.0))
    await until(lambda: len(said) > 2)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert said[0] == "starting its SGLang server, 0 s of 600 s"
    told = len(said)
    await asyncio.sleep(0.2)
    assert len(said) == told, "no word of a start that is over"


async def test_wait_for_exit_returns_at_the_exit_or_its_timeout(tmp_path: Path) -> None:
    ended: list[RelaxError] = []
    server = stand_in(tmp_path, answering(tmp_path), ended.append)
    await server.start(WAIT_S)
    await server.wait_for_exit(0.01)
    assert not ended
    (tmp_path / "end").touch()
    await server.wait_for_exit(WAIT_S)
    assert len(ended) == 1
    await server.stop()


async def test_the_guard_is_not_killed_as_an_orphan_of_a_dead_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cleans up after the server; without it the server's own processes would come to the agent."""
    monkeypatch.setenv("RELAX_SLOT", "rollout/0")
    monkeypatch.setenv("RELAX_EPOCH", "7")
    named = await asyncio.to_thread(subprocess.Popen, ["sleep", "600"])
    server = stand_in(tmp_path, answering(tmp_path))
    await server.start(WAIT_S)
    try:
        await asyncio.to_thread(procfs.kill_orphans, ["RELAX_SLOT=rollout/0", "RELAX_EPOCH=7"])
        assert await asyncio.to_thread(named.wait, WAIT_S) == -signal.SIGKILL and alive(server.pid)
        os.kill(server.pid, signal.SIGQUIT)
        answer = await server.client.call("/model_info", timeout_s=WAIT_S)
        assert answer["served_model_name"] and alive(server.pid)
    finally:
        named.kill()
        named.wait()
        await server.stop()


BOOT = Boot(model=Path("/m"), port=1, name="n", secrets=Path("/k.yaml"))


def test_options_by_device() -> None:
    table = EngineSettings.model_validate({"engine": "sglang", "memory_fraction": 0.7, "max_sequences": 9})
    cpu, cuda = (server_options(table, device, BOOT, kv_tokens=123, context=512) for device in ("cpu", "cuda"))
    assert (cpu["device"], cpu["max-total-tokens"]) == ("cpu", 123)
    assert (cuda["mem-fraction-static"], cuda["max-running-requests"]) == (0.7, 9)
    assert cpu["context-length"] == cuda["context-length"] == 512 + RESERVED_POSITIONS
    assert "device" not in cuda and "max-total-tokens" not in cuda
    assert as_arguments({"a": True, "b": False, "c": 1.5}) == ["--a", "--c", "1.5"]


def test_the_users_options_override_all_but_reserved_ones() -> None:
    def options(**arguments: object) -> dict[str, Option]:
        table = EngineSettings.model_validate({"sglang": {"arguments": arguments}})
        return server_options(table, "cpu", BOOT, kv_tokens=1, context=512)

    assert options(log_level="info")["log-level"] == "info"
    with pytest.raises(Refused, match="api-key"):
        options(api_key="x")


def test_the_servers_environment_lacks_the_roles_own_variables() -> None:
    base = {"RELAX_RUN_ID": "r", "RELAX_CONTROL_FD": "7", "PYTHONPATH": "/role", "VIRTUAL_ENV": "/v", "HOME": "/h"}
    cpu = server_environment("cpu", 2, Path("/t"), base)
    assert cpu.keys() >= {"RELAX_RUN_ID", "HOME"} and not cpu.keys() & {"RELAX_CONTROL_FD", "VIRTUAL_ENV"}
    assert Path(cpu["PYTHONPATH"], "sitecustomize.py").exists()
    assert server_environment("cuda", 2, Path("/t"), base)["PYTHONPATH"] == "/role"


def with_sglang(tmp_path: Path, saver: str = "0.0.9") -> Path:
    python = tmp_path / "with"
    python.write_text(f"#!/bin/sh\necho {SUPPORTED} 2.13.0 5.19.0 {saver} 3.11\n")
    python.chmod(0o755)
    return python


def problems(python: Path | str, mode: str = "asynchronous", **table: object) -> list[Problem]:
    rollout = EngineSettings.model_validate({"engine": "sglang", "sglang": {"python": str(python), **table}})
    config = RLConfig.model_construct(
        roles={"rollout": rollout},
        supervision=SupervisionTable(start_timeout_s=600),
        algorithm=AlgorithmTable.model_construct(mode=mode),
    )
    return list(check_sglang(config, Path("/")))


def several_ranks(python: Path) -> list[Problem]:
    table = {"engine": "sglang", "tensor_parallel": 2, "sglang": {"python": str(python), "device": "cpu"}}
    roles = {"rollout": EngineSettings.model_validate(table)}
    supervision = SupervisionTable(start_timeout_s=600)
    config = RLConfig.model_construct(roles=roles, supervision=supervision, algorithm=AlgorithmTable())
    return list(check_sglang(config, Path("/")))


def test_validate_queries_the_interpreter(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no good >&2; exit 1\n")
    broken.chmod(0o755)
    without = tmp_path / "without"
    without.write_text("#!/bin/sh\necho - 2.13.0 5.19.0 - 3.11\n")
    without.chmod(0o755)
    for python, why in (
        (tmp_path / "none", "there is no interpreter"),
        (broken, "does not run: no good"),
        (without, "has no sglang"),
    ):
        (found,) = problems(python, device="cpu")
        assert why in found.message
        assert found.path == ("roles", "rollout", "sglang", "python")
        assert "make sglang-cpu-env" in found.hint
    (found,) = problems(with_sglang(tmp_path), device="cpu", arguments={"port": 1})
    assert "port" in found.message
    (found,) = problems(with_sglang(tmp_path), device="cpu", boot_timeout_s=600)
    assert "not below the role's start_timeout_s = 600" in found.message
    (found,) = several_ranks(with_sglang(tmp_path))
    assert found.path == ("roles", "rollout", "tensor_parallel") and "cannot be verified" in found.message
    # A real one answers the question that is put to it.
    version, why, _ = query_interpreter(sys.executable)
    assert (version, why) in (("-", f"{sys.executable} has no sglang"), (SUPPORTED, ""))


def test_options_that_the_interpreters_sglang_does_not_know_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python, calls = tmp_path / "tells", tmp_path / "calls"

    def telling(answer: str) -> Path:
        script = f'case "$*" in *add_cli_args*) echo asked >> {calls}; {answer};; *) echo {SUPPORTED} 2 5 - 3.11;; esac'
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
        return python

    tells = telling("""echo noise; echo '["attention-backend", "mem-fraction-static"]'""")
    assert not problems(tells, device="cpu") and not calls.exists(), "its import takes seconds"
    assert not problems(tells, device="cpu", arguments={"attention-backend": "fa3"})
    calls.unlink()
    first, second = problems(tells, device="cpu", arguments={"atention-backend": "fa3", "nonsense": 2})
    assert first.path == ("roles", "rollout", "sglang", "arguments", "atention-backend")
    assert first.message == f"sglang {SUPPORTED} has no option 'atention-backend'"
    assert first.hint == "did you mean 'attention-backend'?" and "--help" in second.hint
    assert calls.read_text() == "asked\n"
    capsys.readouterr()
    for silent in ("exit 3", "echo no JSON", "true"):
        assert not problems(telling(silent), device="cpu", arguments={"nonsense": 2})
        assert "sglang.arguments are not checked" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["attention_backend", "--attention-backend"])
def test_an_options_name_has_dashes(name: str) -> None:
    rollout = EngineSettings.model_validate({"engine": "sglang", "sglang": {"arguments": {name: "fa3"}}})
    (found,) = check_engines(RLConfig.model_construct(roles={"rollout": rollout}))
    assert found.path[-1] == name and found.hint == "did you mean 'attention-backend'?"


def test_a_server_on_a_shared_device_can_release_memory(tmp_path: Path) -> None:
    table = EngineSettings.model_validate({"engine": "sglang"})
    for device, shares in (("cuda", True), ("cuda", False), ("cpu", True)):
        options = server_options(table, device, BOOT, kv_tokens=1, context=512, shares=shares)  # type: ignore[arg-type]
        assert ("enable-memory-saver" in options) == (device == "cuda" and shares)
    with pytest.raises(Refused, match="enable-memory-saver"):
        user_options({"enable_memory_saver": False})
    for saver, mode, told in (("-", "hybrid", 1), ("0.0.9", "hybrid", 0), ("-", "asynchronous", 0)):
        found = problems(with_sglang(tmp_path, saver), mode, device="cuda")
        assert len([problem for problem in found if "torch_memory_saver" in problem.message]) == told
    assert not problems(with_sglang(tmp_path, "-"), "hybrid", device="cpu")


def test_weights_in_requests_need_torch_in_the_roles_own_interpreter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, python = importlib.util.find_spec, with_sglang(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert not problems(python, device="cpu")
    for weights in ("tensor", "handles"):
        (found,) = problems(python, device="cpu", weights=weights)
        assert found.path[-1] == "weights" and "needs torch" in found.message


def test_an_interpreters_path_starts_from_the_config(tmp_path: Path) -> None:
    assert interpreter(None, tmp_path, "/own", {}) == "/own"
    made = tmp_path / ".venv-sglang/bin/python"
    made.parent.mkdir(parents=True)
    made.touch()
    folder = tmp_path / "configs/mine"
    assert interpreter(None, folder, "/own", {}) == interpreter(None, tmp_path, "/own", {}) == str(made)
    assert interpreter(None, folder, "/own", {"RELAX_SGLANG_PYTHON": "/named"}) == "/named"
    assert interpreter("/said", folder, "/own", {"RELAX_SGLANG_PYTHON": "/named"}) == "/said"
    assert interpreter("../v/bin/python", tmp_path, "/own") == str(tmp_path.parent / "v/bin/python")
    assert interpreter("python3.12", tmp_path, "/own") == "python3.12"
