"""What every engine must do. A test module imports all of it and gives the fixture `driver` (see harness.Driver).

The driver's engine may be at any version and may have served other tests before.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from harness import (
    CONTEXT,
    STOPS,
    VOCABULARY,
    Driver,
    MemorySource,
    damaged,
    gone,
    lacking,
    model_of,
    of_another_dtype,
    of_another_shape,
    raises,
    reference,
    renamed,
    torch,
)

from relax_rt.roles.rollout.engines.base import Completion, GroupRequest, Partial
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Corrupt, Gone, Refused, RelaxError

ENDLESS: frozenset[int] = frozenset()


async def test_logprobs_are_those_of_a_plain_forward_pass(driver: Driver) -> None:
    asked = [
        driver.request([7, 8, 9], 4),
        driver.request([11] * 20, 3, new=30),
        driver.request([3], 5, new=7),
        driver.request([60, 61, 62, 63], 4, temperature=1.3),
        driver.request([60, 61, 62, 63, 64], 2, temperature=0.6),
        driver.request(range(10, 110), 8, new=40),
    ]
    done = await driver.complete(*asked)
    assert len(done) == 26
    for request, completion in zip([r for r in asked for _ in r.seeds], done, strict=True):
        driver.check(request, completion)
        ended = completion.tokens[-1] in STOPS
        assert completion.finish_reason == ("stop" if ended else "length")
        assert ended or len(completion.tokens) == request.max_new_tokens
        assert not STOPS & set(completion.tokens[:-1])


async def test_any_of_several_stop_tokens_ends_a_completion_and_is_part_of_it(driver: Driver) -> None:
    stops = frozenset(range(VOCABULARY // 2))
    asked = driver.request([9, 4], 8, new=100, stop_ids=stops)
    done = await driver.complete(asked)
    assert all(c.finish_reason == "stop" and c.tokens[-1] in stops and not stops & set(c.tokens[:-1]) for c in done)
    assert len({c.tokens[-1] for c in done}) > 1


async def test_members_of_a_group_differ(driver: Driver) -> None:
    done = await driver.complete(driver.request([7, 8, 9], 8, stop_ids=ENDLESS, temperature=2.0))
    assert len({tuple(c.tokens) for c in done}) == 8


async def test_greedy_is_the_most_likely_token(driver: Driver) -> None:
    asked = driver.request([7, 8, 9], temperature=0.0, new=20)
    (got,) = await driver.complete(asked)
    with torch.no_grad():
        logits = model_of(driver.folder, driver.version)(torch.tensor([[*asked.prompt, *got.tokens]])).logits
    assert logits[0, 2:-1].argmax(-1).tolist() == got.tokens
    driver.check(asked, got)


async def test_tokens_depend_on_the_seed_and_not_on_the_neighbours(driver: Driver) -> None:
    if not driver.traits.seeded:
        pytest.skip("the engine's draws depend on what runs beside")
    seeds = tuple(range(500, 504))
    alone = await driver.complete(driver.request([7, 8, 9], seeds=seeds, new=40))
    beside = driver.request([7, 8, 9], seeds=seeds[::-1], new=40)
    driver.submit(driver.request([40, 41], 3, new=60), beside, driver.request([7, 8], 5, new=50))
    again = await driver.finished(beside)
    assert [c.tokens for c in alone] == [c.tokens for c in again[::-1]]


async def test_chunks_are_consecutive_and_add_up_to_the_completion(driver: Driver) -> None:
    asked = driver.request([30, 31], 3, new=50, chunk_tokens=8, stop_ids=ENDLESS)
    done = await driver.complete(asked)
    for member, completion in enumerate(done):
        mine = [c for c in driver.chunks if (c.request, c.member) == (asked.id, member)]
        assert len(mine) >= 50 // 8
        assert [c.start for c in mine] == [0, *(c.start + len(c.tokens) for c in mine)][: len(mine)]
        assert [c.finish_reason for c in mine] == [""] * (len(mine) - 1) + ["length"]
        assert all(len(c.logprobs) == len(c.tokens) for c in mine)
        assert all(
            (c.versions[0].start, c.versions[-1].end) == (c.start, c.start + len(c.tokens)) for c in mine if c.tokens
        )
        assert [t for c in mine for t in c.tokens] == completion.tokens
        driver.check(asked, completion)


async def test_without_chunks_only_the_end_is_reported(driver: Driver) -> None:
    asked = driver.request([30, 31], 2, new=30)
    await driver.complete(asked)
    assert sum(c.request == asked.id for c in driver.chunks) == 2


def as_partial(completion: Completion, count: int) -> Partial:
    spans = tuple(
        VersionSpan(s.start, min(s.end, count), s.version, s.kv_version) for s in completion.versions if s.start < count
    )
    return Partial(tuple(completion.tokens[:count]), tuple(completion.logprobs[:count]), spans)


async def test_a_partial_is_resumed_behind_its_tokens(driver: Driver) -> None:
    whole = driver.request([7, 8, 9], 4, new=60, stop_ids=ENDLESS)
    done = await driver.complete(whole)
    cuts = (1, 17, 59, 0)
    rest = driver.request(
        whole.prompt,
        seeds=whole.seeds,
        new=60,
        stop_ids=ENDLESS,
        partials=(*(as_partial(c, cut) for c, cut in zip(done[:3], cuts, strict=False)), None),
        chunk_tokens=10,
    )
    again = await driver.complete(rest)
    for completion, before, cut in zip(again, done, cuts, strict=True):
        assert completion.tokens[:cut] == before.tokens[:cut]
        assert completion.logprobs[:cut] == before.logprobs[:cut]
        assert len(completion.tokens) == 60
        driver.check(rest, completion)
        first = next(c for c in driver.chunks if (c.request, c.member) == (rest.id, completion.member))
        assert first.start == cut
        if driver.traits.seeded:
            assert completion.tokens == before.tokens, "a resumed sequence draws what an uninterrupted one draws"


async def test_a_partial_that_is_complete_ends_at_once(driver: Driver) -> None:
    def had(*tokens: int) -> Partial:
        return Partial(tokens, (-1.0,) * len(tokens), (VersionSpan(0, len(tokens), 0, 0),))

    asked = driver.request([7], 2, new=3, partials=(had(9, 5), had(9, 9, 9)))
    stopped, full = await driver.complete(asked)
    assert (stopped.tokens, stopped.finish_reason) == ([9, 5], "stop")
    assert (full.tokens, full.finish_reason) == ([9, 9, 9], "length")


async def test_an_aborted_request_keeps_its_tokens(driver: Driver) -> None:
    asked = driver.request([1, 2], 2, new=400, stop_ids=ENDLESS)
    other = driver.request([1, 2, 3], 1, new=100, stop_ids=ENDLESS)
    driver.submit(asked, other)
    await driver.tokens(12)
    driver.engine.abort(asked.id)
    for completion in await driver.finished(asked):
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.tokens) < 400
        driver.check(asked, completion)
    (unharmed,) = await driver.finished(other)
    assert (unharmed.finish_reason, len(unharmed.tokens)) == ("length", 100)


async def test_an_aborted_request_that_waits_ends_empty(driver: Driver) -> None:
    members = driver.traits.members
    first = driver.request([1, 2], members, new=200, stop_ids=ENDLESS)
    waits = driver.request([3, 4], 3, new=200, stop_ids=ENDLESS)
    driver.submit(first, waits)
    await driver.tokens(members)
    assert driver.engine.load().waiting == 3
    driver.engine.abort(waits.id)
    driver.engine.abort(10**9)  # not there: nothing happens
    assert [(c.finish_reason, c.tokens) for c in await driver.finished(waits)] == [("abort", [])] * 3
    assert all(len(c.tokens) == 200 for c in await driver.finished(first))


async def test_nothing_is_generated_while_paused(driver: Driver) -> None:
    asked = driver.request([1, 2], 3, new=200, stop_ids=ENDLESS, chunk_tokens=1000)
    driver.submit(asked)
    await driver.tokens(9)
    await driver.engine.pause("a test")
    load = driver.engine.load()
    assert load.paused == "a test"
    told = sum(len(c.tokens) for c in driver.chunks if c.request == asked.id)
    assert told >= 9, "what was sampled has been told when pause returns"
    late = driver.request([3], 1, new=5, stop_ids=ENDLESS)
    driver.submit(late)
    await asyncio.sleep(0.2)
    assert driver.engine.load().tokens_generated == load.tokens_generated
    assert told == sum(len(c.tokens) for c in driver.chunks if c.request == asked.id)
    await driver.engine.resume()
    assert driver.engine.load().paused == ""
    for completion in await driver.finished(asked):
        assert len(completion.tokens) == 200
        driver.check(asked, completion)
    await driver.finished(late)


async def test_a_request_aborted_while_paused_ends_at_once(driver: Driver) -> None:
    members = driver.traits.members
    asked = driver.request([1, 2], members, new=200, stop_ids=ENDLESS)
    waits = driver.request([3, 4], 2, new=200, stop_ids=ENDLESS)
    driver.submit(asked, waits)
    await driver.tokens(3 * members)
    await driver.engine.pause("a test")
    load = driver.engine.load()
    for request in (asked, waits):
        driver.engine.abort(request.id)
        assert all(c.finish_reason == "abort" for c in await driver.finished(request))
    assert driver.engine.load().tokens_generated == load.tokens_generated
    await driver.engine.resume()


async def test_recompute_gives_each_version_its_own_logprobs_over_several_swaps(driver: Driver) -> None:
    asked = [
        driver.request([7, 8, 9], 3, new=240, stop_ids=ENDLESS, chunk_tokens=16),
        driver.request(range(20, 60), 2, new=200, stop_ids=ENDLESS, temperature=0.8),
        driver.request([3], 1, new=300, stop_ids=ENDLESS),
    ]
    began = driver.version
    driver.submit(*asked)
    committed = []
    for _ in range(3):
        await driver.tokens(120)
        source = driver.source()
        await driver.engine.prepare(source)
        swap = await driver.engine.commit(source.record, "recompute")
        assert swap.version == source.record.version == driver.version
        assert swap.recomputed_tokens > 0
        committed.append(source.record.version)
    done = await driver.finished(*asked)
    for request, completion in zip([r for r in asked for _ in r.seeds], done, strict=True):
        assert [s.version for s in completion.versions] == [began, *committed]
        assert [s.kv_version for s in completion.versions] == [began, *committed]
        driver.check(request, completion)


async def test_keep_marks_the_tokens_sampled_on_an_older_cache(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = driver.request(range(20, 40), 8, new=300, stop_ids=ENDLESS)
    began = driver.version
    driver.submit(asked)
    await driver.tokens(240)
    source = driver.source()
    await driver.engine.prepare(source)
    swap = await driver.engine.commit(source.record, "keep")
    assert swap.recomputed_tokens == 0
    done = await driver.finished(asked)
    gaps = []
    for completion in done:
        driver.check(asked, completion)
        old, new = completion.versions
        assert (old.version, old.kv_version) == (began, began)
        assert (new.version, new.kv_version) == (source.record.version, began)
        wanted = reference(driver.folder, new.version, asked.prompt, completion.tokens, asked.temperature)
        gaps.append((torch.tensor(completion.logprobs) - wanted)[new.start :].abs())
    shortest = min(len(gap) for gap in gaps)
    together = torch.stack([gap[:shortest] for gap in gaps])
    # The new weights are really sampled from, on a cache that is really the old one.
    assert float(together.max()) > 10 * driver.traits.tolerance
    with capsys.disabled():
        sys.stdout.write(f"\n{driver.engine.name}, KV kept: mean log-probability gap by tokens since the swap\n")
        for start, end in ((0, 1), (1, 8), (8, 32), (32, 128), (128, shortest)):
            if start < end <= shortest:
                sys.stdout.write(f"  {start:>4}-{end:<4} {float(together[:, start:end].mean()):.3f}\n")


async def test_a_prompt_computed_under_older_weights_is_not_shared_with_new_groups(driver: Driver) -> None:
    prompt = range(50, 120)
    before = driver.request(prompt, 2, new=10)
    await driver.complete(before)
    long = driver.request(prompt, 1, new=300, stop_ids=ENDLESS)
    driver.submit(long)
    await driver.tokens(5)
    source = driver.source()
    await driver.engine.prepare(source)
    await driver.engine.commit(source.record, "keep")
    # The same prompt, one that begins with it, and its beginning; `long` still holds it under the old weights.
    after = [driver.request(prompt, 2), driver.request([*prompt, 9, 9], 2), driver.request([*prompt][:40], 2)]
    done = await driver.complete(*after)
    for request, completion in zip([r for r in after for _ in r.seeds], done, strict=True):
        assert {(s.version, s.kv_version) for s in completion.versions} == {(source.record.version,) * 2}
        driver.check(request, completion)
    driver.engine.abort(long.id)
    await driver.finished(long)


async def test_prompts_with_a_common_prefix_share_it_correctly(driver: Driver) -> None:
    prompt = [*range(30, 90)]
    first = driver.request(prompt, 2, new=20)
    await driver.complete(first)
    asked = [
        driver.request(prompt, 3, new=30),
        driver.request([*prompt, 4, 4, 4], 2, new=30),
        driver.request([*prompt[:30], 99, 98], 2, new=30),
        driver.request(prompt[:20], 2, new=30),
        driver.request([77], 1, new=30),
    ]
    done = await driver.complete(*asked)
    for request, completion in zip([r for r in asked for _ in r.seeds], done, strict=True):
        driver.check(request, completion)


async def test_generation_goes_on_while_weights_are_fetched(driver: Driver) -> None:
    more = threading.Event()
    source = driver.source(lambda folder, version: MemorySource(folder, version, lambda: _wait(more)))
    asked = driver.request([1, 2], 2, new=400, stop_ids=ENDLESS)
    driver.submit(asked)
    fetching = asyncio.create_task(driver.engine.prepare(source))
    await driver.tokens(40)
    assert not fetching.done()
    more.set()
    await fetching
    before = driver.version
    await driver.tokens(10)
    assert driver.version == before, "only commit swaps"
    driver.engine.abort(asked.id)
    assert all(s.version == before for c in await driver.finished(asked) for s in c.versions)


def _wait(event: threading.Event) -> None:
    assert event.wait(60)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (damaged, Corrupt),
        (gone, Gone),
        (of_another_shape, Refused),
        (of_another_dtype, Refused),
        (renamed, Refused),
        (lacking, Refused),
    ],
)
async def test_unusable_weights_leave_the_engine_unchanged(
    driver: Driver, make: Callable[[Path, int], MemorySource], error: type[RelaxError]
) -> None:
    before = driver.version
    running = driver.request([1, 2], 2, new=100, stop_ids=ENDLESS)
    driver.submit(running)
    source = driver.source(make)
    await raises(error, driver.engine.prepare(source))
    await raises(Refused, driver.engine.commit(source.record, "keep"))
    assert driver.version == before
    for completion in await driver.finished(running):
        assert {s.version for s in completion.versions} == {before}
        driver.check(running, completion)
    good = driver.source()
    await driver.engine.prepare(good)
    await driver.engine.commit(good.record, "keep")
    asked = driver.request([1, 2], 1)
    driver.check(asked, (await driver.complete(asked))[0])


async def test_only_the_prepared_version_can_be_committed(driver: Driver) -> None:
    one, other = driver.source(), driver.source()
    await driver.engine.prepare(one)
    await raises(Refused, driver.engine.commit(other.record, "keep"))
    await driver.engine.prepare(other)
    await raises(Refused, driver.engine.commit(one.record, "keep"))
    await driver.engine.commit(other.record, "keep")
    await raises(Refused, driver.engine.commit(other.record, "keep"))
    assert driver.version == other.record.version


async def test_a_swap_while_paused_applies_from_the_next_token_on(driver: Driver) -> None:
    asked = driver.request([1, 2], 2, new=120, stop_ids=ENDLESS)
    driver.submit(asked)
    await driver.tokens(20)
    await driver.engine.pause("a swap")
    before, source = driver.version, driver.source()
    await driver.engine.prepare(source)
    await driver.engine.commit(source.record, "recompute")
    await driver.engine.resume()
    for completion in await driver.finished(asked):
        assert [s.version for s in completion.versions] == [before, source.record.version]
        driver.check(asked, completion)


async def test_load_reports_outstanding_tokens(driver: Driver) -> None:
    idle = driver.engine.load()
    assert (idle.running, idle.waiting, idle.outstanding_tokens, idle.paused) == (0, 0, 0, "")
    had = Partial((9,) * 10, (-1.0,) * 10, (VersionSpan(0, 10, 0, 0),))
    members = driver.traits.members
    asked = driver.request([1, 2], members, new=300, stop_ids=ENDLESS, chunk_tokens=4)
    behind = driver.request([1, 2], 2, new=50, stop_ids=ENDLESS, partials=(had, None))
    driver.submit(asked, behind)
    total = members * 300 + 90
    assert 0 < driver.engine.load().outstanding_tokens <= total
    await driver.tokens(20 * members)
    load = driver.engine.load()
    assert (load.running, load.waiting) == (members, 2)
    assert 90 < load.outstanding_tokens < total
    assert 0 < load.kv_used <= 1 or driver.engine.name == "embedded"
    for request in (asked, behind):
        driver.engine.abort(request.id)
    await driver.finished(asked, behind)
    await driver.until(lambda: driver.engine.load().running == 0)
    load = driver.engine.load()
    assert (load.running, load.waiting, load.outstanding_tokens) == (0, 0, 0)
    assert load.tokens_generated > idle.tokens_generated


async def test_a_completion_may_reach_the_models_last_position(driver: Driver) -> None:
    whole = driver.request([7] * (CONTEXT - 40), 2, new=40, stop_ids=ENDLESS)
    last = driver.request([9] * (CONTEXT - 1), 1, new=1, stop_ids=ENDLESS)
    driver.submit(whole, last)
    await driver.tokens(2)
    await driver.engine.pause("a look")
    await driver.engine.resume()
    for request, completion in zip((whole, whole, last), await driver.finished(whole, last), strict=True):
        assert (len(completion.tokens), completion.finish_reason) == (request.max_new_tokens, "length")
        driver.check(request, completion)


async def test_routing_rows_are_refused_by_an_engine_that_was_not_started_for_them(driver: Driver) -> None:
    with pytest.raises(Refused, match="was not started for them"):
        driver.engine.submit([driver.request([7], 1, routing=True)])


async def test_an_invalid_request_is_refused_as_a_whole(driver: Driver) -> None:
    good = driver.request([1], 1)

    def refused(bad: GroupRequest, match: str) -> None:
        with pytest.raises(Refused, match=match):
            driver.engine.submit([good, bad])

    short = Partial((9, 9), (-1.0,), (VersionSpan(0, 2, 0, 0),))
    unknown = Partial((9, 9), (-1.0, -1.0), (VersionSpan(0, 1, 0, 0),))
    whole = Partial((9, 9), (-1.0, -1.0), (VersionSpan(0, 2, 0, 0),))
    refused(driver.request([1] * (CONTEXT - 5), 1), f"context is {CONTEXT} tokens")
    refused(driver.request([], 1), "both are needed")
    refused(driver.request([1], 0), "both are needed")
    refused(driver.request([1], 1, new=0), "at least one token")
    refused(driver.request([1, VOCABULARY], 1), "vocabulary")
    refused(driver.request([1, -1], 1), "token -1")
    outside = Partial((9, -2), (-1.0, -1.0), (VersionSpan(0, 2, 0, 0),))
    refused(driver.request([1], 1, partials=(outside,)), "token -2")
    for seed in (-1, 1 << 64):
        refused(driver.request([1], seeds=(seed,)), "seed")
    for temperature in (float("nan"), float("inf"), -1.0, 1e-40):
        refused(driver.request([1], 1, temperature=temperature), "temperature")
    refused(driver.request([1], 2, partials=(None,)), "1 partials of 2 members")
    refused(driver.request([1], 1, partials=(short,)), "1 log-probabilities")
    refused(driver.request([1], 1, partials=(unknown,)), "do not cover")
    refused(driver.request([1], 1, new=1, partials=(whole,)), "max_new_tokens is 1")
    refused(good, "in the engine already")
    load = driver.engine.load()
    assert (load.running, load.waiting, load.outstanding_tokens) == (0, 0, 0)
    await driver.complete(good)  # its number is free


async def test_memory_is_released_only_while_idle_and_comes_back(driver: Driver) -> None:
    asked = driver.request([7, 8, 9], 2, new=200, stop_ids=ENDLESS)
    driver.submit(asked)
    await driver.tokens(3)
    await raises(Refused, driver.engine.release_memory())
    driver.engine.abort(asked.id)
    await driver.finished(asked)
    await driver.until(lambda: driver.engine.load().running == 0)
    await driver.engine.release_memory()
    with pytest.raises(Refused, match="released"):
        driver.engine.submit([driver.request([7], 1)])
    await raises(Refused, driver.engine.prepare(driver.source()))
    await driver.engine.resume_memory()
    again = driver.request([7, 8, 9], 2, new=20)
    for completion in await driver.complete(again):
        driver.check(again, completion)
