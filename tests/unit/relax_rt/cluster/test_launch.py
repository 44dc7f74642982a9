"""What a run directory of another config is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from relax_rt.cluster import launch
from relax_rt.config.loader import config_digest, write_resolved
from relax_rt.config.schema import RunConfig
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.checkpoints.cold_start import ColdStartProgress, write_progress
from relax_rt.supervision.rundir import RESOLVED_CONFIG, update_run
from relax_rt.transport.rpc.errors import RelaxError


def config(run_dir: Path, **queue: int) -> RunConfig:
    return RunConfig.model_validate({"run": {"name": "x", "dir": str(run_dir)}, "queue": queue})


def test_settings_that_differ_are_named_with_both_values(tmp_path: Path) -> None:
    before = config(tmp_path / "moved", capacity_mib=64)
    write_resolved(before, tmp_path / RESOLVED_CONFIG)
    update_run(tmp_path, run_id="ab", config="roles.toml", config_digest=config_digest(before))
    now = config(tmp_path, capacity_mib=32, slab_mib=2)
    launch._check_same_config(tmp_path, config_digest(before), config(tmp_path, capacity_mib=64))
    with pytest.raises(RelaxError) as caught:
        launch._check_same_config(tmp_path, config_digest(now), now)
    assert "queue.capacity_mib was 64, is 32; queue.slab_mib was " in caught.value.why
    assert "run.dir" not in caught.value.why


def test_a_job_may_let_some_keys_change(tmp_path: Path) -> None:
    def rl(**trainer: object) -> RunConfig:
        table = {"backend": "megatron", **trainer}
        return RLConfig.model_validate(
            {
                "run": {"name": "x", "dir": str(tmp_path), "job": "rl"},
                "model": {"path": "m"},
                "data": {"task": "t"},
                "reward": {"function": "f.py:f"},
                "roles": {"trainer": TrainerSettings.model_validate(table)},
            }
        )

    before = rl(count=2, tensor_parallel=2)
    write_resolved(before, tmp_path / RESOLVED_CONFIG)
    update_run(tmp_path, run_id="ab", config="roles.toml", config_digest=config_digest(before))
    divided = rl(count=4, tensor_parallel=2, pipeline_parallel=2)
    assert config_digest(divided) != config_digest(before)
    launch._check_same_config(tmp_path, config_digest(divided), divided)
    other = rl(count=4, tensor_parallel=2, pipeline_parallel=2, optimizer_dtype="bfloat16")
    with pytest.raises(RelaxError, match=r"roles.trainer.optimizer_dtype was \"float32\", is \"bfloat16\""):
        launch._check_same_config(tmp_path, config_digest(other), other)


def test_a_training_goes_on_to_more_steps_at_another_rate_and_with_another_backend(tmp_path: Path) -> None:
    def rl(backend: str, **algorithm: object) -> RunConfig:
        return RLConfig.model_validate(
            {
                "run": {"name": "x", "dir": str(tmp_path), "job": "rl"},
                "model": {"path": "m"},
                "data": {"task": "t"},
                "reward": {"function": "f.py:f"},
                "algorithm": algorithm,
                "roles": {"trainer": TrainerSettings.model_validate({"backend": backend})},
            }
        )

    before = rl("torch", steps=20)
    write_resolved(before, tmp_path / RESOLVED_CONFIG)
    update_run(tmp_path, run_id="ab", config="roles.toml", config_digest=config_digest(before))
    more = rl("megatron", steps=30, learning_rate=1e-7)
    launch._check_same_config(tmp_path, config_digest(more), more)
    other = rl("torch", steps=30, group_size=4)
    with pytest.raises(RelaxError, match=r"with other settings: algorithm\.group_size was 8, is 4 \("):
        launch._check_same_config(tmp_path, config_digest(other), other)


def test_the_rate_of_a_cold_start_may_change_until_it_is_over(tmp_path: Path) -> None:
    def rl(rate: float, **algorithm: object) -> RunConfig:
        return RLConfig.model_validate(
            {
                "run": {"name": "x", "dir": str(tmp_path), "job": "rl"},
                "model": {"path": "m"},
                "data": {"task": "t"},
                "reward": {"function": "f.py:f"},
                "cold_start": {"answers": True, "learning_rate": rate},
                "algorithm": algorithm,
            }
        )

    before = rl(1e-5)
    write_resolved(before, tmp_path / RESOLVED_CONFIG)
    update_run(tmp_path, run_id="ab", config="roles.toml", config_digest=config_digest(before))
    other, further = rl(2e-5), rl(1e-5, learning_rate=1e-7)
    mark = ColdStartProgress(step=4, total=8, done=False, digest="d")
    folder = tmp_path / "cold_start" / "step-000004"
    folder.mkdir(parents=True)
    write_progress(folder, mark)
    launch._check_same_config(tmp_path, config_digest(other), other)
    write_progress(folder, replace(mark, done=True))
    with pytest.raises(RelaxError, match=r"cold_start.learning_rate was 1e-05, is 2e-05: it has no effect") as caught:
        launch._check_same_config(tmp_path, config_digest(other), other)
    assert "step-000004" in caught.value.why and "back to 1e-05" in caught.value.hint
    launch._check_same_config(tmp_path, config_digest(further), further)


def test_five_changed_keys_are_shown_with_values_and_the_others_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for many, rest in ((7, "; and so are k5, k6"), (40, "k24, …"), (5, "k4 was 4, is 5")):
        monkeypatch.setattr(launch, "_changed", lambda *_, many=many: [(f"k{n}", n, n + 1) for n in range(many)])
        update_run(tmp_path, run_id="ab", config_digest="other")
        with pytest.raises(RelaxError) as caught:
            launch._check_same_config(tmp_path, "mine", config(tmp_path))
        assert "k0 was 0, is 1; k1 was 1, is 2; " in caught.value.why and caught.value.why.count(" was ") == 6
        assert caught.value.why.endswith(rest)
