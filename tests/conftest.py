"""Modules of this folder are importable by all tests, and their fixtures known to them."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from netns import nodes
from tiny_run import TinyRun

__all__ = ["nodes"]

# No test judges by absolute time, hypothesis's own included: machines are slow, and shared.
settings.register_profile("relax-random", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("relax", settings.get_profile("relax-random"), derandomize=True, database=None)
# The same draws each time, so that a run of the tests shows what the code does; RELAX_HYPOTHESIS=random looks further.
settings.load_profile("relax-random" if os.environ.get("RELAX_HYPOTHESIS") == "random" else "relax")


def pytest_configure() -> None:
    # A shell that starts us in the background has them ignored, and so would all that we start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sim-seed", type=int, default=None, help="play this run of the simulation alone")


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """What outlives a file, modules above all, is not looked at again by the collector: a pass over it takes a second
    in the end, and some tests ask for many. What is garbage by then has been found before."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def sim_seed(request: pytest.FixtureRequest) -> int | None:
    """The run of the simulation to be played alone; None: all of them."""
    chosen = request.config.getoption("--sim-seed")
    named = os.environ.get("RELAX_SIM_SEED")
    return chosen if chosen is not None else int(named) if named else None


@pytest.fixture
def runs() -> Iterator[list[TinyRun]]:
    """Runs that a test starts; whatever it leaves is ended here. Their model is made outside any run's deadlines."""
    from relax_rt.roles.models.resolve import resolve_model

    resolve_model("package:tiny", Path())
    started: list[TinyRun] = []
    yield started
    for run in started:
        run.end()
