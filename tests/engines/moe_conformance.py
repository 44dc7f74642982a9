"""What every engine must do with a mixture of experts, whose routing rows it tells. A test module imports all of it and
gives the fixture `driver`, over an engine that was started for them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from harness import VOCABULARY, Driver, raises, routed

from relax_rt.roles.rollout.engines.base import Completion, GroupRequest, Partial
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused

ENDLESS: frozenset[int] = frozenset()


def rows_of(driver: Driver, completion: Completion) -> np.ndarray:
    """All rows of a completion: the prompt's, then those of its tokens."""
    assert driver.engine.routing is not None
    return driver.engine.routing.rows(completion.prompt_routing, completion.routing)


def check(driver: Driver, request: GroupRequest, completion: Completion, kept: int = 0) -> None:
    """Tokens have the log-probabilities of their versions, and every row is that of the version that its next token was
    sampled from, by a plain forward pass.

    Args:
        kept: tokens of a partial, whose rows are its own affair.
    """
    driver.check(request, completion)
    ids = [*request.prompt, *completion.tokens]
    rows, before = rows_of(driver, completion), len(request.prompt) - 1
    assert rows.shape == (len(ids) - 1, 3, 2)
    first = next(span.version for span in completion.versions if span.end > kept)
    assert (rows[:before] == routed(driver.folder, first, ids)[:before]).all()
    for span in completion.versions:
        start, end = max(span.start, kept) + before, span.end + before
        if span.end > kept and span.kv_version == span.version:
            wrong = (rows[start:end] != routed(driver.folder, span.version, ids)[start:end]).any(axis=(1, 2))
            assert not wrong.any(), f"{wrong.sum()} of {len(wrong)} rows of version {span.version} are others"


async def test_rows_are_those_of_a_plain_forward_pass(driver: Driver) -> None:
    asked = [
        driver.request([7, 8, 9], 4, routing=True),
        driver.request(range(10, 60), 3, new=40, routing=True),
        driver.request([3], 2, new=7, routing=True),
        driver.request([*range(10, 60), 4, 4], 2, new=30, temperature=1.3, routing=True),
        driver.request([60, 61, 62], 2, new=50, stop_ids=ENDLESS, chunk_tokens=8, routing=True),
        driver.request([60, 61, 62, 63], 2),
    ]
    done = await driver.complete(*asked)
    for request, completion in zip([r for r in asked for _ in r.seeds], done, strict=True):
        if request.routing:
            check(driver, request, completion)
        else:
            assert (completion.routing, completion.prompt_routing) == (b"", b"")
            driver.check(request, completion)
    # Their prompts lie in the prefix cache now.
    again = [driver.request(range(10, 60), 2, routing=True), driver.request(range(10, 40), 2, routing=True)]
    done = await driver.complete(*again)
    for request, completion in zip([r for r in again for _ in r.seeds], done, strict=True):
        check(driver, request, completion)


async def test_rows_of_a_prompt_start_at_the_requested_position(driver: Driver) -> None:
    assert driver.engine.routing is not None
    prompt = range(10, 30)
    for start in (1, 7, len(prompt) - 1):
        asked = driver.request(prompt, 2, new=20, chunk_tokens=8, stop_ids=ENDLESS, routing=True, rows_from=start)
        for completion in await driver.complete(asked):
            (span,) = completion.versions
            rows = driver.engine.routing.rows(completion.prompt_routing, completion.routing)
            assert (rows == routed(driver.folder, span.version, [*prompt, *completion.tokens])[start:]).all()
            assert len(completion.prompt_routing) == (len(prompt) - 1 - start) * driver.engine.routing.row_bytes
    for start in (-1, len(prompt)):
        with pytest.raises(Refused, match=f"rows from position {start} on"):
            driver.engine.submit([driver.request(prompt, 1, routing=True, rows_from=start)])


async def test_a_chunk_has_a_row_for_each_token_and_the_first_those_of_the_prompt(driver: Driver) -> None:
    asked = driver.request([30, 31, 32, 33], 3, new=50, chunk_tokens=8, stop_ids=ENDLESS, routing=True)
    done = await driver.complete(asked)
    assert driver.engine.routing is not None
    size = driver.engine.routing.row_bytes
    for member, completion in enumerate(done):
        mine = [c for c in driver.chunks if (c.request, c.member) == (asked.id, member)]
        assert len(mine) >= 50 // 8 and [t for c in mine for t in c.tokens] == completion.tokens
        assert all(len(c.routing) == size * len(c.tokens) for c in mine)
        assert [len(c.prompt_routing) for c in mine] == [3 * size] + [0] * (len(mine) - 1)
        check(driver, asked, completion)


async def test_tokens_keep_their_rows_at_a_recomputation(driver: Driver) -> None:
    asked = [
        driver.request([7, 8, 9], 3, new=150, stop_ids=ENDLESS, chunk_tokens=16, routing=True),
        driver.request(range(20, 50), 2, new=150, stop_ids=ENDLESS, routing=True),
    ]
    began = driver.version
    driver.submit(*asked)
    committed = []
    for _ in range(2):
        await driver.tokens(100)
        source = driver.source()
        await driver.engine.prepare(source)
        await driver.engine.commit(source.record, "recompute")
        committed.append(source.record.version)
    done = await driver.finished(*asked)
    for request, completion in zip([r for r in asked for _ in r.seeds], done, strict=True):
        assert [s.version for s in completion.versions] == [began, *committed]
        check(driver, request, completion)
    old, new = (routed(driver.folder, v, done[0].tokens) for v in (began, committed[-1]))
    assert (old != new).any(), "versions route alike, so that nothing was tested"


async def test_with_kept_keys_and_values_every_token_has_a_row(driver: Driver) -> None:
    asked = driver.request(range(20, 40), 4, new=120, stop_ids=ENDLESS, routing=True)
    driver.submit(asked)
    await driver.tokens(80)
    source = driver.source()
    await driver.engine.prepare(source)
    await driver.engine.commit(source.record, "keep")
    for completion in await driver.finished(asked):
        assert [s.version for s in completion.versions][1:] == [source.record.version]
        check(driver, asked, completion)


async def test_a_partial_keeps_its_rows(driver: Driver) -> None:
    whole = driver.request([7, 8, 9], 3, new=60, stop_ids=ENDLESS, routing=True)
    done = await driver.complete(whole)
    assert driver.engine.routing is not None
    size, cuts = driver.engine.routing.row_bytes, (1, 17, 59)
    # Rows that no pass of this model gives, so that it shows whose they are.
    partials = tuple(as_partial(c, cut, bytes(size * cut)) for c, cut in zip(done, cuts, strict=True))
    rest = driver.request(
        whole.prompt, seeds=whole.seeds, new=60, stop_ids=ENDLESS, partials=partials, chunk_tokens=10, routing=True
    )
    for completion, before, cut in zip(await driver.complete(rest), done, cuts, strict=True):
        assert (completion.tokens[:cut], len(completion.tokens)) == (before.tokens[:cut], 60)
        assert completion.routing[: size * cut] == bytes(size * cut)
        check(driver, rest, completion, kept=cut)
        first = next(c for c in driver.chunks if (c.request, c.member) == (rest.id, completion.member))
        assert (first.start, len(first.prompt_routing)) == (cut, 2 * size)


def as_partial(completion: Completion, count: int, routing: bytes) -> Partial:
    spans = tuple(
        VersionSpan(s.start, min(s.end, count), s.version, s.kv_version) for s in completion.versions if s.start < count
    )
    return Partial(tuple(completion.tokens[:count]), tuple(completion.logprobs[:count]), spans, routing)


async def test_a_paused_and_aborted_request_keeps_its_rows(driver: Driver) -> None:
    asked = driver.request([1, 2], 2, new=400, stop_ids=ENDLESS, chunk_tokens=100, routing=True)
    driver.submit(asked)
    await driver.tokens(12)
    await driver.engine.pause("a test")
    told = [c for c in driver.chunks if c.request == asked.id]
    assert driver.engine.routing is not None
    assert sum(len(c.tokens) for c in told) >= 12, "what was sampled has been told when pause returns"
    assert all(len(c.routing) == driver.engine.routing.row_bytes * len(c.tokens) for c in told)
    await driver.engine.resume()
    await driver.tokens(12)
    driver.engine.abort(asked.id)
    for completion in await driver.finished(asked):
        assert completion.finish_reason == "abort" and 6 < len(completion.tokens) < 400
        check(driver, asked, completion)


async def test_a_partial_without_its_rows_is_refused(driver: Driver) -> None:
    had = Partial((9, 9), (-1.0, -1.0), (VersionSpan(0, 2, 0, 0),))
    asked = driver.request([7], 1, new=5, partials=(had,), routing=True)
    with pytest.raises(Refused, match="2 tokens and 0 bytes of routing rows"):
        driver.engine.submit([asked])
    await driver.complete(msgspec.structs.replace(asked, routing=False))


async def test_stacked_and_single_experts_are_the_same_weights(driver: Driver) -> None:
    source = driver.source()
    names = [entry.name for entry in source.manifest.layout.entries]
    assert "model.layers.0.mlp.experts.gate_up_proj" in names, "as the trainer publishes them"
    await driver.engine.prepare(source)
    await raises(Refused, driver.engine.commit(msgspec.structs.replace(source.record, version=10**6), "keep"))
    await driver.engine.commit(source.record, "keep")
    asked = driver.request(range(VOCABULARY // 2), 2, routing=True)
    for completion in await driver.complete(asked):
        assert {s.version for s in completion.versions} == {source.record.version}
        check(driver, asked, completion)
