"""Loading a roles.toml: what is accepted, what is refused, and where the caret stands."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from relax_rt.config import loader
from relax_rt.config.job import Job, load_job
from relax_rt.config.loader import config_digest, load_config, read_resolved, role_settings, write_resolved
from relax_rt.config.problems import BadInput, ConfigErrors, Problem
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.rewards.settings import RewardSettings
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.transport.rpc.errors import RelaxError

MINIMAL = """\
[run]
name = "quick"
[model]
path = "package:tiny"
[data]
task = "chain_sum"
[reward]
function = "reward.py:score"
"""


class FakeJob(Job):
    """The tables of the RL job without its roles' code."""

    Config: ClassVar[type[RunConfig]] = RLConfig
    Roles: ClassVar[Mapping[str, type[RoleSettings]]] = {
        "rollout": RolloutSettings,
        "reward": RewardSettings,
        "trainer": TrainerSettings,
    }
    found: ClassVar[list[Problem]] = []
    found_early: ClassVar[list[Problem]] = []

    def check(self, config: Any, config_dir: Path) -> list[Problem]:
        assert isinstance(config, RLConfig)
        return list(self.found)

    def preflight(self, config: Any, config_dir: Path, *, answers: bool = True) -> list[Problem]:
        return list(self.found_early)

    def ledger_policy(self, config: Any) -> Any:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def fake_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "load_job", lambda name: FakeJob() if name == "rl" else load_job(name))


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        path = tmp_path / "roles.toml"
        path.write_text(text)
        return path

    return write


def problems(path: Path, overrides: Sequence[str] = (), **options: Any) -> list[Problem]:
    with pytest.raises(ConfigErrors) as caught:
        load_config(path, overrides, **options)
    return caught.value.problems


def one(path: Path, overrides: Sequence[str] = (), **options: Any) -> Problem:
    (found,) = problems(path, overrides, **options)
    return found


def underlined(problem: Problem) -> str:
    assert problem.place is not None
    start = problem.place.column - 1
    return problem.place.text[start : start + problem.place.width]


def test_minimal_config_gets_all_defaults_and_roles(write: Callable[[str], Path], tmp_path: Path) -> None:
    config = load_config(write(MINIMAL))
    assert isinstance(config, RLConfig)
    assert set(config.roles) == {"registry", "queue", "rollout", "reward", "trainer"}
    assert isinstance(config.roles["rollout"], RolloutSettings)
    assert config.run.dir == str(tmp_path / "runs/quick")
    assert config.config_dir == str(tmp_path)


def test_every_problem_is_reported_at_once_in_source_order(write: Callable[[str], Path]) -> None:
    text = (
        MINIMAL
        + """
[algorithm]
group_sise = 4
name = "grop"
steps = "many"
adam_betas = [0.9, "x"]
[supervision.restart]
max_restarts = 900
[roles.rolout]
[roles.rollout]
count = 0
"""
    )
    found = problems(write(text))
    assert [(underlined(p), p.message) for p in found] == [
        ("group_sise", "unknown key 'group_sise' in [algorithm]"),
        ('"grop"', found[1].message),
        ('"many"', 'algorithm.steps: must be an integer, not "many"'),
        ('"x"', 'algorithm.adam_betas[1]: must be a number, not "x"'),
        ("900", found[4].message),
        ("rolout", "unknown role 'rolout'"),
        ("0", "roles.rollout.count: must be at least 1, not 0"),
    ]
    assert found[1].message.startswith('algorithm.name: "grop" is not one of: "grpo", ')
    assert "can never fire" in found[4].message
    assert [p.hint for p in (found[0], found[1], found[5])] == [
        "did you mean 'group_size'?",
        "did you mean 'grpo'?",
        "did you mean 'rollout'?",
    ]


def test_render_has_file_line_column_source_line_and_caret(write: Callable[[str], Path]) -> None:
    path = write(MINIMAL.replace('name = "quick"', 'name = "quick"\n\tseed  =  -1  # why'))
    with pytest.raises(ConfigErrors) as caught:
        load_config(path)
    first, title = caught.value.render().split("\n\n")
    lines = first.splitlines()
    assert lines[0] == f"{path}:3:11: run.seed: must be at least 0, not -1"
    source = lines[1].index("|")
    assert lines[2].index("|") == source
    assert lines[1][lines[2].index("^") :].startswith("-1  #")
    assert lines[2].count("^") == len("-1")
    assert title == f"{path}: 1 problem"


@pytest.mark.parametrize(
    ("text", "where", "hint"),
    [
        ("[run]\nname = quick\n", "2:8", "text stands in quotes"),
        ("[run]\nname = True\n", "2:8", "true"),
        ("[run]\nname = 'a'\nname = 'b'\n", "3:1:", "given twice"),
        ("[run]\nname = 'a'\n[run]\n", "3:1:", "given twice"),
        ("[run\n", "1:5", ""),
        ("[run]\nname = [1, \n", "2:", ""),
        ("a = " + "[" * 5000, "1:", ""),
    ],
)
def test_syntax_errors_have_the_same_form(write: Callable[[str], Path], text: str, where: str, hint: str) -> None:
    (problem,) = problems(write(text))
    assert f"roles.toml:{where}" in problem.render() and problem.message.startswith("not TOML: ")
    assert hint in problem.hint


@pytest.mark.parametrize(
    ("tables", "left_out"),
    [
        ("[queue]\nslab_mib = 1000\ncapacity_mib = 'x'\n", "a slab of"),
        ("[supervision.restart]\nbackoff_first_s = 90.0\nbackoff_max_s = -1\n", "is above backoff_max_s"),
        ("[algorithm]\nwarmup_steps = 900\nsteps = 'many'\n", "the rate is never reached"),
    ],
)
def test_findings_that_rest_on_a_wrong_value_wait_for_it(
    write: Callable[[str], Path], tables: str, left_out: str
) -> None:
    assert left_out not in one(write(MINIMAL + tables)).message


def test_text_that_is_not_utf8_is_placed(tmp_path: Path) -> None:
    path = tmp_path / "roles.toml"
    path.write_bytes(b"[run]\nname = '\xff'\n")
    problem = one(path)
    assert problem.place is not None
    assert (problem.place.line, problem.place.column) == (2, 9)


def test_windows_line_ends_do_not_shift_places(tmp_path: Path) -> None:
    path = tmp_path / "roles.toml"
    path.write_bytes((MINIMAL + "[queue]\nslab_mib = 0\n").replace("\n", "\r\n").encode())
    assert underlined(one(path)) == "0"


def test_missing_table_and_key_say_what_is_needed(write: Callable[[str], Path]) -> None:
    found = problems(write("[run]\n[model]\npath = 'x'\n[reward]\nfunction = 'a:b'\n[data]\n"))
    assert [p.message for p in found] == ["missing key 'name' in [run]"]
    assert underlined(found[0]) == "run"
    found = problems(write("[run]\nname = 'a'\n"))
    assert {p.message for p in found} == {f"missing table [{t}]" for t in ("model", "data", "reward")}
    assert next(p for p in found if "model" in p.message).hint == "it needs path"


def test_key_of_another_table_is_named(write: Callable[[str], Path]) -> None:
    problem = one(write(MINIMAL + "[algorithm]\nheld_out = 0.5\n"))
    assert problem.hint == "it belongs in [data] or [cold_start]"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("steps", "it belongs in [cold_start] or [algorithm]"),
        ("algorithm.lr", "did you mean 'learning_rate'?"),
        ("algorithm.kl_coef", 'write kl = { name = "k3", coefficient = 0.001 }'),
        ("algorithm.beta", 'loss = { name = "dpo", beta = 0.1 }, or kl = { name = "k3", coefficient = 0.001 }'),
    ],
)
def test_a_misplaced_key_or_one_of_another_trainer_gets_a_hint(
    write: Callable[[str], Path], key: str, hint: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        load_config(write(MINIMAL), [f"{key}=1"])
    assert [problem.hint for problem in caught.value.problems] == [hint]


def test_numbers_are_not_coerced_but_integers_are_numbers(write: Callable[[str], Path]) -> None:
    config = load_config(
        write(MINIMAL + "[algorithm]\nmax_staleness = inf\nlearning_rate = 1e-5\n[data.options]\na=1\n")
    )
    assert isinstance(config, RLConfig)
    assert math.isinf(config.algorithm.max_staleness)
    config = load_config(write(MINIMAL + "[algorithm]\nmax_staleness = 3\nadam_betas = [0, 0.5]\n"))
    assert isinstance(config, RLConfig)
    assert config.algorithm.adam_betas == (0.0, 0.5)
    for wrong in ("seed = '1'", "seed = 1.0", "seed = true", "job = 1"):
        assert one(write(MINIMAL.replace("[model]", f"{wrong}\n[model]"))).message.startswith("run.")


def test_a_value_of_none_of_the_kinds_that_its_key_allows_is_one_problem(write: Callable[[str], Path]) -> None:
    text = MINIMAL + '[roles.rollout.sglang]\narguments = { a = [1], b = {}, c = "x", d = true, e = 1, f = 0.5 }\n'
    with pytest.raises(ConfigErrors) as caught:
        load_config(write(text))
    kinds = "must be true or false, a number or a string"
    assert [problem.message for problem in caught.value.problems] == [
        f"roles.rollout.sglang.arguments.a: {kinds}, not an array",
        f"roles.rollout.sglang.arguments.b: {kinds}, not a table",
    ]


def test_overrides_are_toml_or_text(write: Callable[[str], Path]) -> None:
    path = write(MINIMAL)
    config = load_config(
        path,
        [
            "run.seed=7",
            "algorithm.max_staleness=inf",
            "data.template=Say {question} = ?",
            'roles.rollout.env={A="x=y"}',
            "data.options.'a=b'=[1, 2]",
            "run.name=other",
        ],
    )
    assert isinstance(config, RLConfig)
    assert config.run.seed == 7
    assert math.isinf(config.algorithm.max_staleness)
    assert config.data.template == "Say {question} = ?"
    assert config.roles["rollout"].env == {"A": "x=y"}
    assert config.data.options == {"a=b": [1, 2]}
    assert config.run.dir.endswith("runs/other")


@pytest.mark.parametrize(
    ("override", "marked"),
    [
        ("run.seed=-1", "-1"),
        ("run.sed=1", "run.sed"),
        ("algorithm.adam_betas=[0.1, 'x']", "'x'"),
        ("run.name.x=1", "run.name.x"),
        ("run.seed", "run.seed"),
        ("=1", "=1"),
        ("roles.rolout.count=1", "roles.rolout.count"),
        ("queue.slab_mib=4096", "4096"),
    ],
)
def test_override_problems_point_at_the_override(write: Callable[[str], Path], override: str, marked: str) -> None:
    problem = one(write(MINIMAL + "[queue]\nslab_mib = 8\n"), [override])
    assert problem.place is not None
    assert problem.place.file == "--set"
    assert problem.place.text == override
    assert underlined(problem) == marked


def test_an_override_is_named_by_itself(write: Callable[[str], Path]) -> None:
    override = "algorithm.adam_betas=[0.1, 'x']"
    problem = one(write(MINIMAL), [override])
    head, caret, *_ = problem.render().splitlines()
    assert head == f"--set {override}: {problem.message}"
    assert head[caret.index("^") : caret.rindex("^") + 1] == "'x'"
    with pytest.raises(ConfigErrors) as caught:
        load_config(write(MINIMAL), [override])
    assert f"--set {override}: " in caught.value.why
    several = one(write(MINIMAL), ["algorithm.adam_betas=[0.1,\n'x']"])
    assert several.render().startswith("--set:2:1: "), "of more lines than one the place is told"


def test_unknown_job_is_a_problem_beside_the_others(write: Callable[[str], Path]) -> None:
    found = problems(write(MINIMAL.replace("[model]", "job = 'lr'\nseed = -1\n[model]")))
    assert [underlined(p) for p in found] == ["'lr'", "-1"]
    assert "unknown job" in found[0].message


def test_job_checks_are_placed_and_preflight_comes_last(
    write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(MINIMAL)
    monkeypatch.setattr(FakeJob, "found_early", [Problem(("model", "path"), "no such folder")])
    load_config(path)
    assert underlined(one(path, preflight=True)) == '"package:tiny"'
    # The slow checks are not made where the quick ones find something.
    monkeypatch.setattr(FakeJob, "found", [Problem(("data", "path"), "give a path", at="key")])
    assert underlined(one(path, preflight=True)) == "data"


@pytest.mark.parametrize(
    ("lines", "marked"),
    [
        ("[supervision.restart]\nbackoff_first_s = 9", "9"),
        ("[supervision.restart]\nrole_restarts = 7\nrole_period_s = 20", "7"),
        ("[roles.reward]\ncount = 2\nmin_ready = 3", "3"),
        ("[queue]\nslab_mib = 512", "512"),
        ("[run_dir]\n", "run_dir"),
        ("[roles.queue]\ncount = 2", "2"),
        ("[roles.reward]\npython = './no-such-python'", "'./no-such-python'"),
        ("[roles.reward.env]\n'a b' = ''", "'a b'"),
        ("[roles.reward.env]\nRELAX_RUN = ''", "RELAX_RUN"),
        ("[roles]\nreward = 3", "3"),
        ("[roles.x]\ntarget = 'nothing.py:X'", "'nothing.py:X'"),
        ("[roles.x]\ntarget = 'json:loads'", "'json:loads'"),
        ("config_dir = '/'", "config_dir"),
    ],
)
def test_impossible_runtime_settings(write: Callable[[str], Path], lines: str, marked: str) -> None:
    text = f"{lines}\n{MINIMAL}" if lines.startswith("config_dir") else f"{MINIMAL}{lines}\n"
    assert underlined(one(write(text))) == marked


def test_run_directory_that_cannot_be(write: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wrong in ("file/run", "runs/{what}", "{"):
        assert underlined(one(write(MINIMAL.replace("[model]", f"dir = '{wrong}'\n[model]")))) == f"'{wrong}'"


OWN_ROLE = """
from helper import LIMIT
from relax_rt.config.schema import RoleSettings

class Settings(RoleSettings):
    limit: int = LIMIT

class Echo:
    Settings = Settings
"""

OWN_ROLLOUT = """
from relax_rt.roles.rollout.engines.settings import RolloutSettings

class Settings(RolloutSettings):
    limit: int = 41

class Sampler:
    Settings = Settings
"""


def test_own_role_beside_the_config(write: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("LIMIT = 41\n")
    (tmp_path / "echo.py").write_text(OWN_ROLE)
    text = MINIMAL + "[roles.echo]\ntarget = 'echo.py:Echo'\ncount = 2\n"
    settings = load_config(write(text)).roles["echo"]
    assert (settings.limit, settings.count) == (41, 2)
    assert settings.target == f"{tmp_path}/echo.py:Echo"
    problem = one(write(text + "limits = 1\n"))
    assert (underlined(problem), problem.hint) == ("limits", "did you mean 'limit'?")
    assert "did you mean 'Echo'?" in one(write(text.replace(":Echo", ":Ecko"))).hint
    (tmp_path / "broken.py").write_text("import no_such_module_anywhere\n")
    assert "ModuleNotFoundError" in one(write(text.replace("echo.py", "broken.py"))).message


def test_resolved_config_comes_back_the_same(write: Callable[[str], Path], tmp_path: Path) -> None:
    config = load_config(write(MINIMAL + "[algorithm]\nmax_staleness = inf\n[roles.rollout]\nthreads = 3\n"))
    write_resolved(config, tmp_path / "config.json")
    again = read_resolved(tmp_path / "config.json")
    assert again == config
    assert role_settings(again, "rollout", RolloutSettings).threads == 3
    assert role_settings(again, "evaluator", RoleSettings) == RoleSettings()


def test_settings_of_own_roles_stay_plain_until_asked_for(write: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("LIMIT = 41\n")
    (tmp_path / "echo2.py").write_text(OWN_ROLE)
    config = load_config(write(MINIMAL + "[roles.echo]\ntarget = 'echo2.py:Echo'\nlimit = 5\n"))
    write_resolved(config, tmp_path / "config.json")
    again = read_resolved(tmp_path / "config.json")
    assert isinstance(again.roles["echo"], dict)
    assert role_settings(again, "echo", type(config.roles["echo"])) == config.roles["echo"]
    with pytest.raises(ConfigErrors, match="limit"):
        role_settings(again, "echo", RewardSettings)


def test_own_role_in_the_place_of_one_of_the_jobs_may_have_settings_of_its_own(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "sampler.py").write_text(OWN_ROLLOUT)
    config = load_config(write(MINIMAL + "[roles.rollout]\ntarget = 'sampler.py:Sampler'\nthreads = 3\nlimit = 5\n"))
    write_resolved(config, tmp_path / "config.json")
    again = read_resolved(tmp_path / "config.json")
    assert again == config
    assert isinstance(again.roles["rollout"], RolloutSettings)
    assert (again.roles["rollout"].threads, again.roles["rollout"].limit) == (3, 5)  # type: ignore[attr-defined]
    damaged = json.loads((tmp_path / "config.json").read_text())
    damaged["roles"]["rollout"]["limits"] = 1
    (tmp_path / "config.json").write_text(json.dumps(damaged))
    with pytest.raises(RelaxError, match="limits"):
        read_resolved(tmp_path / "config.json")


def test_damaged_resolved_config_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content in ("", "[]", "{}", json.dumps({"run": {"job": "rl", "name": "A B"}})):
        path.write_text(content)
        with pytest.raises(RelaxError, match=re.escape(str(path))):
            read_resolved(path)


def test_digest_ignores_folders_only(write: Callable[[str], Path]) -> None:
    path = write(MINIMAL)
    digest = config_digest(load_config(path))
    assert config_digest(load_config(path, ["run.dir=elsewhere"])) == digest
    assert config_digest(load_config(path, ["run.seed=1"])) != digest


@pytest.mark.parametrize(
    ("files", "hint"),
    [
        (["roles.toml"], "its config is {}/roles.toml: give that, as in `relax-rt validate {}/roles.toml`"),
        (["a.toml"], "its config is {}/a.toml: give that"),
        (["nodes.toml", "roles.toml"], "its config is {}/roles.toml: give that"),
        (["a.toml", "b.toml"], "give one of {}/a.toml, {}/b.toml"),
        ([], "it holds no .toml; a config is called roles.toml, and `relax-rt init {}` writes a starter"),
    ],
)
def test_a_folder_is_answered_with_the_config_in_it(tmp_path: Path, files: list[str], hint: str) -> None:
    for name in files:
        (tmp_path / name).write_text(MINIMAL)
    with pytest.raises(BadInput) as refused:
        load_config(tmp_path)
    assert refused.value.what == f"{tmp_path} is a folder"
    assert refused.value.hint.startswith(hint.replace("{}", str(tmp_path)))


def test_missing_file_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "role.toml").touch()
    with pytest.raises(RelaxError, match=r"role\.toml"):
        load_config(tmp_path / "roles.toml")


def test_interpreter_of_an_environment_is_not_resolved_through_its_link(
    write: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "env").mkdir()
    (tmp_path / "env/python").symlink_to(sys.executable)
    config = load_config(write(MINIMAL + "[roles.reward]\npython = 'env/python'\n"))
    assert config.roles["reward"].python == str(tmp_path / "env/python")


def test_an_address_at_which_nothing_can_listen_is_refused_at_its_key(write: Callable[[str], Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        used = f"127.0.0.1:{taken.getsockname()[1]}"
        for listen, says in (
            ("192.0.2.1:7000", f"nothing can listen on 192.0.2.1:7000: {os.strerror(errno.EADDRNOTAVAIL)}"),
            (used, f"nothing can listen on {used}: {os.strerror(errno.EADDRINUSE)}"),
            ("nowhere", "no host and port"),
            ("0.0.0.0:7000", "one that these reach"),
        ):
            path = write(f'{MINIMAL}[supervision.nodes]\nlisten = "{listen}"\n')
            found = one(path)
            assert says in found.message and underlined(found) == f'"{listen}"'
        # The run itself listens there.
        run_dir = path.parent / "runs/quick"
        run_dir.mkdir(parents=True)
        path = write(f'{MINIMAL}[supervision.nodes]\nlisten = "{used}"\n')
        with (run_dir / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            load_config(path)
    load_config(write(f'{MINIMAL}[supervision.nodes]\nlisten = "127.0.0.1:0"\n'))
