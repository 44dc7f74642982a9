"""Checks of [roles.gateway], and the address by which programs and nodes reach a gateway."""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import openai
import pytest
from gateway_world import TOKEN, ask, echo, running

from relax_rt import Runtime
from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors
from relax_rt.roles.gateway import settings as checks
from relax_rt.roles.gateway.access import FILE, run_token
from relax_rt.transport.rpc.errors import RelaxError

TINY = Path(__file__).parents[3] / "tiny_job" / "roles.toml"


def problems(*overrides: str) -> list[str]:
    try:
        load_config(TINY, ["roles.gateway.lag=1", *overrides])
    except ConfigErrors as errors:
        return [problem.message for problem in errors.problems]
    return []


def test_contradicting_settings_are_refused() -> None:
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


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    (found,) = problems()
    assert "starlette and uvicorn" in found


def test_the_remote_url_follows_the_listening_address() -> None:
    pytest.importorskip("uvicorn")
    from relax_rt.roles.gateway.server import listen, remote_url_of, url_of

    for host, here, there in (
        ("127.0.0.1", "http://127.0.0.1:{}", ""),
        ("0.0.0.0", "http://127.0.0.1:{}", "http://10.0.0.7:{}"),
        ("127.0.0.2", "http://127.0.0.2:{}", ""),
    ):
        with listen(host, 0) as one:
            port = one.getsockname()[1]
            assert (url_of(one), remote_url_of(one, "10.0.0.7")) == (here.format(port), there.format(port))
    with listen("0.0.0.0", 0) as one:
        assert remote_url_of(one, "fd00::7").startswith("http://[fd00::7]:")


async def test_a_program_beside_a_run_calls_its_policy(tmp_path: Path) -> None:
    run = Runtime("roles.toml")
    run.run_dir = tmp_path
    with pytest.raises(RelaxError, match=r"gateway-0\.json \(a run with \[roles.gateway\] has one"):
        run.gateway()
    (tmp_path / FILE).write_text(TOKEN + "\n")
    (tmp_path / FILE).chmod(0o600)
    assert run_token(tmp_path) == TOKEN
    async with running(echo) as world:
        told = {"url": f"{world.url}/v1", "token_file": str(tmp_path / FILE), "models": ["policy"]}
        (tmp_path / "gateway-0.json").write_text(json.dumps(told))
        found = run.gateway()
        assert found.models == ("policy",) and TOKEN not in repr(found)
        async with openai.AsyncOpenAI(base_url=found.base_url, api_key=found.api_key) as api:
            answer = await api.chat.completions.create(model="policy", messages=ask("hi"))
            assert answer.choices[0].message.content == "You said hi."
        async with anthropic.AsyncAnthropic(base_url=found.anthropic_url, api_key=found.api_key) as claude:
            said = await claude.messages.create(model="policy", max_tokens=50, messages=ask("hi"))
            assert said.content[0].type == "text" and said.content[0].text == "You said hi."
    (tmp_path / "gateway-0.json").write_text("{")
    with pytest.raises(RelaxError, match="cannot be read"):
        run.gateway()
    with pytest.raises(RelaxError, match=r"gateway-1\.json"):
        run.gateway("gateway/1")
