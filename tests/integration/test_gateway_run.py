"""Programs with the `openai` client ask the policy of a run that trains, and the run goes on undisturbed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tiny_run import TinyRun, steps_that_count

from relax_rt.cluster import discovery
from relax_rt.roles.gateway.access import endpoint
from relax_rt.roles.gateway.api import GatewayApi, SessionLimits

pytest.importorskip("torch")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 20


@pytest.fixture
def run(tmp_path: Path, runs: list[TinyRun]) -> TinyRun:
    overrides: dict[str, Any] = {
        "algorithm.steps": STEPS,
        "evaluation.items": 16,
        "roles.gateway.count": 1,
        "roles.gateway.max_new_tokens": 12,
    }
    runs.append(TinyRun(tmp_path / "run", **overrides).start())
    return runs[-1]


async def talk(client: Any, turns: int) -> list[str]:
    """A conversation in which each answer is part of the next question; versions of the answers."""
    messages: list[dict[str, Any]] = []
    versions = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn} + {turn + 1} ="})
        raw = await client.chat.completions.with_raw_response.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": raw.parse().choices[0].message.content})
        versions.append(raw.headers["x-relax-policy-version"])
    return versions


def token_of(path: Path) -> str:
    """Which nobody else may read."""
    assert path.stat().st_mode & 0o777 == 0o600
    return path.read_text().strip()


async def test_a_program_talks_to_the_policy_while_it_learns(run: TinyRun) -> None:
    where = run.run_dir / "gateway-0.json"
    await asyncio.to_thread(run.until, "the gateway", where.exists)
    found = json.loads(where.read_text())
    served = endpoint(run.run_dir)
    assert (served.base_url, served.api_key) == (found["url"], token_of(Path(found["token_file"])))
    assert [event["url"] for event in run.events("gateway_listening")] == [found["url"]]

    def shown() -> bool:
        return found["url"] in run.slot("gateway/0").get("waiting", "")

    await asyncio.to_thread(run.until, "the address in ps", shown)
    async with discovery.connect(run.run_dir) as discovered:
        gateway = discovered.actor("gateway/0", GatewayApi, timeout_s=60.0)
        access = await gateway.open("mine", SessionLimits(tokens=400))
        assert access.base_url == found["url"] == await gateway.where()
        async with (
            openai.AsyncOpenAI(base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=60) as episode,
            openai.AsyncOpenAI(base_url=served.base_url, api_key=served.api_key, max_retries=0) as free,
        ):
            versions = await talk(episode, 4)
            with pytest.raises(openai.BadRequestError, match="temperature"):
                await episode.chat.completions.create(
                    model="policy", messages=[{"role": "user", "content": "1"}], temperature=0
                )
            greedy = await free.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "1 + 1 ="}], temperature=0, logprobs=True
            )
            assert greedy.choices[0].logprobs and greedy.choices[0].logprobs.content
        made = (await gateway.close("mine")).episode
        committed = {record.version for record in await discovered.registry.versions()}
    (branch,) = made.branches
    assert made.counts.first == 1 and made.counts.continuation == 3 and made.counts.drift == 0
    assert len(branch.tokens) == len(branch.loss_mask) and sum(turn.role == "assistant" for turn in branch.turns) == 4
    sampled = {span.version for span in branch.versions}
    assert sampled <= committed and {str(v) for v in sampled} & set(versions)
    assert await asyncio.to_thread(run.wait) == 0, run.text()
    assert sorted(steps_that_count(run.records("step"))) == list(range(1, STEPS + 1))
    assert run.records("gateway")[-1]["answered"] >= 5
    assert not where.exists(), "it says where a gateway listens that is gone"
    assert not run.events("slot_failed")
