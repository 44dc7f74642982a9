"""The process of a joined node's agent: ``python -m relax_rt.cluster.nodes``, started by the keeper on that node."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import uvloop

from relax_rt.cluster.nodes.agent import NodeAgent
from relax_rt.cluster.nodes.seat import End, read_keys, read_seat, write_end
from relax_rt.config.loader import read_resolved
from relax_rt.observe.logs import open_log, setup_logging
from relax_rt.supervision.plan import plan_roles
from relax_rt.supervision.rundir import RESOLVED_CONFIG, RunPaths
from relax_rt.transport.rpc.errors import RelaxError

EXIT_CONFIG = 2


def main(argv: list[str] | None = None) -> int:
    """Run the agent; answers with the exit code."""
    parser = argparse.ArgumentParser(
        prog="relax_rt.cluster.nodes", description="Internal process of `relax-rt up --join`."
    )
    parser.add_argument("--run-id", required=True)
    parser.add_argument("--run-dir", required=True, type=Path)
    parser.add_argument("--keeper-pid", type=int, default=0)
    options = parser.parse_args(argv)
    paths = RunPaths(options.run_id, options.run_dir)
    paths.logs.mkdir(parents=True, exist_ok=True)
    with open_log(paths.log("agent")) as log:
        setup_logging(os.environ.get("RELAX_LOG_LEVEL", "info"), log)
        return run(paths, options.keeper_pid)


def run(paths: RunPaths, keeper_pid: int) -> int:
    """Take the seat that lies in the private directory, to its end."""
    taken = read_seat(paths)
    try:
        config = read_resolved(paths.run_dir / RESOLVED_CONFIG)
        plans = plan_roles(config, taken.joined.system)
    except RelaxError as error:
        # The head could read it: what is missing here is code.
        reason = f"this node cannot take part: {error}"
        write_end(paths.run_dir, End(seat=str(taken.joined.seat), over=True, exit_code=EXIT_CONFIG, reason=reason))
        return EXIT_CONFIG

    async def live() -> End:
        agent = NodeAgent(config, paths, plans, taken, read_keys(paths), keeper_pid=keeper_pid)
        return await agent.run()

    return uvloop.run(live()).exit_code


if __name__ == "__main__":
    sys.exit(main())
