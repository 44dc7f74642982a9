"""The plans of the shipped examples, whole, as text and as JSON.

After a change that is meant, renew the files and look at the difference:

    RELAX_RENEW_GOLDEN=1 python -m pytest tests/unit/roles/planning && git diff tests/unit/roles/planning/golden
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from relax_rt.cli.main import main

HERE = Path(__file__).parent
ROOT = HERE.parents[3]
RENEW = bool(os.environ.get("RELAX_RENEW_GOLDEN"))
EXAMPLES = ("h100x8_qwen3_8b", "h100x16_qwen3_30b_a3b")
FLOAT32 = ("--set", "roles.trainer.optimizer_dtype=float32")
"""What the README of the second example shows: float32 moments do not fit."""


@pytest.fixture(autouse=True)
def in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def compare(name: str, said: str) -> None:
    path = HERE / "golden" / name
    if RENEW:
        path.parent.mkdir(exist_ok=True)
        path.write_text(said)
    assert path.exists(), f"{path} is not there: renew it as test_plan_examples.py says"
    assert said == path.read_text(), f"{name} has changed: if it was meant to, renew it as test_plan_examples.py says"


def arguments(example: str) -> list[str]:
    return ["plan", f"examples/{example}/roles.toml", "--inventory", f"examples/{example}/nodes.toml"]


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_plan_as_text(capsys: pytest.CaptureFixture[str], example: str) -> None:
    assert main(arguments(example)) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "planned, not run on this hardware" in out.splitlines()[0]
    compare(f"{example}.txt", out)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_plan_as_json(capsys: pytest.CaptureFixture[str], example: str) -> None:
    assert main([*arguments(example), "--json"]) == 0
    out = capsys.readouterr().out
    compare(f"{example}.json", out)
    _adds_up(json.loads(out))


def _adds_up(plan: dict[str, Any]) -> None:
    assert plan["heading"] == "planned, not run on this hardware"
    slots = {slot["slot"]: slot for slot in plan["slots"]}
    for gpu in plan["gpus"]:
        parts = [part["bytes"] for share in gpu["shares"] for part in share["components"]]
        assert sum(parts) == gpu["total"] <= gpu["capacity"]
        for share in gpu["shares"]:
            assert gpu["gpu"] in slots[share["slot"]]["gpus"] and slots[share["slot"]]["node"] == gpu["node"]
    for host in plan["hosts"]:
        assert sum(part["bytes"] for part in host["components"]) == host["total"] <= host["capacity"]
    listening = [(port["node"], port["port"]) for port in plan["ports"]]
    assert len(listening) == len(set(listening))
    weights = [found for found in plan["communicators"] if found["kind"] == "weights"]
    assert sum(found["bytes"] for found in weights) == 2 * plan["model"]["parameters"]
    engines = {member for found in weights for member in found["members"][1:]}
    wanted = {
        f"{slot['slot']}@{slot['node']}:{gpu}"
        for slot in plan["slots"]
        if slot["kind"] in ("rollout", "evaluator")
        for gpu in slot["gpus"]
    }
    assert engines == wanted


def test_what_does_not_fit_is_reported_with_all_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments("h100x16_qwen3_30b_a3b"), *FLOAT32]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    compare("h100x16_qwen3_30b_a3b_float32.txt", err)
    readme = (ROOT / "examples/h100x16_qwen3_30b_a3b/README.md").read_text()
    assert err.strip() in readme


@pytest.mark.parametrize("example", EXAMPLES)
def test_up_and_validate_refuse_what_cannot_be_started_here(capsys: pytest.CaptureFixture[str], example: str) -> None:
    for command in ("validate", "up"):
        assert main([command, f"examples/{example}/roles.toml"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert "model lacks *.safetensors" in err


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_readme_is_headed_by_what_it_is(example: str) -> None:
    folder = ROOT / "examples" / example
    head, rest = (folder / "README.md").read_text().split("\n", 1)
    assert head.endswith("(planned, not run on this hardware)")
    assert f"examples/{example}/nodes.toml" in rest
