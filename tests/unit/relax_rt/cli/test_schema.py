"""The description of roles.toml is itself a roles.toml."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from relax_rt.cli.main import main
from relax_rt.cli.schema import as_json_schema, as_toml
from relax_rt.config.job import load_job
from relax_rt.config.schema import RoleSettings
from relax_rt.config.validation import validate


def test_what_is_described_are_the_defaults() -> None:
    job = load_job("rl")
    text = as_toml(job)
    needed = {"name = …": 'name = "a"', "path = …": 'path = "m"', "environment = …": 'environment = "m:n"'}
    for blank, value in needed.items():
        text = text.replace(blank, value)
    data = tomllib.loads(text)
    roles = data.pop("roles")
    assert validate(job.Config, data) == validate(
        job.Config,
        {"run": {"name": "a"}, "model": {"path": "m"}, "reward": {}, "data": {}},
    )
    assert RoleSettings(**roles["NAME"]) == RoleSettings()
    for kind, settings in job.Roles.items():
        assert settings(**roles.get(kind, {})) == settings(), kind


def test_every_key_of_a_role_is_reported() -> None:
    text = as_toml(load_job("rl"))
    for name in RoleSettings.model_fields:
        assert f"\n{name} = " in text or f"\n# {name} is not set" in text


def test_both_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["validate", "--schema"]) == 0
    assert "[algorithm]" in capsys.readouterr().out
    assert main(["validate", "--schema", "--json"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json.loads(json.dumps(as_json_schema(load_job("rl"))))
    assert "rollout" in schema["properties"]["roles"]["properties"]
    references = set(re.findall(r'"\$ref": "#/\$defs/(\w+)"', json.dumps(schema)))
    assert "SglangTable" in references and references <= schema["$defs"].keys(), "an editor resolves each from the top"
    Path("roles.toml").write_text('[run]\njob = "nothing"\n')
    assert main(["validate", "--schema"]) == 1
