"""algorithm.mode and [reward.judge]: pairs that cannot work are refused with the reason, before anything starts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fresh_model import save_fresh
from job_config import ROLES_TOML, problems

pytest.importorskip("torch")

from relax_rt.config.loader import load_config
from relax_rt.roles.config.sections import RLConfig

BFLOAT16 = ('roles.rollout.dtype="bfloat16"', 'roles.evaluator.dtype="bfloat16"')
JUDGE = ('reward.judge.prompt="{completion} or {answer}?"', "roles.genrm.count=1", 'reward.function="genrm"')


@pytest.fixture(scope="module")
def toml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    save_fresh(folder / "model")
    (folder / "mine.py").write_text(
        "def deaf(completion, answer):\n    return 1.0\n\n\n"
        "def both(completion, answer, verdict):\n    return {'verdict': verdict, 'short': -0.01 * len(completion)}\n"
    )
    path = folder / "roles.toml"
    path.write_text(ROLES_TOML.format(dir=folder))
    return path


def test_today_s_mode_is_the_default(toml: Path) -> None:
    config = load_config(toml, ())
    assert isinstance(config, RLConfig) and config.algorithm.mode == "asynchronous"


@pytest.mark.parametrize(
    "overrides",
    [
        ('algorithm.mode="colocate"', "algorithm.max_staleness=0"),
        ('algorithm.mode="hybrid"', "algorithm.max_staleness=1", "algorithm.over_provision=2"),
        (
            'algorithm.mode="hybrid"', "algorithm.max_staleness=2",
            "roles.trainer.gpus=0.4", "roles.rollout.gpus=0.3", "roles.rollout.count=2",
        ),
    ],
)  # fmt: skip
def test_modes_with_a_staleness_and_a_place_that_go_with_them(toml: Path, overrides: tuple[str, ...]) -> None:
    assert problems(toml, *overrides) == {}


SGLANG = 'roles.rollout.engine="sglang"'
COLOCATE = ('algorithm.mode="colocate"', "algorithm.max_staleness=0")


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (('algorithm.mode="colocate"',), "algorithm.max_staleness", "a batch is finished before"),
        (
            ('algorithm.mode="hybrid"', "algorithm.max_staleness=0"),
            "algorithm.max_staleness",
            "nothing may be in flight",
        ),
        (('algorithm.mode="colocated"',), "algorithm.mode", "is not one of"),
        (("colocation.give_way_s=5",), "colocation", "engines that share"),
        ((*COLOCATE, "algorithm.over_provision=1"), "algorithm.over_provision", "longest sequences"),
        ((*COLOCATE, "algorithm.streaming=true"), "algorithm.streaming", "when the batch is there"),
        ((*COLOCATE, "roles.trainer.gpus=1", "roles.rollout.gpus=1"), "roles.trainer.gpus", "different ones"),
        ((*COLOCATE, "roles.rollout.gpus=0.5"), "roles.rollout.gpus", "the trainer none"),
        ((*COLOCATE, "roles.trainer.gpus=0.6", "roles.rollout.gpus=0.5"), "roles.rollout.gpus", "add up to 1.1"),
        ((*COLOCATE, 'supervision.nodes.listen="127.0.0.1:0"'), "roles.rollout.node", "may be started on others"),
        (
            (*COLOCATE, 'roles.rollout.engine="sglang"', "colocation.give_way_s=10"),
            "colocation.give_way_s",
            "only slow",
        ),
        (
            ("roles.rollout.sglang.deterministic=true",),
            "roles.rollout.sglang.deterministic",
            'with engine = "embedded"',
        ),
        (("roles.evaluator.sglang={boot_timeout_s=9}",), "roles.evaluator.sglang.boot_timeout_s", "no effect"),
        (
            (SGLANG, 'roles.rollout.sglang.arguments={quantization="fp8"}'),
            "roles.rollout.sglang.arguments.quantization",
            "a quantised server holds cannot be verified",
        ),
        (
            (SGLANG, "roles.rollout.sglang.arguments={enable-lora=true}"),
            "roles.rollout.sglang.arguments.enable-lora",
            "adapters",
        ),
        (
            (SGLANG, "roles.rollout.sglang.arguments={--pp_size=2}"),
            "roles.rollout.sglang.arguments.--pp_size",
            "a server of several ranks",
        ),
        (("roles.genrm.count=1",), "roles.genrm", "nobody asks"),
        (('reward.function="genrm"',), "reward.function", r"there is no \[reward.judge\]"),
        (JUDGE[:1], "reward.judge", "nobody answers"),
        ((*JUDGE, "roles.genrm.count=0"), "roles.genrm.count", "nobody answers"),
        ((*JUDGE, 'reward.judge.prompt="{answer}?"'), "reward.judge.prompt", "the same for all"),
        ((*JUDGE, 'reward.judge.prompt="{completion!r}"'), "reward.judge.prompt", "plain field"),
        ((*JUDGE, 'reward.judge.pattern="("'), "reward.judge.pattern", "no regular expression"),
        ((*JUDGE, 'reward.judge.pattern="x*"'), "reward.judge.pattern", "matches nothing"),
        ((*JUDGE, "reward.judge.lowest=1"), "reward.judge.highest", "not below"),
        ((*JUDGE, "reward.judge.words={yes=2}"), "reward.judge.words", "from 0 to 1"),
        ((*JUDGE, "reward.judge.samples=4"), "reward.judge.samples", "4 times the same"),
        ((*JUDGE, "roles.genrm.follow=true", 'roles.genrm.model="model"'), "roles.genrm.follow", "another model"),
        (
            (*JUDGE, "roles.genrm.follow=true", 'roles.genrm.dtype="float32"', *BFLOAT16),
            "roles.genrm.dtype",
            "in one dtype",
        ),
    ],
)
def test_what_cannot_work_is_refused_at_its_key(toml: Path, overrides: tuple[str, ...], key: str, words: str) -> None:
    found = problems(toml, *overrides)
    assert key in found
    assert re.search(words, found[key].message), found[key].message


def test_settings_of_the_server_that_is_used_are_taken(toml: Path) -> None:
    table = 'roles.rollout.sglang={deterministic=true, device="cpu", arguments={log-level="info", enable-lora=false}}'
    assert problems(toml, SGLANG, table) == {}


def test_cuda_ipc_without_a_gpu_is_refused_before_anything_starts(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the placement, and where that is right by the machine."""
    ipc = 'publication.carrier="cuda_ipc"'
    assert "do not share one" in problems(toml, ipc)["publication.carrier"].message
    monkeypatch.setattr("relax_rt.roles.config.publication_checks.count_gpus", lambda: 0)
    shared = (ipc, "roles.trainer.gpus=0.5", "roles.rollout.gpus=0.5")
    found = problems(toml, *shared, preflight=True)
    assert re.search("no GPU|not installed", found["publication.carrier"].message)
    assert 'carrier = "auto"' in found["publication.carrier"].hint


def test_a_judge_is_tried_out_before_a_run(toml: Path) -> None:
    assert problems(toml, *JUDGE, preflight=True) == {}
    assert problems(toml, *JUDGE[:2], 'reward.function="mine.py:both"', preflight=True) == {}
    deaf = problems(toml, *JUDGE[:2], 'reward.function="mine.py:deaf"', preflight=True)
    assert "takes no `verdict`" in deaf["reward.function"].message
    nobody = problems(toml, *JUDGE, 'roles.genrm.model="modle"', preflight=True)
    assert "did you mean" in nobody["roles.genrm.model"].hint
    unknown = problems(toml, *JUDGE, 'reward.judge.prompt="{completion} {colour}"', preflight=True)
    assert "{colour}" in unknown["reward.judge.prompt"].message
    long = problems(toml, *JUDGE, "reward.judge.max_new_tokens=500", preflight=True)
    assert "its context is 512" in long["reward.judge.max_new_tokens"].message


def test_what_the_machine_lacks_is_reported_where_model_and_data_are_sound(toml: Path) -> None:
    server = ('roles.rollout.engine="sglang"', 'roles.rollout.sglang.python="nope/python"')
    found = problems(toml, *server, 'publication.directory="/proc/weights"', preflight=True)
    assert {"roles.rollout.sglang.python", "publication.directory"} <= found.keys()
