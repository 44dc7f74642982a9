"""Code that nobody vouches for, in a box: whatever it does, it ends in time, reaches nothing and leaves nothing."""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from sandbox_leftovers import nothing_left, until_started

from relax_rt.process import sandbox, sandbox_layout
from relax_rt.process.sandbox import Sandbox, SandboxFailed, SandboxLimits, SandboxMode, SandboxResult, try_mode

SMALL = SandboxLimits(wall_s=20.0, memory_mib=256, disk_mib=4, processes=12, output_kib=64)
MODES = {
    "bubblewrap": SandboxMode("namespaces", backend="bubblewrap"),
    "built-in": SandboxMode("namespaces"),
    "limits": SandboxMode("limits"),
}


def works(kind: str) -> bool:
    """Whether boxes of a kind can be made here."""
    if kind == "bubblewrap" and sandbox.bubblewrap_missing():
        return False
    try:
        asyncio.run(try_mode(MODES[kind], [interpreter(kind)]))
    except SandboxFailed:
        return False
    return True


def interpreter(kind: str) -> str:
    """Ours; where root becomes nobody without a root of its own to show it, one that everybody may run."""
    system = Path("/usr/bin/python3")
    return str(system) if kind == "limits" and os.geteuid() == 0 and system.exists() else sys.executable


KINDS = [kind for kind in MODES if works(kind)]
CLOSED = [kind for kind in KINDS if kind != "limits"]
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs run as another user")


def shown_paths() -> list[str]:
    """What a box of this interpreter shows besides system folders."""
    shown = sandbox_layout.shown([sys.executable])
    return [*shown.folders, *(path for path, _ in shown.links), *sandbox.package_dirs()]


async def run(kind: str, program: str, limits: SandboxLimits = SMALL, **more: object) -> SandboxResult:
    """In a box of its own; then, that nothing of it is left."""
    word = secrets.token_hex(8)
    ran = await Sandbox(limits, MODES[kind]).run([interpreter(kind), "-I", "-S", "-c", program, word], **more)  # type: ignore[arg-type]
    nothing_left(word)
    return ran


def said(ran: SandboxResult) -> str:
    return (ran.stdout + ran.stderr).decode()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_program_has_its_files_and_its_input_and_says_what_it_says(kind: str) -> None:
    program = "import sys; print(sys.stdin.read(), open('data').read()); print('x', file=sys.stderr); sys.exit(3)"
    ran = await run(kind, program, files={"data": "file"}, stdin="input")
    assert (ran.stopped, ran.code, ran.stdout, ran.stderr) == ("", 3, b"input file\n", b"x\n")


SLEEP = "import time; time.sleep(600)"
FORKS = "import os\nwhile True:\n    os.fork()"
THREADS = """
import threading, time
for _ in range(400):
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
"""
IGNORES = """
import signal, time
for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
    signal.signal(number, signal.SIG_IGN)
time.sleep(600)
"""
MEMORY = "held = []\nwhile True:\n    held.append(bytearray(16 << 20))"
DISK = "with open('big', 'wb') as file:\n    while True:\n        file.write(bytes(1 << 20))"
FILES = """
import os
for number in range(64):
    with open(f'file-{number}', 'wb') as file:
        file.write(os.urandom(1 << 20))
import time; time.sleep(600)
"""
EMPTY_FILES = "for number in range(100_000):\n    open(f'file-{number}', 'w').close()\nimport time; time.sleep(600)"
PRINTS = "while True:\n    print('x' * 65536)"


@pytest.mark.parametrize("kind", [one if one in CLOSED else pytest.param(one, marks=pytest.mark.long) for one in KINDS])
@pytest.mark.parametrize(
    ("program", "wall_s", "words"),
    [
        (SLEEP, 0.4, "did not end within 0.4 s"),
        (IGNORES, 0.8, "did not end within"),
        (PRINTS, 20.0, "printed more than 64 KiB"),
        (DISK, 20.0, "No space left|File too large|wrote more than"),
        (FILES, 20.0, "No space left|wrote more than 4 MiB"),
        (MEMORY, 20.0, "MemoryError|took more than 256 MiB"),
        (FORKS, 20.0, "more than 12 processes|Resource temporarily unavailable"),
        (THREADS, 20.0, "start new thread|more than 12 processes|did not end"),
    ],
    ids=["sleeps", "ignores signals", "prints", "writes", "writes files", "allocates", "forks", "starts threads"],
)
async def test_what_takes_too_much_is_ended(kind: str, program: str, wall_s: float, words: str) -> None:
    ran = await run(kind, program, SandboxLimits(**{**vars_of(SMALL), "wall_s": wall_s}))
    assert ran.stopped or ran.code != 0
    assert any(one in ran.stopped + said(ran) for one in words.split("|")), (ran.stopped, said(ran)[-500:])
    # The next one runs.
    assert (await run(kind, "print('still here')")).stdout == b"still here\n"


def vars_of(limits: SandboxLimits) -> dict[str, object]:
    return {name: getattr(limits, name) for name in limits.__struct_fields__}


LEAVES = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in (0, 1, 2):
            os.close(fd)
        time.sleep(600)
    os._exit(0)
os.wait()
print('gone')
"""


@pytest.mark.parametrize("kind", KINDS)
async def test_what_slips_away_from_its_parent_ends_with_the_program(kind: str) -> None:
    ran = await run(kind, LEAVES)
    assert (ran.stopped, ran.code, ran.stdout) == ("", 0, b"gone\n")


@pytest.mark.parametrize("kind", KINDS)
async def test_it_has_no_rights_and_nothing_of_our_environment(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    program = """
import os
status = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)
print(os.getuid(), status['CapEff'], status['CapBnd'], status['NoNewPrivs'], sorted(os.environ))
"""
    ran = await run(kind, program)
    user, effective, bounding, no_new, names = ran.stdout.decode().split(maxsplit=4)
    assert int(user) != 0 and int(effective, 16) == 0 and no_new == "1"
    assert "MY_TOKEN" not in names
    assert kind == "limits" or int(bounding, 16) == 0


@pytest.mark.parametrize("kind", CLOSED)
async def test_it_sees_none_of_our_files_and_changes_none(kind: str, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ours.write_text("secret")
    program = f"""
import os
tries = [({str(ours)!r}, 'r'), ({str(ours)!r}, 'w'), ('/etc/new', 'w'), ('/usr/new', 'w'), ('/etc/shadow', 'r')]
for path, mode in tries:
    try:
        open(path, mode)
        print('opened', path)
    except OSError as error:
        print(type(error).__name__)
print(sorted(os.listdir('/')), sorted(os.listdir('/tmp')), [pid for pid in os.listdir('/proc') if pid.isdigit()])
"""
    ran = await run(kind, program)
    lines = ran.stdout.decode().splitlines()
    assert "opened" not in said(ran) and len(lines) == 6, said(ran)
    needed = {Path(path).relative_to("/tmp").parts[0] for path in shown_paths() if Path(path).is_relative_to("/tmp")}
    assert "home" not in lines[-1] and lines[-1].endswith(f"{sorted(needed)} ['1', '2']")
    assert ours.read_text() == "secret"


@pytest.mark.parametrize("kind", CLOSED)
async def test_it_has_no_network(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        program = f"import socket; socket.create_connection({address!r}, 2)"
        ran = await run(kind, program)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    # bubblewrap gives it a loopback device of its own, on which nobody listens.
    assert ran.code == 1 and ("OSError" in said(ran) or "ConnectionRefusedError" in said(ran))
    # Sockets without a name in the file system are of the network, too.
    hidden = f"\0relax-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(hidden)
        server.listen()
        ran = await run(kind, f"import socket; socket.socket(socket.AF_UNIX).connect({hidden!r})")
    assert "ConnectionRefusedError" in said(ran)


@pytest.mark.parametrize("kind", CLOSED)
async def test_it_gets_no_new_namespaces(kind: str) -> None:
    program = "import ctypes; print(ctypes.CDLL(None, use_errno=True).unshare(0x10000000), ctypes.get_errno())"
    ran = await Sandbox(SMALL, MODES[kind]).run([sys.executable, "-I", "-c", program])
    assert ran.stdout.startswith(b"-1 "), said(ran)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_run_that_is_called_off_leaves_nothing(kind: str) -> None:
    word = secrets.token_hex(8)
    argv = [interpreter(kind), "-I", "-S", "-c", SLEEP, word]
    task = asyncio.create_task(Sandbox(SMALL, MODES[kind]).run(argv))
    await asyncio.to_thread(until_started, word)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    nothing_left(word)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_program_that_is_not_there_is_no_verdict(kind: str) -> None:
    with pytest.raises(SandboxFailed, match=r"No such file|Permission denied"):
        await Sandbox(SMALL, MODES[kind]).run(["no-such-program"])


@pytest.mark.parametrize("kind", CLOSED)
async def test_the_number_of_files_is_bounded(kind: str) -> None:
    ran = await run(kind, EMPTY_FILES)
    assert ran.stopped or ran.code != 0
    assert "No space left" in said(ran) or "more than 4096 files" in ran.stopped, (ran.stopped, said(ran)[-500:])


# --- interpreters in places that are closed, hidden or linked to

PYTHON = Path("/usr/bin/python3")
system_python = pytest.mark.skipif(not PYTHON.exists(), reason="there is no Python that everybody may run")
HERE = "print('here', end='')"


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that everybody may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        Path(name).chmod(0o755)
        yield Path(name)


async def here(kind: str, program: Path) -> SandboxResult:
    return await Sandbox(SMALL, MODES[kind]).run([str(program), "-I", "-S", "-c", HERE])


@as_root
@system_python
@pytest.mark.parametrize(
    ("folder", "closes", "mode", "remedy"),
    [
        ("home/venv/bin", "home", 0o700, 0o711),
        ("home/venv/bin", "home/venv", 0o750, 0o755),
        ("home/venv/bin", "home/venv/bin", 0o700, 0o711),
        ("deep/er/bin", "deep", 0o000, 0o701),
        ("x/bin", "x/bin", 0o644, 0o755),
    ],
)
async def test_the_folder_that_is_closed_is_named_and_opening_it_helps(
    place: Path, folder: str, closes: str, mode: int, remedy: int
) -> None:
    program = place / folder / "python3"
    program.parent.mkdir(parents=True)
    program.symlink_to(PYTHON)
    closed_one = place / closes
    closed_one.chmod(mode)
    with pytest.raises(SandboxFailed) as refused:
        await here("limits", program)
    assert f"{closed_one} (mode {mode:04o}) is closed to user nobody" in refused.value.why
    closed_one.chmod(remedy)
    assert (await here("limits", program)).stdout == b"here"


@as_root
@system_python
@pytest.mark.parametrize("links", ["file", "folder", "relative", "two"])
async def test_a_closed_folder_behind_links_is_named(place: Path, links: str) -> None:
    real = place / "secret" / "py" / "bin" / "python3"
    real.parent.mkdir(parents=True)
    await asyncio.to_thread(shutil.copy, PYTHON, real)
    (place / "open").mkdir()
    program = place / "open" / "python3"
    if links == "folder":
        (place / "open" / "bin").symlink_to(real.parent)
        program = place / "open" / "bin" / "python3"
    elif links == "two":
        (place / "between").symlink_to(real)
        program.symlink_to(place / "between")
    else:
        program.symlink_to("../secret/py/bin/python3" if links == "relative" else real)
    (place / "secret").chmod(0o700)
    with pytest.raises(SandboxFailed, match=re.escape(f"{place}/secret (mode 0700) is closed to user nobody")):
        await here("limits", program)
    # Where the interpreter's folder is shown, it does not matter what lies above it.
    for kind in CLOSED:
        assert (await here(kind, program)).stdout == b"here", kind


@as_root
@pytest.mark.parametrize("kind", CLOSED)
async def test_an_executable_that_only_root_may_run_is_named(kind: str, place: Path) -> None:
    program = place / "tool" / "bin" / "python3"
    program.parent.mkdir(parents=True)
    await asyncio.to_thread(shutil.copy, sys.executable, program)
    program.chmod(0o700)
    with pytest.raises(SandboxFailed, match=re.escape(f"{program} (mode 0700) is closed to user nobody")):
        await here(kind, program)


@system_python
@pytest.mark.parametrize("kind", CLOSED)
@pytest.mark.parametrize("below", ["/tmp", "/dev/shm", "/var/tmp"])
async def test_an_interpreter_below_a_folder_of_the_boxs_own_is_shown(kind: str, below: str) -> None:
    with tempfile.TemporaryDirectory(dir=below) as name:
        venv = Path(name, "clone", ".venv")
        (venv / "bin").mkdir(parents=True)
        (venv / "pyvenv.cfg").write_text(f"home = {PYTHON.parent}\n")
        (venv / "bin" / "python3").symlink_to(PYTHON)
        (venv / "bin" / "python").symlink_to("python3")
        program = "import os, sys; open('/tmp/mine', 'w'); print(sys.prefix, os.access(sys.prefix, os.W_OK))"
        argv = [str(venv / "bin" / "python"), "-I", "-c", program]
        ran = await Sandbox(SMALL, MODES[kind]).run(argv)
    assert ran.stdout.decode() == f"{venv} False\n", said(ran)


@system_python
@pytest.mark.parametrize("kind", CLOSED)
async def test_what_lies_beside_a_link_to_the_interpreter_stays_hidden(
    kind: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(place))
    (place / "bin").mkdir()
    (place / "id_rsa").write_text("secret")
    (place / "bin" / "token").write_text("secret")
    (place / "bin" / "python3").symlink_to(PYTHON)
    (place / ".local" / "bin").mkdir(parents=True)
    tool = place / ".local" / "bin" / "tool"
    tool.write_text(f"#!{PYTHON} -I\nimport os; print(os.listdir({str(place / '.local')!r}))")
    tool.chmod(0o755)
    program = f"import os; print(os.listdir({str(place)!r}), os.listdir({str(place / 'bin')!r}))"
    ran = await Sandbox(SMALL, MODES[kind]).run([str(place / "bin" / "python3"), "-I", "-c", program])
    assert ran.stdout.decode() == "['bin'] ['python3']\n", said(ran)
    assert (await Sandbox(SMALL, MODES[kind]).run([str(tool)])).stdout.decode() == "['bin']\n"


@system_python
async def test_what_is_to_be_run_is_probed_and_not_this_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []

    async def record(
        box: Sandbox, argv: list[str], files: object = None, stdin: str = "", *, wall_s: float = 0.0
    ) -> SandboxResult:
        tried.append([box.mode.backend if box.mode.level == "namespaces" else "limits", argv[0]])
        return SandboxResult("", 0, b"here", b"", 0.0)

    monkeypatch.setattr(Sandbox, "run", record)
    for command in ([str(PYTHON), "-I"], ["bash"], []):
        await sandbox.probe(command)
    assert [one[1] for one in tried] == [str(PYTHON), "bash", sys.executable]
    with pytest.raises(SandboxFailed, match="no such program"):
        await sandbox.probe(["no-such-program"])


LIKE_A_CONTAINER = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"]
PROBE = """
import asyncio, json, sys
from relax_rt.process.sandbox import SandboxFailed, probe
try:
    mode = asyncio.run(probe(sys.argv[1:]))
    print(json.dumps([mode.level, str(mode), ""]))
except SandboxFailed as error:
    print(json.dumps(["", error.why, error.hint]))
"""


def probe_like_a_container(*command: str) -> list[str]:
    """What `probe` finds as root without the right to make namespaces: level, words, advice."""
    argv = [*LIKE_A_CONTAINER, sys.executable, "-c", PROBE, *command]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=True)
    return list(json.loads(done.stdout))


@as_root
@system_python
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv is not installed")
@pytest.mark.parametrize("name", ["home", "my home", "it's (mode 0700) is closed to user me", "a  b", " c", "é f"])
def test_without_namespaces_a_closed_interpreter_is_named_with_ways_that_help(place: Path, name: str) -> None:
    program = place / name / "bin" / "python3"
    program.parent.mkdir(parents=True)
    program.symlink_to(PYTHON)
    (place / name).chmod(0o700)
    level, why, advice = probe_like_a_container(str(program), "-I")
    assert level == "" and f"{place}/{name} (mode 0700) is closed to user nobody" in why and "not permitted" in why
    assert f"chmod o+x {shlex.quote(f'{place}/{name}')})" in advice and f'command = ["{PYTHON}"' in advice
    # Each of them helps.
    assert probe_like_a_container(str(PYTHON), "-I", "-B")[0] == "limits"
    (place / name).chmod(0o701)
    assert probe_like_a_container(str(program), "-I")[0] == "limits"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"user/max_user_namespaces": "0"}, "sysctl -w user.max_user_namespaces=10000"),
        ({"kernel/unprivileged_userns_clone": "0"}, "sysctl -w kernel.unprivileged_userns_clone=1"),
        ({"kernel/apparmor_restrict_unprivileged_userns": "1"}, "bubblewrap 0.8 or newer"),
        ({"user/max_user_namespaces": "63000"}, "docker run --privileged"),
        ({}, "docker run --privileged"),
    ],
)
def test_advice_goes_by_what_the_kernel_forbids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], words: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, value in settings.items():
        path = tmp_path / "proc/sys" / name
        path.parent.mkdir(parents=True)
        path.write_text(value + "\n")
    told = sandbox.advice(tmp_path)
    assert words in told and 'box = "limits"' in told


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "bubblewrap is not installed"),
        ("echo '--size --as-pid-1'", "older than 0.8: it has no --disable-userns"),
        ("exit 1", "older than 0.8"),
        ("echo '--disable-userns --size --as-pid-1'", ""),
        ("echo '--disable-userns --size --as-pid-1' >&2", ""),
    ],
)
def test_a_bubblewrap_that_lacks_what_boxes_need_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, words: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script is not None:
        (tmp_path / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bwrap").chmod(0o755)
    assert words in sandbox.bubblewrap_missing() if words else sandbox.bubblewrap_missing() == ""


async def test_a_bubblewrap_that_fails_is_said_and_the_next_way_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = [
        "#!/bin/sh",
        f'[ "$1" = --help ] && echo "{" ".join(sandbox.BUBBLEWRAP_OPTIONS)}" && exit',
        'echo "bwrap: setting up uid map: refused" >&2',
        "exit 1",
    ]
    (tmp_path / "bwrap").write_text("\n".join(refusing))
    (tmp_path / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxFailed, match="setting up uid map: refused"):
        await try_mode(MODES["bubblewrap"], [])
    if "built-in" in KINDS:
        assert await sandbox.probe() == SandboxMode("namespaces")
