"""The table [progress]: what it holds the queue to, what is refused, and which setting helps against a loss."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_config import ROLES_TOML, problems

from relax_rt.config.job import advice, stall_after_s
from relax_rt.config.loader import load_config
from relax_rt.roles.base.progress import no_progress
from relax_rt.roles.base.settings import ProgressTable
from relax_rt.roles.config.progress import LEAST_S
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.job.job import RLJob
from relax_rt.transport.queue.ledger.messages import Loss, ProgressReport, failure_summary

LOSS = Loss(
    task="reward",
    cause="score raised KeyError at /me/reward.py:3",
    where="/me/reward.py:3",
    late=False,
    members=12,
    groups=5,
    prompts=8,
    example="",
    prompt=1,
    partial=False,
)


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "roles.toml"
    path.write_text(ROLES_TOML.format(dir=tmp_path))
    return path


def config(toml: Path, *sets: str) -> RLConfig:
    found = load_config(toml, list(sets), preflight=False)
    assert isinstance(found, RLConfig)
    return found


def test_the_queue_is_held_to_it(toml: Path) -> None:
    found = RLJob().ledger_policy(config(toml, 'progress.kept_items=["q"]'))
    assert (found.failed_groups, found.failed_prompts, found.item_timeouts, found.kept_items) == (64, 4, 2, ("q",))


@pytest.mark.parametrize(
    ("sets", "key", "message"),
    [
        (["progress.failed_groups=0"], "progress.failed_groups", ""),
        (["progress.failed_groups=3"], "progress.failed_prompts", "3 failed groups are of fewer prompts"),
        (["progress.failed_prompts=65"], "progress.failed_prompts", "lower it"),
        (["progress.item_timeouts=-1"], "progress.item_timeouts", ""),
        (["progress.empty_steps=0"], "progress.empty_steps", ""),
        (["progress.stall_after_s=60"], "progress.stall_after_s", "by its own deadlines"),
        (["progress.failed_grups=9"], "progress.failed_grups", "did you mean 'failed_groups'"),
    ],
)
def test_what_cannot_be_is_refused(toml: Path, sets: list[str], key: str, message: str) -> None:
    found = problems(toml, *sets)
    assert set(found) == {key} and message in f"{found[key].message} {found[key].hint}"


def test_every_key_may_be_changed_when_the_run_is_resumed() -> None:
    assert {f"progress.{key}" for key in ProgressTable.model_fields} <= RLJob.changeable
    assert {"algorithm.on_failed_member", "reward.timeout_s", "roles.env.turn_timeout_s"} <= RLJob.changeable


def test_the_limit_of_a_standstill_is_beyond_every_deadline(toml: Path) -> None:
    assert stall_after_s(config(toml)) == 2 * LEAST_S
    assert stall_after_s(config(toml, "algorithm.straggler_wait_s=5000")) == 2 * 5000
    assert stall_after_s(config(toml, "roles.rollout.hang_after_s=4000")) == 2 * 4000
    assert stall_after_s(config(toml, "progress.stall_after_s=700")) == 700
    # Callers from outside may pause a run.
    assert stall_after_s(config(toml, "roles.gateway.count=1")) is None
    rewarded = '[reward]\nfunction = "relax_rt.roles.rewards.builtin:integer"\n'
    toml.write_text(toml.read_text().replace(rewarded, ""))
    game = config(toml, 'roles.env.environment="game.py:G"', "roles.env.episode_timeout_s=3000")
    as_the_agent_has_it = game.model_copy(update={"roles": {**game.roles, "env": {"environment": "game.py:G"}}})
    assert (stall_after_s(game), stall_after_s(as_the_agent_has_it)) == (2 * 3000, 2 * LEAST_S)
    own = game.model_copy(update={"roles": {**game.roles, "mine": {"target": "mine.py:Role"}}})
    assert stall_after_s(own) is None


def test_the_plan_says_when_a_run_ends_when_stalled(toml: Path) -> None:
    def line(*sets: str) -> tuple[str, str]:
        (one,) = [one for one in RLJob().plan(config(toml, *sets)) if one.name == "ends when stalled"]
        return one.value, one.how

    value, how = line()
    assert value == "after 20m 00s" and "2 x the slowest deadline" in how
    assert line("progress.stall_after_s=700") == ("after 11m 40s", "progress.stall_after_s")
    value, how = line("roles.gateway.count=1")
    assert value == "never" and "roles.gateway may pause the run; progress.stall_after_s sets a limit" in how
    assert line("roles.gateway.count=1", "progress.stall_after_s=700")[0] == "after 11m 40s"


def test_the_setting_that_helps_is_named(toml: Path) -> None:
    plain = config(toml)

    def of(found: RLConfig, **changes: object) -> str:
        return advice(found, {**{name: getattr(LOSS, name) for name in LOSS.__struct_fields__}, **changes})

    assert of(plain) == "mend /me/reward.py:3"
    assert of(plain, where="", late=True) == "raise reward.timeout_s or reward.workers"
    assert 'algorithm.on_failed_member = "shrink"' in of(plain, partial=True)
    shrinking = config(toml, 'algorithm.on_failed_member="shrink"', "algorithm.min_group=6")
    assert "lower algorithm.min_group = 6" in of(shrinking, partial=True)
    assert "relax-rt logs" in of(plain, where="")


def test_the_end_names_causes_settings_and_how_to_continue(toml: Path) -> None:
    report = ProgressReport(70, 4, 64, True, [LOSS] * 5, [], 0)
    error = no_progress(config(toml), report)
    assert str(error).count("KeyError") == 3 and "2 further causes" in str(error)
    assert "70 groups of 4 or more prompts failed in a row" in error.what
    # Samples are lost until the last role has ended: the closing lines have their number.
    assert "sample" not in error.why and error.why.startswith("at task reward: ")
    assert "mend /me/reward.py:3" in error.hint and "`relax-rt up` again" in error.hint
    assert "8 or more prompts" in failure_summary(report) and "the run ends at 64" in failure_summary(report)
    assert failure_summary(ProgressReport(0, 0, 64, False, [LOSS], [], 0)) == ""
