"""The commands as they are called: exit codes, messages, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from relax_rt.cli.logs import LogFile, show_logs
from relax_rt.cli.main import main
from relax_rt.cli.runs import find_run_dir
from relax_rt.cluster.launch import lock_run_dir
from relax_rt.config.loader import load_config, write_resolved
from relax_rt.config.version import RUN_FORMAT
from relax_rt.process.child import rotate_log
from relax_rt.roles.training.checkpoints.store import FORMAT
from relax_rt.supervision.control import NoRun
from relax_rt.supervision.rundir import owner_of, write_json

TINY_JOB = Path(__file__).parents[3] / "tiny_job"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def make_run(name: str, alive: bool = False, age_s: float = 0.0, **fields: Any) -> Path:
    """A run directory as the agent leaves it; a living one belongs to this process."""
    run_dir = Path("runs") / name
    (run_dir / "logs").mkdir(parents=True)
    status = "running" if alive else "finished"
    record = {"format": RUN_FORMAT, "run_id": "0123abcd", "name": name, "status": status, "exit_code": 0}
    write_json(
        run_dir / "run.json",
        {**record, **fields, **({"agent": owner_of(os.getpid())} if alive else {})},
    )
    stamp = time.time() - age_s
    os.utime(run_dir / "run.json", (stamp, stamp))
    return run_dir


def call(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


def test_starter_is_valid_and_never_overwrites(capsys: Capture) -> None:
    assert call(capsys, "init", "first")[0] == 0
    code, out, err = call(capsys, "validate", "first/roles.toml", "--quick")
    assert (code, err) == (0, "")
    assert "rollout" in out
    before = Path("first/reward.py").read_text()
    Path("first/roles.toml").unlink()
    code, _, err = call(capsys, "init", "first")
    assert code == 2
    assert "reward.py would be overwritten" in err
    assert not Path("first/roles.toml").exists()
    assert Path("first/reward.py").read_text() == before


def test_starters_reward_function_does_what_it_says(capsys: Capture) -> None:
    call(capsys, "init", "first")
    code = "import reward; print(reward.score('it is 12', '12'), reward.score('-3', '12'), reward.score('', '12'))"
    done = subprocess.run([sys.executable, "-c", code], cwd="first", capture_output=True, text=True, check=True)
    assert done.stdout.split("}")[0] == "{'right': 1.0, 'is_a_number': 0.1"
    assert done.stdout.count("'right': 0.0") == 2


def test_validate_shows_every_problem_and_says_so_in_json(capsys: Capture) -> None:
    call(capsys, "init", ".")
    arguments = ["validate", "--quick", "--set", "run.sed=1", "--set", "algorithm.steps=x"]
    code, out, err = call(capsys, *arguments)
    assert (code, out) == (2, "")
    assert "did you mean 'seed'?" in err
    assert "Traceback" not in err
    code, out, err = call(capsys, *arguments, "--json")
    found = json.loads(out)
    assert (code, err, found["ok"]) == (2, "", False)
    assert [p["path"] for p in found["problems"]] == [["run", "sed"], ["algorithm", "steps"]]
    assert found["problems"][0]["place"]["text"] == "run.sed=1"


@pytest.mark.parametrize(
    "argv",
    [
        ["ps", "nowhere"],
        ["ps"],
        ["validate", "nothing.toml"],
        ["frobnicate"],
        ["ps", "--no-such-option"],
        ["up", "nothing.toml"],
        ["why", "rollout/0", "--run", "nowhere"],
        ["logs", "rolout", "--run", "over"],
        ["logs", "rollout", "train*", "--run", "over"],
        ["restart", "rollout/0", "over"],
        ["scale", "rollout", "-1", "over"],
        ["scale", "rollout", "2", "over"],
        ["drain", "rollout", "over"],
        ["sample"],
        ["sample", "nothing.toml"],
        ["sample", "nothing.toml", "--run", "over"],
        ["sample", "--run", "over"],
        ["sample", "--run", "over", "--set", "run.seed=2"],
        ["sample", "-n", "0"],
        ["sample", "--held-out", "--prompt", "1 + 1 ="],
    ],
)
def test_bad_input_is_2_without_a_traceback(capsys: Capture, argv: list[str]) -> None:
    if "over" in argv:
        (make_run("over") / "logs/rollout-0.log").touch()
    code, out, err = call(capsys, *argv)
    assert code == 2
    assert out == ""
    assert err
    assert "Traceback" not in err


def test_plan_in_both_forms(capsys: Capture) -> None:
    call(capsys, "init", ".")
    code, out, _ = call(capsys, "plan")
    assert code == 0
    lines = json.loads(call(capsys, "plan", "--json")[1])
    assert {"section", "name", "value", "how"} == set(lines[0])
    assert all(line["name"] in out for line in lines)


def test_sample_in_both_forms(capsys: Capture) -> None:
    Path("roles.toml").write_text((TINY_JOB / "roles.toml").read_text())
    Path("reward.py").write_text((TINY_JOB / "reward.py").read_text())
    # Where no test has made the warm model yet, this makes it and says so.
    code, out, _ = call(capsys, "sample", "-n", "2", "--set", "run.seed=5")
    assert code == 0
    code, again, err = call(capsys, "sample", "-n", "2", "--set", "run.seed=5")
    assert (code, again, err) == (0, out, "")
    samples = json.loads(call(capsys, "sample", "-n", "2", "--set", "run.seed=5", "--json")[1])
    assert [sample["index"] for sample in samples] == [0, 1]
    for sample in samples:
        assert len(sample["tokens"]) == len(sample["loss_mask"]) == len(sample["behaviour_logprobs"])
        assert sample["reward"] == float(sample["completion"] == sample["answer"])
        assert sample["prompt"] in out
        assert " ".join(map(str, sample["tokens"])) in out.replace(" | ", " ")
    assert json.loads(call(capsys, "sample", "--prompt", "1 + 1 =", "--json")[1])[0]["reward"] is None
    code, out, err = call(capsys, "sample", "--set", "model.path=elsewhere")
    assert (code, out) == (2, "")
    assert "there is no folder" in err


def test_the_run_meant(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoRun):
        find_run_dir(None)
    old, new = make_run("old", age_s=100), make_run("new")
    assert find_run_dir(None) == new
    assert find_run_dir(Path("old")) == old
    assert find_run_dir(Path("runs/old")) == old
    with pytest.raises(NoRun, match="did you mean 'old'"):
        find_run_dir(Path("odl"))
    living = make_run("living", alive=True, age_s=500)
    assert find_run_dir(None) == living
    make_run("second", alive=True)
    with pytest.raises(NoRun, match="2 live runs"):
        find_run_dir(None)
    monkeypatch.chdir(new)
    assert find_run_dir(None) == Path()


def test_ps_and_why_of_a_run_that_has_ended(capsys: Capture) -> None:
    diagnosis = {"slot": "trainer/0", "epoch": 3, "kind": "oom", "cause": "killed for memory", "at": 1.0}
    make_run("sad", status="failed", exit_code=1, diagnosis=diagnosis, reason="trainer/0 failed")
    code, out, _ = call(capsys, "ps")
    assert code == 0
    assert "failed" in out
    assert "killed for memory" in out
    assert json.loads(call(capsys, "ps", "--json")[1])["exit_code"] == 1
    code, out, _ = call(capsys, "why")
    assert code == 0
    assert "What ended the run" in out
    assert json.loads(call(capsys, "why", "--json")[1])["final"]["kind"] == "oom"


def test_ps_of_a_run_that_has_ended_says_how_far_it_came(capsys: Capture) -> None:
    config = load_config(TINY_JOB / "roles.toml", [f"run.dir={json.dumps(str(Path('runs/tiny').absolute()))}"])
    reason = "relax-rt down"
    run_dir = make_run("tiny", status="stopped", reason=reason, started_at=1000.0, ended_at=1083.0)
    write_resolved(config, run_dir / "config.json")
    scored = {"items": 64, "exact": 0.25, "exact_low": 0.15, "exact_high": 0.37, "step": 3}
    records = [
        {"kind": "evaluation", "when": "before", "t": 1.0, **scored, "exact": 0.125},
        {"kind": "evaluation", "when": "during", "t": 2.0, **scored},
        *({"kind": "step", "step": n, "t": float(n), "m": float(n)} for n in range(1, 6)),
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    (run_dir / "summary.json").write_text("{}")
    folder = run_dir / "checkpoints" / "step-000003"
    folder.mkdir(parents=True)
    state = {"format": FORMAT, "step": 3, "version": 4, "digest": "", "epoch": 6, "ledger_step": 3}
    (folder / "relax_rt.json").write_text(json.dumps(state))
    out = call(capsys, "ps")[1]
    assert out.startswith("tiny  stopped  relax-rt down  ")
    assert " ago), after 1m 23s\n" in out
    assert "  steps       5 of 6; `relax-rt up` resumes from the checkpoint of step 3\n" in out
    assert "  evaluated   held out, during (step 3): 25.0% of 64 exact [15.0%, 37.0%]\n" in out
    assert "  files       summary.json, metrics.jsonl, logs/, checkpoints/\n" in out
    found = json.loads(call(capsys, "ps", "--json")[1])["ended"]
    assert (found["step"], found["steps"], found["resumes_at"], found["ended_at"]) == (5, 6, 3, 1083.0)


def test_why_and_logs_take_the_run_as_other_commands_do(capsys: Capture) -> None:
    old = make_run("old", age_s=100.0, status="failed", exit_code=1, reason="of old")
    new = make_run("new")
    for run_dir in (old, new):
        (run_dir / "logs/trainer-0.log").write_text(f"{run_dir.name} trains\n")
    for named in ("runs/old", "old", str(old.absolute())):
        assert "of old" in call(capsys, "why", named)[1]
        assert call(capsys, "logs", named)[1] == "old trains\n"
        assert call(capsys, "logs", named, "trainer")[1] == "old trains\n"
    assert "of old" not in call(capsys, "why")[1]
    assert call(capsys, "logs", "trainer")[1] == "new trains\n"
    assert call(capsys, "logs", "trainer", "--run", "old")[1] == "old trains\n"
    assert call(capsys, "logs", "nothing")[0] == 2


def test_a_word_that_may_be_a_run_or_a_role_is_asked_about(capsys: Capture) -> None:
    make_run("trainer", age_s=100.0)
    new = make_run("new")
    (new / "logs/trainer-0.log").write_text("new trains\n")
    code, _, err = call(capsys, "logs", "trainer")
    assert code == 2
    assert "may be the run in runs/trainer or trainer of the run in runs/new" in err
    assert "--run trainer names the run" in err
    assert call(capsys, "logs", "trainer", "--run", "runs/new")[1] == "new trains\n"


def test_an_agent_that_does_not_answer_is_1(capsys: Capture) -> None:
    make_run("mute", alive=True, run_id="ffffffff")
    code, _, err = call(capsys, "ps")
    assert code == 1
    assert err.startswith("relax-rt: ")


def test_logs_of_one_slot_of_a_kind_and_of_all(capsys: Capture) -> None:
    run_dir = make_run("one")
    for slot in ("rollout-0", "rollout-1", "trainer-0"):
        (run_dir / f"logs/{slot}.log").write_text("".join(f"{slot} {n}\n" for n in range(100)))
    code, out, _ = call(capsys, "logs", "rollout/1", "-n", "2")
    assert (code, out) == (0, "rollout-1 98\nrollout-1 99\n")
    out = call(capsys, "logs", "rollout", "-n", "1")[1]
    assert out == "rollout-0 | rollout-0 99\nrollout-1 | rollout-1 99\n"
    for patterns in (["roll*"], ["rollout/*"], ["rollout-0", "rollout/1"], ["*-[01]", "rollout"]):
        chosen = call(capsys, "logs", *patterns, "-n", "1")[1].splitlines()
        assert [line for line in chosen if "rollout" in line] == out.splitlines()
    lines = [json.loads(line) for line in call(capsys, "logs", "-n", "1", "--json")[1].splitlines()]
    assert [line["log"] for line in lines] == ["rollout-0", "rollout-1", "trainer-0"]
    assert call(capsys, "logs", "rollout/1", "-n", "0")[1] == ""


def test_log_that_is_emptied_is_followed_from_its_new_start(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.log"
    log = LogFile(path)
    assert (log.last_lines(5), list(log.new_lines())) == ([], [])
    path.write_text("one\ntwo")
    assert list(log.new_lines()) == ["one"]
    with path.open("a") as file:
        file.write(" and a half\n")
    assert list(log.new_lines()) == ["two and a half"]
    path.write_text("new\n")
    assert list(log.new_lines()) == ["new"]


def test_rotated_files_belong_to_the_log(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.log"
    for name, lines in (("rollout-0.log.2", "a\nb\n"), ("rollout-0.log.1", "c\nd"), ("rollout-0.log", "e\nf")):
        (tmp_path / name).write_text(lines)
    assert LogFile(path).last_lines(4) == ["c", "d", "e", "f"]
    assert LogFile(path).last_lines(100) == list("abcdef")
    assert LogFile(path).last_lines(1) == ["f"]


def test_nothing_is_missed_of_a_log_that_is_rotated_between_two_looks(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.log"
    path.write_text("seen\nbeg")
    log = LogFile(path)
    log.last_lines(0)
    path.write_text("seen\nbegun and more\n")
    assert rotate_log(path, 1)
    path.write_text("new\n")
    assert list(log.new_lines()) == ["begun and more", "new"]


def test_following_ends_with_the_run_and_misses_nothing(capsys: Capture) -> None:
    run_dir = make_run("one", alive=True)
    path = run_dir / "logs/rollout-0.log"
    path.write_text("before\n")

    def write() -> None:
        for n in range(20):
            with path.open("a") as file:
                file.write(f"line {n}\n")
            time.sleep(0.02)
        write_json(
            run_dir / "run.json", {"format": RUN_FORMAT, "run_id": "0123abcd", "status": "finished", "exit_code": 0}
        )

    writer = threading.Thread(target=write)
    writer.start()
    show_logs(run_dir, ["rollout/0"], lines=1000, follow=True, as_json=False)
    writer.join()
    assert capsys.readouterr().out.splitlines() == ["before", *(f"line {n}" for n in range(20))]


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    (make_run("one") / "logs/rollout-0.log").write_text("x" * 100 + "\n" * 50_000)
    command = f"{sys.executable} -m relax_rt.cli.main logs rollout/0 -n 100000 | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    assert done.returncode == 0


def test_version_and_help_exit_with_0(capsys: Capture) -> None:
    for flag in ("--version", "--help"):
        code, out, _ = call(capsys, flag)
        assert code == 0
        assert out
    # Errors of use go to stderr, so that a pipe gets output only.
    assert call(capsys)[0] == 0


def test_down_of_a_run_that_is_over_is_done(capsys: Capture) -> None:
    make_run("over")
    for wait in ("5s", "1m", "3"):
        assert call(capsys, "down", "over", "--wait", wait) == (0, "runs/over: is over already: finished\n", "")
    code, _, err = call(capsys, "down", "over", "--wait", "soon")
    assert code == 2 and "is not a duration" in err


def test_up_of_a_live_run_is_refused_before_its_data_is_read(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_rt.roles.job.job.RLJob.preflight", lambda *_: pytest.fail("the slow checks were made"))
    call(capsys, "init", ".")
    make_run("mine", alive=True)
    code, out, err = call(capsys, "up", "--set", "run.name=mine")
    assert (code, out) == (2, "") and "belongs to a run that is alive" in err


def test_a_run_directory_of_another_format_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "run.json").write_text('{"run_id": "0123abcd", "status": "finished", "exit_code": 0}')
    assert main(["ps", str(tmp_path)]) == 2
    assert "is the run directory of relax-rt 0.1, which" in capsys.readouterr().err
    with pytest.raises(NoRun, match="its format is 1"):
        lock_run_dir(tmp_path)
