"""Redraw the plots of a run and print its summary: ``python tools/plots.py RUN_DIR``.

Takes the run's config from its directory; without one (a directory that holds only metrics.jsonl) the target and the
staleness bound are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relax_rt.config.loader import read_resolved
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.report.summary import finish, render_summary, report
from relax_rt.supervision.rundir import RESOLVED_CONFIG
from relax_rt.transport.rpc.errors import RelaxError


def main(argv: list[str] | None = None) -> int:
    """Answers with the exit code: 1 when something could not be drawn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run_dir", type=Path)
    run_dir: Path = parser.parse_args(argv).run_dir
    if not run_dir.is_dir():
        parser.error(f"{run_dir} is no directory")
    config = _config(run_dir)
    summary = report(run_dir, name=run_dir.name) if config is None else finish(run_dir, config)
    print("\n".join(render_summary(summary)))
    return 1 if summary["plots"]["skipped"] else 0


def _config(run_dir: Path) -> RLConfig | None:
    try:
        config = read_resolved(run_dir / RESOLVED_CONFIG)
    except RelaxError as error:
        print(f"without the run's config: {error}", file=sys.stderr)
        return None
    return config if isinstance(config, RLConfig) else None


if __name__ == "__main__":
    sys.exit(main())
