"""Whole runs of the tiny job: real processes, real model, really killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.roles.models.resolve import resolve_model
from relax_rt.supervision import rundir

pytest.importorskip("torch")
pytestmark = pytest.mark.integration

KINDS = ("registry/0", "queue/0", "reward/0", "rollout/0", "trainer/0", "evaluator/0")


@pytest.fixture(scope="module", autouse=True)
def tiny_model() -> None:
    """Converted once, outside any run's deadlines."""
    resolve_model("package:tiny", Path())


def check_account(run: TinyRun, steps: int, batch: int = 64) -> None:
    """Every step of the target was taken once, and no sample twice: by the trainer's records and by the queue's."""
    path = steps_that_count(run.records("step"))
    assert sorted(path) == list(range(1, steps + 1))
    keys = [key for record in path.values() for key in record["keys"]]
    assert len(keys) == steps * batch
    assert len(set(keys)) == len(keys)
    account = run.events("queue_account")[-1]
    assert account["trained_twice"] == 0
    assert account["freed"] == steps * batch


@pytest.mark.long
def test_any_role_may_be_killed(runs: list[TinyRun], tmp_path: Path) -> None:
    steps = 150
    run = TinyRun(tmp_path / "run", **{"algorithm.steps": steps, "checkpoint.every_steps": 10})
    runs.append(run.start())
    run.until("a checkpoint", lambda: run.last_step() >= 12)
    run_id = run.run_id()
    pids = {slot: run.kill(slot) for slot in KINDS}
    assert len(set(pids.values())) == len(KINDS)
    shown = {s["slot"]: s["restarts"] for s in run.ps()["slots"]}
    assert all(shown[slot] >= 1 for slot in KINDS), shown
    assert run.last_step() < steps, "the kills came too late to matter"
    assert run.wait() == 0, run.text()
    check_account(run, steps)
    assert {e["slot"] for e in run.events("slot_exited") if e["diagnosis"]["signal"] == "SIGKILL"} == set(KINDS)
    assert [r["when"] for r in run.records("evaluation")][:: len(run.records("evaluation")) - 1] == ["before", "after"]
    final = json.loads((run.run_dir / "checkpoints" / f"step-{steps:06d}" / "relax_rt.json").read_text())
    assert run.records("evaluation")[-1]["version"] == final["version"], "evaluated weights that no checkpoint has"
    versions = [e["version"] for e in run.events("version_committed")]
    assert versions == sorted(set(versions)), "a version was used twice"
    run.gone(run_id)


@pytest.mark.parametrize("bound", [pytest.param(0, marks=pytest.mark.long), 2])
def test_staleness_stays_within_its_bound(bound: int, runs: list[TinyRun], tmp_path: Path) -> None:
    steps = 16
    run = TinyRun(
        tmp_path / "run",
        **{
            "algorithm.steps": steps,
            "algorithm.max_staleness": bound,
            "roles.rollout.count": 2,
            "evaluation.items": 16,
        },
    )
    runs.append(run.start())
    assert run.wait() == 0, run.text()
    check_account(run, steps)
    records = run.records("step")
    seen = {s for record in records for s in record["staleness"]}
    assert all(len(record["staleness"]) == len(record["keys"]) for record in records)
    assert max(seen) <= bound
    if bound == 0:
        assert all(versions == [r["trained_version"]] for r in records for versions in r["versions"])
    else:
        assert max(seen) > 0, "nothing was asynchronous: the bound was not put to the test"


def test_the_final_checkpoint_is_a_hugging_face_folder_that_generates(runs: list[TinyRun], tmp_path: Path) -> None:
    import transformers

    run = TinyRun(tmp_path / "run", **{"algorithm.steps": 3})
    runs.append(run.start())
    assert run.wait() == 0, run.text()
    folder = run.run_dir / "checkpoints" / "step-000003"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "12 + 34 ="}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    out = model.generate(**prompt, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.long
def test_ctrl_c_drains_and_up_again_resumes(runs: list[TinyRun], tmp_path: Path) -> None:
    steps = 60
    run = TinyRun(tmp_path / "run", **{"algorithm.steps": steps, "checkpoint.every_steps": 10})
    runs.append(run.start())
    run.until("some steps", lambda: run.last_step() >= 5)
    run_id = run.run_id()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.text()
    run.gone(run_id)
    reached = run.last_step()
    assert 5 <= reached < steps
    run.start()
    assert run.wait() == 0, run.text()
    assert run.events("resumed")[-1]["step"] == reached, "a drained trainer leaves a checkpoint of its last step"
    check_account(run, steps)
    run.gone(run.run_id())


@pytest.mark.long
def test_a_killed_agent_takes_everything_along_and_up_again_resumes(runs: list[TinyRun], tmp_path: Path) -> None:
    steps = 60
    run = TinyRun(tmp_path / "run", **{"algorithm.steps": steps, "checkpoint.every_steps": 10})
    runs.append(run.start())
    run.until("a checkpoint", lambda: run.last_step() >= 14)
    run_id = run.run_id()
    os.kill(run.agent_pid(), signal.SIGKILL)
    assert run.wait() == 137, run.text()
    run.gone(run_id)
    run.start()
    assert run.wait() == 0, run.text()
    assert run.events("resumed")[-1]["step"] % 10 == 0
    check_account(run, steps)
    run.gone(run.run_id())


def of_runs() -> set[Path]:
    """Directories with the name of a run's; tests and benchmarks have others of like names."""
    found = {path for root in (rundir.SHM_ROOT, rundir.SOCKET_ROOT) for path in root.glob(f"{rundir.PREFIX}*")}
    return {path for path in found if rundir.RUN_ID.fullmatch(path.name.removeprefix(rundir.PREFIX))}


def strays(run: TinyRun, before: set[Path]) -> list[Path]:
    """New directories that say they are this run's, or do not say whose; other tests' runs make theirs meanwhile."""
    new = of_runs() - before
    owners = {path: rundir.read_json(Path("/tmp", path.name, rundir.OWNER)) for path in new}
    return [path for path, owner in owners.items() if not owner or owner["run_dir"] == str(run.run_dir)]


def refused(run: TinyRun) -> str:
    """The output of an `up` that must refuse: exit code 2, nothing started, nothing left."""
    before = of_runs()
    done = subprocess.run(run.command(), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    deadline = time.monotonic() + 120
    while left := strays(run, before):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    return done.stderr


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"roles.rolout.count": 1}, ["roles.rolout", "rollout"]),
        ({"data.task": '"basic_arithmetik"'}, ["data.task", "basic_arithmetic"]),
        ({"model.path": '"no/such/model"'}, ["model.path", "no/such/model"]),
        ({"algorithm.group_sise": 4}, ["algorithm.group_sise", "group_size"]),
        ({"queue.capacity_mib": 900_000}, ["queue.capacity_mib", "/dev/shm"]),
        ({"sampling.top_p": 0.9}, ["top_p", "behaviour log-probabilities"]),
        ({"run.dir": '"/proc/nowhere/run"'}, ["run.dir"]),
    ],
)
def test_what_cannot_run_is_refused(overrides: dict[str, object], says: list[str], tmp_path: Path) -> None:
    message = refused(TinyRun(tmp_path / "run", **overrides))
    assert all(word in message for word in says), message
    assert "Traceback" not in message


def test_a_reward_that_raises_is_found_before_anything_starts(tmp_path: Path) -> None:
    shutil.copytree(Path(__file__).parent.parent / "tiny_job", tmp_path / "job")
    (tmp_path / "job" / "reward.py").write_text("def right(completion, answer):\n    return 1 / 0\n")
    message = refused(TinyRun(tmp_path / "run", tmp_path / "job" / "roles.toml"))
    assert "reward.function" in message
    assert "ZeroDivisionError" in message
    assert "reward.py:2" in message


def test_a_run_directory_of_another_config_is_refused(runs: list[TinyRun], tmp_path: Path) -> None:
    first = TinyRun(tmp_path / "run", **{"algorithm.steps": 1})
    runs.append(first.start())
    assert first.wait() == 0, first.text()
    message = refused(TinyRun(tmp_path / "run", **{"algorithm.steps": 1, "run.seed": 99}))
    assert "run.dir" in message
    assert str(tmp_path / "run") in message
