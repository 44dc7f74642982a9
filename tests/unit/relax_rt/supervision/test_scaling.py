"""A living run is given no number of slots that its config may not have, or that the machine cannot carry."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.cli.starter import write_starter
from relax_rt.config.loader import load_config, read_resolved, write_resolved
from relax_rt.supervision.plan import RolePlan, check_count, plan_roles
from relax_rt.transport.rpc.errors import Refused


class Starter:
    """The run that `relax-rt init` writes, as its agent reads it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        write_starter(folder)
        write_resolved(load_config(folder / "roles.toml", overrides), folder / "resolved.json")
        self.config = read_resolved(folder / "resolved.json")
        self.plans: list[RolePlan] = plan_roles(self.config)
        self.counts = {plan.kind: plan.settings.count for plan in self.plans}

    def check(self, kind: str, count: int, cores: int = 2) -> None:
        check_count(self.config, self.plans, self.counts, kind, count, cores)


@pytest.mark.parametrize(
    ("kind", "count", "why"),
    [
        ("trainer", 2, "so many are a gang, whose ranks start together"),
        ("evaluator", 2, "at most 1, not 2"),
        ("evaluator", 0, "evaluation.every_steps is set"),
        ("rollout", 0, "at least 1, not 0"),
        ("reward", 0, "a run needs at least one reward"),
        ("reward", 5000, "at most 4096"),
        ("rollout", 200, "205 compute threads on 2 cores, and 32 are the most"),
    ],
)
def test_an_impossible_count_is_refused_with_the_reason(tmp_path: Path, kind: str, count: int, why: str) -> None:
    with pytest.raises(Refused, match=why):
        Starter(tmp_path).check(kind, count)


def test_a_possible_count_is_accepted(tmp_path: Path) -> None:
    run = Starter(tmp_path, "evaluation.every_steps=0")
    run.check("rollout", 2)
    run.check("rollout", 200, cores=64)
    run.check("evaluator", 0)


def test_a_run_that_is_over_a_limit_may_become_smaller(tmp_path: Path) -> None:
    run = Starter(tmp_path, "roles.rollout.count=100")
    run.check("rollout", 90)
    with pytest.raises(Refused, match="the most"):
        run.check("rollout", 101)


def test_limits_of_memory_that_the_machine_does_not_have_are_refused(tmp_path: Path) -> None:
    run = Starter(tmp_path, "roles.reward.memory_mib=100000000")
    with pytest.raises(Refused, match="memory_mib of all roles together"):
        run.check("reward", 2)
