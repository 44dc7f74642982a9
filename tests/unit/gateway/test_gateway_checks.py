"""What [roles.gateway] may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors
from relax_rt.roles.gateway import checks

TINY = Path(__file__).parents[2] / "tiny_job" / "roles.toml"


def problems(*overrides: str) -> list[str]:
    try:
        load_config(TINY, ["roles.gateway.lag=1", *overrides])
    except ConfigErrors as errors:
        return [problem.message for problem in errors.problems]
    return []


def test_what_contradicts_itself_is_told_before_a_run() -> None:
    assert not problems()
    (found,) = problems("roles.gateway.port=8000", "roles.gateway.count=2")
    assert "one gateway would have it" in found
    (found,) = problems("roles.gateway.body_mib=64", "roles.gateway.held_mib=32")
    assert "large requests would never be taken" in found
    narrow = ("roles.gateway.session_tokens=16", "roles.gateway.max_new_tokens=16")
    (found,) = problems(*narrow)
    assert "leaves no room for a prompt" in found
    assert not problems(*narrow, "roles.gateway.count=0")
    (found,) = problems("roles.gateway.prot=1")
    assert "prot" in found


def test_packages_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    (found,) = problems()
    assert "starlette and uvicorn" in found
