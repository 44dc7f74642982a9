"""How a program beside a run finds its gateway."""

from __future__ import annotations

import json
from pathlib import Path

import anthropic
import openai
import pytest
from gateway_world import TOKEN, running
from test_gateway_openai import ask, echo

from relax_rt import Runtime
from relax_rt.roles.gateway.access import FILE, run_token
from relax_rt.transport.rpc.errors import RelaxError


async def test_a_program_that_began_a_run_calls_its_policy(tmp_path: Path) -> None:
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
