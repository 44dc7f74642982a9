"""A pytest plugin of measure.py: a row of JSON as soon as a test has ended, so that a later hang costs only itself."""

from __future__ import annotations

import json
import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the result of a test: of its call, or of a fixture that failed or skipped it."""
    if report.when != "call" and report.outcome == "passed":
        return
    row = {
        "probe": os.environ["RELAX_MEASURE_PROBE"],
        "test": report.nodeid,
        "result": report.outcome,
        "seconds": round(report.duration, 3),
    }
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        row["why"] = str(report.longrepr[2])[:300]
    elif report.outcome == "failed":
        row["why"] = report.longreprtext[-600:]
    with open(os.environ["RELAX_MEASURE_ROWS"], "a") as out:  # noqa: PTH123 - one write, appended
        out.write(json.dumps(row) + "\n")
