"""Routing rows of episodes through the gateway: each position has the row of the pass it was sampled from."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from gateway_world import RESPONSES_TOOL, ROW, TOKEN, Running, ask, client, echo, rows_of, running, until
from test_gateway_streams import after, part_by_httpx, script

from relax_rt.roles.agentic.tokens.types import Branch
from relax_rt.roles.gateway.api import ClosedSession, SessionLimits
from relax_rt.roles.gateway.role import GatewayRole
from relax_rt.roles.rollout.engines.routing import PART_TOKENS
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.transport.rpc.errors import Refused


def closed(world: Running) -> ClosedSession:
    """As it comes to whoever plays the episode."""
    found = world.sessions.close("episode-1")
    return msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=ClosedSession)


def check(branch: Branch, orders: list[int]) -> None:
    """Its rows are those that these orders brought, one after the other, up to the position before its last."""
    expected, at = b"", 0
    for order, turn in zip(orders, (turn for turn in branch.turns if turn.response), strict=True):
        expected += rows_of(order, at, turn.end - 1)
        at = turn.end - 1
    assert branch.routing == expected and len(expected) == ROW * (len(branch.tokens) - 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_each_answer_has_the_rows_that_the_episode_lacks(stream: bool) -> None:
    async with running(echo) as world, client(world, world.episode(routing=True)) as api:
        messages: list[Any] = []
        for words in ("hello", "go on", "and now?"):
            messages += ask(words)
            made: Any = await api.chat.completions.create(model="policy", messages=messages, stream=stream)
            text = "".join([c.choices[0].delta.content or "" async for c in made]) if stream else None
            messages.append({"role": "assistant", "content": text or made.choices[0].message.content})
        orders = world.engine.orders
        (branch,) = closed(world).episode.branches
    check(branch, [1, 2, 3])
    assert all(order.routing and order.chunk_tokens == (32 if stream else PART_TOKENS) for order in orders)
    ends = [turn.end for turn in branch.turns if turn.response]
    assert [order.rows_from for order in orders] == [0, ends[0] - 1, ends[1] - 1]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_stop_string_cuts_off_has_no_rows(stream: bool) -> None:
    async with running(echo) as world, client(world, world.episode(routing=True)) as api:
        how: dict[str, Any] = {"model": "policy", "messages": ask("hello"), "stop": ["said"], "stream": stream}
        made: Any = await api.chat.completions.create(**how)
        if stream:
            assert [chunk async for chunk in made]
        (branch,) = closed(world).episode.branches
        assert sum(branch.loss_mask) == len("You said") < len("You said hello.")
    check(branch, [1])


async def test_parallel_answers_have_rows_of_their_own() -> None:
    async with running(echo) as world, client(world, world.episode(routing=True)) as api:
        both = (await api.chat.completions.create(model="policy", messages=ask("hello"), n=2)).choices
        messages = [*ask("hello"), {"role": "assistant", "content": both[1].message.content}, *ask("go on")]
        await api.chat.completions.create(model="policy", messages=messages)
        first, second = closed(world).episode.branches
    # They say the same: the conversation goes on from the newest.
    check(first, [1])
    check(second, [2, 3])


@pytest.mark.parametrize("hold", [True, False])
async def test_an_abandoned_answer_has_the_rows_of_its_trained_part(hold: bool) -> None:
    async with running(script) as world, client(world, key := world.episode(routing=True)) as api:
        said = (await api.chat.completions.create(model="policy", messages=ask("first"))).choices[0].message.content
        begun = [*ask("first"), {"role": "assistant", "content": said}, *ask("go")]
        await part_by_httpx(world, key, begun, hold=hold)
        if hold:
            await until(lambda: world.engine.ended_early)
        world.engine.gate.set()
        await api.chat.completions.create(model="policy", messages=after(begun, "word wor"))
        (branch,) = closed(world).episode.branches
    check(branch, [1, 2, 3])
    assert [turn.end - turn.start for turn in branch.turns if turn.response][1] == len("word wor")


async def test_rows_are_not_requested_otherwise() -> None:
    async with running(echo) as world:
        async with client(world, world.episode()) as api:
            await api.chat.completions.create(model="policy", messages=ask("hello"))
        async with client(world, TOKEN) as api:
            await api.chat.completions.create(model="policy", messages=ask("hello"))
            await api.completions.create(model="policy", prompt="hello")
            await api.responses.create(model="policy", input="hello", tools=[RESPONSES_TOOL])
        assert len(world.engine.orders) == 4 and not any(order.routing for order in world.engine.orders)
        assert closed(world).episode.branches[0].routing == b""


async def test_a_session_that_needs_rows_is_refused_without_them() -> None:
    role = SimpleNamespace(config=SimpleNamespace(roles={"rollout": RolloutSettings()}))
    with pytest.raises(Refused, match=r"'mine' with routing rows: roles\.rollout\.routing is false"):
        await GatewayRole.open(cast(Any, role), "mine", SessionLimits(routing=True))
