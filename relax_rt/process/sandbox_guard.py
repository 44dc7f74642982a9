"""The guard process of a sandbox or a worker: starts one program, enforces its limits, and kills all of its processes.

Its order is one line of JSON on standard input. End of file there means that the owner is gone: the guard then kills
everything. Its report of the program's end is one line of JSON on standard output.

Two levels. `namespaces`: a pid namespace in which the guard's child is pid 1, so that the kernel ends all processes
with it; untrusted programs also have no network and a private root. Bubblewrap may have created all that, with the
guard as pid 1. `limits`: resource limits, a folder of its own, and a guard that, as a subreaper, finds every descendant
and kills until none is left.

Standard library only: it starts in about 30 ms, and user code never runs in it.
"""

from __future__ import annotations

import base64
import json
import os
import platform
import select
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from relax_rt.process import procfs, sandbox_layout, sandbox_setup

CONTROL, REPORT = 0, 1
TICK_S = 0.05
PATIENCE_S = 10.0
"""Time for killed processes to disappear."""
PAGE = os.sysconf("SC_PAGE_SIZE")
MIB = 1 << 20
COUNTED_SINCE = (5, 14)
"""Linux counts the processes of a user namespace for itself from here on."""
LOG_BURST_BYTES, LOG_BYTES_PER_S = 256 << 10, 16 << 10
"""A worker's output is passed on to the log up to this burst and this rate; the rest is dropped."""


def main() -> None:
    """Entry point."""
    os.set_blocking(CONTROL, True)
    order = json.loads(_line(CONTROL))
    try:
        if order["level"] == "limits":
            code = _limits(order)
        else:
            # Workers always use our own namespaces: their orders name no backend.
            code = _in_bubblewrap(order) if order.get("backend") == "bubblewrap" else _namespaces(order)
    except OSError as error:
        _report({"refused": str(error)})
        code = 1
    sys.stdout.flush()
    os._exit(code)


def _line(fd: int) -> bytes:
    parts: list[bytes] = []
    while not parts or not parts[-1].endswith(b"\n"):
        part = os.read(fd, 1 << 16)
        if not part:
            os._exit(1)
        parts.append(part)
    return b"".join(parts)


def _report(what: dict[str, Any]) -> None:
    data = json.dumps(what).encode() + b"\n"
    try:
        while data:
            data = data[os.write(REPORT, data) :]
    except OSError:
        return  # the owner is gone


def _namespaces(order: dict[str, Any]) -> int:
    """Fork pid 1 of the new namespaces and wait for its end from outside."""
    sandbox_setup.enter_namespaces(order["kind"])
    life, ours = os.pipe()
    inside = os.fork()
    if inside == 0:
        os.close(ours)
        os._exit(_init_process(order, life))
    for fd in (life, *order.get("fds", ())):
        os.close(fd)
    pidfd = os.pidfd_open(inside)
    poller = select.poll()
    poller.register(CONTROL, select.POLLIN)
    poller.register(pidfd, select.POLLIN)
    while not (ready := {fd for fd, _ in poller.poll()}) & {pidfd}:
        if CONTROL in ready and not os.read(CONTROL, 1 << 16):
            os.kill(inside, signal.SIGKILL)
            poller.unregister(CONTROL)
    # The kernel ends pid 1 only after all other processes of its namespace.
    _, status = os.waitpid(inside, 0)
    return os.waitstatus_to_exitcode(status) & 0xFF


def _init_process(order: dict[str, Any], life: int) -> int:
    try:
        procfs.prctl(procfs.PR_SET_PDEATHSIG, signal.SIGKILL)
        if order["kind"] == "code":
            sandbox_setup.own_root(sandbox_layout.ExposedPaths(*order["shown"]), order["limits"]["disk_mib"])
            if os.geteuid() != 0:
                sandbox_setup.forbid_user_namespaces()
            folder = sandbox_layout.HOME
        else:
            sandbox_setup.mount_own_proc()
            folder = order["folder"]
        procfs.prctl(sandbox_setup.PR_SET_DUMPABLE, 0)
        return Watch(order, folder, _all_but_us, _kill_all_but_us, alone=True, ends=(CONTROL, life)).run()
    except OSError as error:
        _report({"refused": str(error)})
        return 1


def _in_bubblewrap(order: dict[str, Any]) -> int:
    """Run as pid 1 of the namespaces that bubblewrap created (see sandbox.bubblewrap_argv)."""
    if os.getpid() != 1:
        raise OSError("bubblewrap gave the guard no process namespace")
    if os.geteuid() == 0:
        sandbox_setup.mount_proc()
    procfs.prctl(sandbox_setup.PR_SET_DUMPABLE, 0)
    return Watch(order, sandbox_layout.HOME, _all_but_us, _kill_all_but_us, alone=True, ends=(CONTROL,)).run()


def _all_but_us() -> list[int]:
    return [pid for pid in procfs.pids() if pid != 1]


def _kill_all_but_us() -> None:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        try:
            os.kill(-1, signal.SIGKILL)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except (ProcessLookupError, ChildProcessError):
            return
        time.sleep(0.002)


def _limits(order: dict[str, Any]) -> int:
    """Without namespaces: adopt orphaned descendants as a subreaper, in a folder of the sandbox's own."""
    procfs.become_subreaper()
    own = order["kind"] == "code"
    folder = tempfile.mkdtemp(prefix=order["prefix"]) if own else order["folder"]
    try:
        Path(folder).chmod(0o777) if own else None
        return Watch(
            order,
            folder,
            lambda: list(procfs.descendants(os.getpid())),
            lambda: procfs.kill_descendants(PATIENCE_S),
            alone=False,
            ends=(CONTROL,),
        ).run()
    finally:
        if own:
            shutil.rmtree(folder, ignore_errors=True)


class _PathClosed(Exception):
    """The program's user may not read its interpreter.

    Attributes:
        path: the folder or file that is closed.
    """

    def __init__(self, path: str) -> None:
        mode = stat.S_IMODE(os.lstat(path).st_mode)
        user = "nobody" if os.geteuid() == sandbox_setup.NOBODY else os.geteuid()
        super().__init__(f"{path} (mode {mode:04o}) is closed to user {user}, as whom sandboxed programs run")
        self.path = path


class Watch:
    """Runs the program of an order and enforces its limits until it ends.

    Args:
        census: returns every living process of the sandbox.
        kill: kills them all.
        alone: in namespaces of its own.
        ends: descriptors whose end of file means that the owner is gone.
    """

    def __init__(
        self,
        order: dict[str, Any],
        folder: str,
        census: Callable[[], list[int]],
        kill: Callable[[], None],
        *,
        alone: bool,
        ends: tuple[int, ...],
    ) -> None:
        self.order, self.folder, self.census, self.kill, self.alone = order, folder, census, kill, alone
        self.limits: dict[str, Any] = order["limits"]
        self.worker = order["kind"] == "worker"
        self.poller = select.poll()
        self.ends = ends
        for fd in ends:
            self.poller.register(fd, select.POLLIN)
        self.texts = {"stdout": bytearray(), "stderr": bytearray()}
        self.names: dict[int, str] = {}
        self.allowance, self.allowed_at, self.silenced = float(LOG_BURST_BYTES), time.monotonic(), False

    def run(self) -> int:
        """Start the program, wait for its end or a reason to kill it, clean up, report; return the guard's status."""
        began = time.monotonic()
        program = self._start()
        if program is None:
            return 1
        reason = ""
        pidfd = os.pidfd_open(program)
        self.poller.register(pidfd, select.POLLIN)
        wall_s = self.limits.get("wall_s")
        status = None
        while not reason and status is None:
            ready = {fd for fd, _ in self.poller.poll(TICK_S * 1000 * (4 if self.worker else 1))}
            for fd in ready & self.names.keys():
                self._drain(fd)
                reason = self._too_much() or reason
            if any(fd in ready and not os.read(fd, 1 << 12) for fd in self.ends):
                reason = "unwanted"
            status = self._reap(program)
            if status is None and not reason:
                late = wall_s is not None and time.monotonic() - began > wall_s
                reason = "time" if late else self._over()
        self.kill()
        for fd in list(self.names):
            while self._drain(fd):
                pass
        reason = reason or self._too_much()
        if reason != "unwanted":
            code = None if status is None else os.waitstatus_to_exitcode(status)
            output = {name: base64.b64encode(text).decode() for name, text in self.texts.items()}
            _report({"ended": reason, "code": code, "seconds": round(time.monotonic() - began, 4), **output})
        return 0

    def _start(self) -> int | None:
        out, out_end = os.pipe()
        error, error_end = os.pipe()
        failed, failed_end = os.pipe()
        source = os.memfd_create("stdin")
        with open(source, "wb", closefd=False) as file:
            file.write(self.order.get("stdin", "").encode())
        os.lseek(source, 0, os.SEEK_SET)
        for name, text in self.order.get("files", {}).items():
            path = Path(self.folder, name)
            path.write_text(text)
            path.chmod(0o644)
        pid = os.fork()
        if pid == 0:
            self._become(source, out_end, error_end, failed_end)
        for fd in (out_end, error_end, failed_end, source, *self.order.get("fds", ())):
            os.close(fd)
        # Closed by exec.
        text = os.read(failed, 4096).decode(errors="replace")
        os.close(failed)
        if text:
            os.waitpid(pid, 0)
            self.kill()
            closed, _, why = text.partition("\0")
            _report({"refused": why, "closed": closed})
            return None
        for fd, name in ((out, "stdout"), (error, "stderr")):
            os.set_blocking(fd, False)
            self.poller.register(fd, select.POLLIN)
            self.names[fd] = name
        if self.worker:
            _report({"started": self.order["level"]})
        return pid

    def _become(self, source: int, out: int, error: int, failed: int) -> NoReturn:
        """In the child: drop rights, set limits and exec the program."""
        try:
            keep = [*self.order.get("fds", ())]
            os.setsid()
            for fd, place in ((source, 0), (out, 1), (error, 2)):
                os.dup2(fd, place)
            kept = {*keep, failed}
            for fd in sorted({int(entry.name) for entry in Path("/proc/self/fd").iterdir()} - {0, 1, 2} - kept):
                try:
                    os.close(fd)
                except OSError:
                    continue  # that of the listing itself
            for fd in keep:
                os.set_inheritable(fd, True)
            os.umask(0o022)
            os.chdir(self.folder)
            env = dict(self.order["env"])
            limits = {**self.limits}
            if not self.worker:
                env.update(HOME=self.folder, TMPDIR=self.folder)
                sandbox_setup.drop_rights(os.geteuid() == 0, alone=self.alone)
            limits["nproc"] = self._process_limit()
            sandbox_setup.set_rlimits(limits)
            argv = self.order["argv"]
            self._refuse_closed(sure=Path(argv[0]).is_absolute())
            try:
                os.execvpe(argv[0], argv, env)
            except PermissionError:
                self._refuse_closed(sure=True)
                raise
        except _PathClosed as problem:
            os.write(failed, f"{problem.path}\0{problem}".encode(errors="replace")[:4096])
        except BaseException as problem:  # noqa: BLE001 - the parent reports it, whatever it is
            os.write(failed, f"\0{type(problem).__name__}: {problem}"[:1000].encode())
        os._exit(127)

    def _refuse_closed(self, *, sure: bool) -> None:
        """Raise if the program's user may not read what it needs. `sure`: PATH has no other candidate."""
        if sure and (closed := sandbox_layout.first_closed(self.order.get("needed", ()))):
            raise _PathClosed(closed)

    def _process_limit(self) -> int | None:
        """Return RLIMIT_NPROC, which slows a fork bomb down until the guard, which counts, kills it.

        The kernel counts processes per user: of this sandbox alone in a user namespace of its own, else of all
        sandboxes side by side, which therefore need room for each other.
        """
        numbers = tuple(int(part) for part in platform.release().split("-")[0].split(".")[:2] if part.isdigit())
        most = int(self.limits["processes"])
        if os.geteuid() == 0 or (self.alone and numbers < COUNTED_SINCE):
            return None
        return most + 2 if self.alone else most * 4 + _tasks_of(os.geteuid())

    def _reap(self, program: int) -> int | None:
        """Reap dead children; return the program's status if it was among them."""
        found = None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return found
            if pid == 0:
                return found
            if pid == program:
                found = status

    def _over(self) -> str:
        """Return the limit that all processes together exceed, if any."""
        living = self.census()
        if len(living) > self.limits["processes"]:
            return "processes"
        if (most := self.limits.get("total_mib")) is not None and sum(map(_own_bytes, living)) > most * MIB:
            return "memory"
        if self.worker:
            return ""
        if not self.alone:
            return "disk" if _held(self.folder) > self.limits["disk_mib"] * MIB else ""
        # bubblewrap cannot bound the files of a file system in memory, and each takes the kernel's memory.
        for path in sandbox_layout.WRITABLE:
            found = os.statvfs(path)
            if found.f_files - found.f_ffree > sandbox_layout.INODES:
                return "files"
        return ""

    def _too_much(self) -> str:
        return "output" if not self.worker and self._room() < 0 else ""

    def _room(self) -> int:
        return (int(self.limits["output_kib"]) << 10) - sum(map(len, self.texts.values()))

    def _drain(self, fd: int) -> bool:
        """Read once; return whether there may be more."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if not data:
            self.poller.unregister(fd)
            del self.names[fd]
            return False
        if self.worker:
            self._pass_on(data)
            return True
        # One byte beyond the limit records that there was more.
        self.texts[self.names[fd]] += data[: max(0, self._room() + 1)]
        return self._room() >= 0

    def _pass_on(self, data: bytes) -> None:
        now = time.monotonic()
        self.allowance = min(LOG_BURST_BYTES, self.allowance + (now - self.allowed_at) * LOG_BYTES_PER_S)
        self.allowed_at = now
        if self.silenced and self.allowance < LOG_BURST_BYTES / 16:
            return
        part = data[: int(self.allowance)]
        self.allowance -= len(part)
        self.silenced = len(part) < len(data)
        if self.silenced:
            part += b"\n[a worker prints too much: some output was dropped]\n"
        try:
            os.write(2, part)
        except OSError:
            return  # the log is closed


def _tasks_of(user: int) -> int:
    """Count the processes and threads of a user on this machine."""
    total = 0
    for pid in procfs.pids():
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:
            continue
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        if int(fields["Uid"].split()[1]) == user:
            total += int(fields["Threads"])
    return total


def _own_bytes(pid: int) -> int:
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * PAGE


def _held(folder: str) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(Path(where, name)).st_blocks * 512
            except OSError:
                continue
    return total


if __name__ == "__main__":
    main()
