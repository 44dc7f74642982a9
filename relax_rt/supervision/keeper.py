"""The keeper: a tiny process above the agent that cleans up after it, however the agent ends.

``python -m relax_rt.supervision.keeper --run-id I --run-dir D -- <agent's command>`` starts the agent in a session
of its own, forwards SIGINT, SIGTERM, SIGHUP and SIGQUIT to it and ends with its exit status. As a subreaper it adopts
every orphan below it, so that after the agent's death it can kill all processes of the run.

With ``--watch PID`` it is the successor that the agent starts when its keeper dies: it watches the agent by pidfd.

Standard library only, so that it stays small and no code of the run can crash it.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

from relax_rt.process import procfs
from relax_rt.supervision.rundir import RunPaths, end_run

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
AWAITED = (*FORWARDED, signal.SIGCHLD)


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="relax_rt.supervision.keeper", description="Internal process of `relax-rt up`."
    )
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--watch", type=int, default=0, help="pid of an agent to watch instead of starting one")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    paths = RunPaths(options.run_id, options.run_dir)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return watch(paths, options.watch) if options.watch else keep(paths, command)


def keep(paths: RunPaths, command: list[str]) -> int:
    """Start the agent, wait for its end, clean up after it."""
    procfs.become_subreaper()
    # Blocked and waited for: a Python handler runs only after the system call that waits, which may never return.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    # A session of its own: Ctrl-C in the terminal reaches the keeper alone, which forwards it once. Descriptors stay
    # open, because the lock on the run directory is one of them.
    agent = subprocess.Popen(
        [*command, "--keeper-pid", str(os.getpid())], start_new_session=True, close_fds=False, preexec_fn=_unblock
    )

    status = _wait(agent.pid)
    agent.returncode = os.waitstatus_to_exitcode(status)
    # The clean-up must not be interrupted.
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    _unblock()
    end_run(paths, "keeper", _describe(agent.returncode))
    return agent.returncode if agent.returncode >= 0 else 128 - agent.returncode


def watch(paths: RunPaths, agent_pid: int) -> int:
    """Watch the agent, our parent; clean up after its end."""
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    try:
        pidfd = os.pidfd_open(agent_pid)
    except ProcessLookupError:
        pidfd = -1
    # While we are its child our parent's pid cannot be recycled.
    if pidfd >= 0 and os.getppid() == agent_pid:
        select.select([pidfd], [], [])
    end_run(paths, "keeper", "the agent ended; its keeper had been killed before")
    return 0


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, AWAITED)


def _wait(agent_pid: int) -> int:
    """Forward signals to the agent, and reap whatever dies below us until it is the agent."""
    while True:
        number = signal.sigwait(AWAITED)
        if number != signal.SIGCHLD:
            os.kill(agent_pid, number)  # not reaped yet, so the pid is still its own
            continue
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == agent_pid:
                return ended[1]


def _describe(code: int) -> str:
    return (
        f"the agent was ended by {signal.Signals(-code).name}" if code < 0 else f"the agent ended with exit code {code}"
    )


if __name__ == "__main__":
    sys.exit(main())
