"""Code that nobody vouches for, in a box: whatever it does, it ends in time, reaches nothing and leaves nothing."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import sys
from pathlib import Path

import pytest
from leftovers import nothing_left

from relax_rt.roles.rewards.box.run import Box, BoxFailed, Level, Limits, Mode, Ran, mode_here

SMALL = Limits(wall_s=20.0, memory_mib=256, disk_mib=4, processes=12, output_kib=64)


def level_here() -> Level:
    return asyncio.run(mode_here()).level


def interpreter(level: str) -> str:
    """Ours; where root becomes nobody without a root of its own to show it, one that everybody may run."""
    system = Path("/usr/bin/python3")
    return str(system) if level == "limits" and os.geteuid() == 0 and system.exists() else sys.executable


LEVELS = ["limits"] if level_here() == "limits" else ["namespaces", "limits"]
closed = pytest.mark.skipif("namespaces" not in LEVELS, reason="namespaces are not permitted here")


async def run(level: str, program: str, limits: Limits = SMALL, **more: object) -> Ran:
    """In a box of its own; then, that nothing of it is left."""
    word = secrets.token_hex(8)
    ran = await Box(limits, Mode(level)).run([interpreter(level), "-I", "-S", "-c", program, word], **more)  # type: ignore[arg-type]
    nothing_left(word)
    return ran


def said(ran: Ran) -> str:
    return (ran.stdout + ran.stderr).decode()


@pytest.mark.parametrize("level", LEVELS)
async def test_a_program_has_its_files_and_its_input_and_says_what_it_says(level: str) -> None:
    program = "import sys; print(sys.stdin.read(), open('data').read()); print('x', file=sys.stderr); sys.exit(3)"
    ran = await run(level, program, files={"data": "file"}, stdin="input")
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
PRINTS = "while True:\n    print('x' * 65536)"


@pytest.mark.parametrize("level", [LEVELS[0], *(pytest.param(one, marks=pytest.mark.long) for one in LEVELS[1:])])
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
async def test_what_takes_too_much_is_ended(level: str, program: str, wall_s: float, words: str) -> None:
    ran = await run(level, program, Limits(**{**vars_of(SMALL), "wall_s": wall_s}))
    assert ran.stopped or ran.code != 0
    assert any(one in ran.stopped + said(ran) for one in words.split("|")), (ran.stopped, said(ran)[-500:])
    # The next one runs.
    assert (await run(level, "print('still here')")).stdout == b"still here\n"


def vars_of(limits: Limits) -> dict[str, object]:
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


@pytest.mark.parametrize("level", LEVELS)
async def test_what_slips_away_from_its_parent_ends_with_the_program(level: str) -> None:
    ran = await run(level, LEAVES)
    assert (ran.stopped, ran.code, ran.stdout) == ("", 0, b"gone\n")


@pytest.mark.parametrize("level", LEVELS)
async def test_it_has_no_rights_and_nothing_of_our_environment(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    program = """
import os
status = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)
print(os.getuid(), status['CapEff'], status['CapBnd'], status['NoNewPrivs'], sorted(os.environ))
"""
    ran = await run(level, program)
    user, effective, bounding, no_new, names = ran.stdout.decode().split(maxsplit=4)
    assert int(user) != 0 and int(effective, 16) == 0 and no_new == "1"
    assert "MY_TOKEN" not in names
    assert level == "limits" or int(bounding, 16) == 0


@closed
async def test_it_sees_none_of_our_files_and_changes_none(tmp_path: Path) -> None:
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
print(sorted(os.listdir('/')), os.listdir('/tmp'), [pid for pid in os.listdir('/proc') if pid.isdigit()])
"""
    ran = await run("namespaces", program)
    lines = ran.stdout.decode().splitlines()
    assert "opened" not in said(ran) and len(lines) == 6, said(ran)
    assert "home" not in lines[-1] and lines[-1].endswith("[] ['1', '2']")
    assert ours.read_text() == "secret"


@closed
async def test_it_has_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        program = f"import socket; socket.create_connection({address!r}, 2)"
        ran = await run("namespaces", program)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert ran.code == 1 and "OSError" in said(ran)
    # Sockets without a name in the file system are of the network, too.
    hidden = f"\0relax-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(hidden)
        server.listen()
        ran = await run("namespaces", f"import socket; socket.socket(socket.AF_UNIX).connect({hidden!r})")
    assert "ConnectionRefusedError" in said(ran)


@closed
async def test_it_gets_no_new_namespaces() -> None:
    program = "import ctypes; print(ctypes.CDLL(None, use_errno=True).unshare(0x10000000), ctypes.get_errno())"
    ran = await Box(SMALL, Mode("namespaces")).run([sys.executable, "-I", "-c", program])
    assert ran.stdout.startswith(b"-1 "), said(ran)


@pytest.mark.parametrize("level", LEVELS)
async def test_a_run_that_is_called_off_leaves_nothing(level: str) -> None:
    word = secrets.token_hex(8)
    argv = [interpreter(level), "-I", "-S", "-c", SLEEP, word]
    task = asyncio.create_task(Box(SMALL, Mode(level)).run(argv))  # type: ignore[arg-type]
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    nothing_left(word)


@pytest.mark.parametrize("level", LEVELS)
async def test_a_program_that_is_not_there_is_no_verdict(level: str) -> None:
    with pytest.raises(BoxFailed, match=r"No such file|Permission denied"):
        await Box(SMALL, Mode(level)).run(["no-such-program"])  # type: ignore[arg-type]
