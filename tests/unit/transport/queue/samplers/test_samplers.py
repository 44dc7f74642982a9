"""Samplers: never more than wanted, nothing twice, no group split, the urgent first, always the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_rt.transport.queue.ledger.messages import LeaseRequest, SampleKey
from relax_rt.transport.queue.ledger.selection import BatchSampler, Selection, Unit, choose, choose_urgent_first
from relax_rt.transport.queue.samplers.builtin import SAMPLERS, load_sampler
from relax_rt.transport.rpc.errors import Refused

KINDS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in SAMPLERS),
    ("sequence_balanced", {"goal": "padding"}),
    ("sequence_balanced", {"batches": 2}),
    ("fifo", {"window": 3}),
    ("priority", {"window": 5}),
]

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
THOROUGH = settings(UNHURRIED, max_examples=400)


def sample(group: int, length: int = 10, **fields: Any) -> Unit:
    return Unit(group, (SampleKey(group, 0),), (length,), order=group, **fields)


def group(id_: int, lengths: tuple[int, ...], **fields: Any) -> Unit:
    return Unit(id_, tuple(SampleKey(id_, member) for member in range(len(lengths))), lengths, order=id_, **fields)


def ids(choice: Selection) -> list[int]:
    return [unit.id for unit in choice.units]


FIELDS = {
    "staleness": st.integers(-1, 3),
    "urgent": st.booleans(),
    "priority": st.floats(allow_infinity=True, allow_nan=True),
}


@st.composite
def ready(draw: st.DrawFn, *, groups: bool) -> list[Unit]:
    lengths = st.lists(st.integers(0, 100), min_size=1, max_size=4 if groups else 1)
    many = draw(st.lists(st.tuples(lengths, st.fixed_dictionaries(FIELDS)), max_size=30))
    return [group(at, tuple(lengths), **fields) for at, (lengths, fields) in enumerate(many)]


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, dict[str, Any], list[Unit], LeaseRequest]:
    name, options = draw(st.sampled_from(KINDS))
    tokens = draw(st.sampled_from([0, 0, 1, 90, 300, 2000]))
    wants_groups = draw(st.booleans())
    amount = draw(st.integers(0 if tokens else 1, 12))
    want = (
        LeaseRequest(groups=amount, tokens=tokens)
        if wants_groups and amount
        else LeaseRequest(samples=amount, tokens=tokens)
    )
    whole = bool(want.groups) or load_sampler(name, options).whole_groups
    return name, options, draw(ready(groups=whole)), want


@THOROUGH
@given(requests())
def test_rules_hold_whichever_sampler_it_is(request: tuple[str, dict[str, Any], list[Unit], LeaseRequest]) -> None:
    name, options, units, want = request
    sampler = load_sampler(name, options)
    for chosen in (choose(sampler, iter(units), want), choose_urgent_first(sampler, iter(units), want)):
        assert bool(chosen.units) != bool(chosen.waiting_on)
        keys = [unit.keys for unit in chosen.units]
        assert len(set(keys)) == len(keys) and all(unit in units for unit in chosen.units)
        tokens = sum(sum(unit.lengths) for unit in chosen.units)
        assert not want.tokens or tokens <= want.tokens or len(keys) == 1
        if want.groups:
            assert len(keys) <= want.groups
            assert want.tokens or len(keys) in (0, want.groups)
            # Work that is there is handed out: the one reason to wait is too few groups.
            assert chosen.units or len(units) < want.groups
        elif want.samples:
            assert sum(map(len, keys)) <= want.samples
            assert chosen.units or all(len(unit.keys) > want.samples for unit in units)
        again = choose if chosen.units == choose(sampler, iter(units), want).units else choose_urgent_first
        assert again(load_sampler(name, options), list(units), want) == chosen


@THOROUGH
@given(requests())
def test_urgent_ones_come_before_all_else(request: tuple[str, dict[str, Any], list[Unit], LeaseRequest]) -> None:
    name, _, units, want = request
    sampler = load_sampler(name, {})
    chosen = choose_urgent_first(sampler, iter(units), want).units
    flags = [unit.urgent for unit in chosen]
    assert flags == sorted(flags, reverse=True)
    left = [unit for unit in units if unit.urgent and unit not in chosen]
    if left and chosen and not all(flags):
        # Only a sampler that could not take any urgent one goes on without: each is larger than all that is wanted.
        assert not any(flags) and all(len(unit.keys) > want.samples for unit in left)
    if left and chosen and not want.tokens and any(flags):
        sizes = 1 if want.groups else min(len(unit.keys) for unit in left)
        taken = len(chosen) if want.groups else sum(len(unit.keys) for unit in chosen)
        assert taken + sizes > (want.groups or want.samples)


def test_fifo_takes_the_first_and_reads_no_further() -> None:
    read: list[int] = []

    def ready_ones() -> Iterator[Unit]:
        for at in range(100):
            read.append(at)
            yield sample(at)

    assert ids(choose(load_sampler("fifo", {}), ready_ones(), LeaseRequest(samples=3))) == [0, 1, 2]
    assert read == [0, 1, 2]
    fifo = load_sampler("fifo", {"window": 2})
    assert ids(choose(fifo, ready_ones(), LeaseRequest(samples=4))) == [0, 1, 2, 3]
    assert choose(fifo, [], LeaseRequest(samples=4)).waiting_on == "no sample is ready"
    lengths = [50, 30, 40, 10]
    budget = LeaseRequest(samples=9, tokens=100)
    assert ids(choose(fifo, [sample(at, length) for at, length in enumerate(lengths)], budget)) == [0, 1]


def test_token_budget_is_a_first_fit_in_which_the_oldest_always_goes() -> None:
    units = [sample(at, length) for at, length in enumerate([50, 30, 40, 20, 5])]
    sampler = load_sampler("token_budget", {})
    assert ids(choose(sampler, units, LeaseRequest(tokens=100))) == [0, 1, 3]
    assert ids(choose(sampler, units, LeaseRequest(samples=2, tokens=100))) == [0, 1]
    assert ids(choose(sampler, units, LeaseRequest(tokens=20))) == [0]
    assert ids(choose(load_sampler("token_budget", {"window": 3}), units, LeaseRequest(tokens=100))) == [0, 1]


def test_exactly_so_many_groups_or_none_but_a_budget_may_end_the_batch() -> None:
    units = [group(at, (10, 10)) for at in range(3)]
    for name in SAMPLERS:
        sampler = load_sampler(name, {})
        assert choose(sampler, units, LeaseRequest(groups=4)) == Selection([], "3 of 4 groups are ready")
        assert choose_urgent_first(sampler, units, LeaseRequest(groups=4)).waiting_on == "3 of 4 groups are ready"
        assert len(choose(sampler, units, LeaseRequest(groups=2)).units) == 2
        assert len(choose(sampler, units, LeaseRequest(groups=3, tokens=45)).units) == 2
        assert not choose(sampler, units, LeaseRequest(groups=4, tokens=45)).units


def test_what_the_urgent_ones_leave_of_a_budget_goes_to_others() -> None:
    units = [group(0, (50, 50)), group(1, (10, 10)), group(2, (10, 10), urgent=True)]
    for name in SAMPLERS:
        chosen = choose_urgent_first(load_sampler(name, {}), units, LeaseRequest(groups=3, tokens=50))
        # Group 0 is over the whole budget, and does not go although it is the oldest.
        assert ids(chosen) == [2, 1]


def test_whole_group_fills_a_number_of_samples_with_groups() -> None:
    sampler = load_sampler("whole_group", {})
    units = [group(0, (1, 1, 1)), group(1, (1, 1, 1)), group(2, (1, 1))]
    assert sampler.whole_groups
    assert ids(choose(sampler, units, LeaseRequest(samples=5))) == [0, 2]
    assert ids(choose(sampler, units, LeaseRequest(groups=2))) == [0, 1]
    waits = choose(sampler, units[:2], LeaseRequest(samples=2))
    assert waits == Selection([], "the smallest of 2 ready groups has 3 samples, 2 are asked for")


def test_freshest_first_prefers_the_least_stale_and_of_those_the_newest() -> None:
    units = [sample(at, staleness=staleness, urgent=staleness == 2) for at, staleness in enumerate([2, 0, 1, 0, 2])]
    sampler = load_sampler("freshest_first", {})
    assert ids(choose(sampler, units, LeaseRequest(samples=3))) == [3, 1, 2]
    assert ids(choose_urgent_first(sampler, units, LeaseRequest(samples=3))) == [4, 0, 3]


def test_priority_takes_the_highest_and_equal_ones_in_order() -> None:
    units = [sample(at, priority=priority) for at, priority in enumerate([1, float("nan"), 2, 1, -1])]
    assert ids(choose(load_sampler("priority", {}), units, LeaseRequest(samples=5))) == [2, 0, 3, 4, 1]


@UNHURRIED
@given(st.lists(st.integers(1, 1000), min_size=8, max_size=40), st.integers(2, 6))
def test_batches_balanced_by_total_differ_by_at_most_the_longest(lengths: list[int], size: int) -> None:
    units = [sample(at, length) for at, length in enumerate(lengths)]
    sampler = load_sampler("sequence_balanced", {})
    totals = []
    # Without new arrivals every batch is made of what the ones before left; the last ones have no choice any more.
    for _ in range(len(units) // size):
        ahead = units[: 8 * size][: len(units[: 8 * size]) // size * size]
        batch = choose(sampler, units, LeaseRequest(samples=size)).units
        assert units[0] in batch
        mean = sum(sum(unit.lengths) for unit in ahead) * size / len(ahead)
        totals.append(sum(sum(unit.lengths) for unit in batch))
        assert abs(totals[-1] - mean) <= max(lengths)
        units = [unit for unit in units if unit not in batch]


@UNHURRIED
@given(st.lists(st.integers(1, 60), min_size=2, max_size=9), st.integers(1, 4))
def test_least_padding_is_least(lengths: list[int], size: int) -> None:
    def padding(batch: Iterable[int]) -> int:
        rows = list(batch)
        return max(rows) * len(rows) - sum(rows)

    units = [sample(at, length) for at, length in enumerate(lengths)]
    chosen = choose(load_sampler("sequence_balanced", {"goal": "padding"}), units, LeaseRequest(samples=size)).units
    size = min(size, len(units))
    best = min(padding([lengths[0], *others]) for others in combinations(lengths[1:], size - 1))
    assert units[0] in chosen and len(chosen) == size
    assert padding(unit.lengths[0] for unit in chosen) == best


def test_sequence_balanced_by_tokens_alone() -> None:
    lengths = [100, 1, 1, 1, 100, 1, 1, 1, 100, 1, 1, 1]
    units = [sample(at, length) for at, length in enumerate(lengths)]
    by_total = choose(load_sampler("sequence_balanced", {}), units, LeaseRequest(tokens=103)).units
    assert sorted(unit.lengths[0] for unit in by_total) == [1, 1, 1, 100]
    alike = choose(load_sampler("sequence_balanced", {"goal": "padding"}), units, LeaseRequest(tokens=250)).units
    assert [unit.lengths[0] for unit in alike][:2] == [100, 100]


def test_a_length_that_is_needed_and_not_known_is_an_error_that_names_the_sample() -> None:
    units = [sample(0), sample(7, -1)]
    for name, want in (("fifo", LeaseRequest(samples=2, tokens=50)), ("sequence_balanced", LeaseRequest(samples=1))):
        with pytest.raises(Refused, match=r"of sample 7\.0: no producer said how many tokens"):
            choose(load_sampler(name, {}), units, want)
    assert ids(choose(load_sampler("fifo", {}), units, LeaseRequest(samples=2))) == [0, 7]


@pytest.mark.parametrize(
    "want",
    [LeaseRequest(), LeaseRequest(samples=-1), LeaseRequest(groups=-2, samples=3), LeaseRequest(samples=1, tokens=-5)],
)
def test_a_request_for_nothing_is_refused(want: LeaseRequest) -> None:
    with pytest.raises(Refused, match=r"lease: (neither|it asks for)"):
        choose(load_sampler("fifo", {}), [sample(0)], want)


class Faulty:
    """A sampler of a user, with what it does wrong."""

    whole_groups = False

    def __init__(self, fault: str = "", twice: int = 1) -> None:
        self.fault, self.twice = fault, twice

    def choose(self, units: Iterable[Unit], want: LeaseRequest) -> Selection:
        pool = list(units)
        if self.fault == "raises":
            raise KeyError("tokens")
        chosen = {
            "twice": [pool[0], pool[0]],
            "more": pool,
            "foreign": [sample(99)],
            "tokens": pool[:2],
        }
        return Selection(chosen.get(self.fault, pool[: want.samples or want.groups]))


@pytest.mark.parametrize(
    ("fault", "want", "message"),
    [
        ("raises", LeaseRequest(samples=2), "it raised KeyError: 'tokens'"),
        ("twice", LeaseRequest(samples=2), "it chose a sample twice"),
        ("more", LeaseRequest(samples=2), "it chose 4 samples, 2 are wanted"),
        ("more", LeaseRequest(groups=3), "it chose 4 groups, 3 are wanted"),
        ("tokens", LeaseRequest(groups=3), "it chose 2 groups, 3 are wanted"),
        ("tokens", LeaseRequest(samples=3, tokens=15), "it chose 20 tokens, 15 are wanted"),
        ("foreign", LeaseRequest(samples=2), "it chose a sample that it was not offered"),
    ],
)
def test_a_faulty_sampler_is_named_and_the_queue_goes_on(fault: str, want: LeaseRequest, message: str) -> None:
    with pytest.raises(Refused, match=f"sampler Faulty: {message}"):
        choose(Faulty(fault), [sample(at) for at in range(4)], want)


def test_samplers_of_ones_own_are_named_by_module_or_file(tmp_path: Path) -> None:
    made = load_sampler(f"{__name__}:Faulty", {"twice": 3})
    assert type(made).__name__ == "Faulty" and vars(made)["twice"] == 3
    (tmp_path / "beside_it.py").write_text("")
    with pytest.raises(Refused, match=r"did you mean 'beside_it.py:Last'\? A file is named with its ending"):
        load_sampler("beside_it:Last", {}, tmp_path)
    (tmp_path / "mine.py").write_text(
        "import msgspec\n"
        "from relax_rt.transport.queue.ledger.selection import Selection\n"
        "class Last(msgspec.Struct):\n"
        "    skip: int = 0\n"
        "    whole_groups: bool = False\n"
        "    def choose(self, units, want):\n"
        "        return Selection(list(units)[::-1][self.skip : self.skip + want.samples])\n"
        "class Anything:\n"
        "    def __init__(self, **options): self.whole_groups = options['whole']\n"
        "    def choose(self, units, want): return Selection([])\n"
        "class Nothing: pass\n"
    )
    last = load_sampler("mine.py:Last", {"skip": 1}, tmp_path)
    assert ids(choose(last, [sample(at) for at in range(5)], LeaseRequest(samples=2))) == [3, 2]
    assert load_sampler(f"{tmp_path}/mine.py:Anything", {"whole": True}).whole_groups
    with pytest.raises(Refused, match=r"mine.py:Nothing': it has no method `choose"):
        load_sampler("mine.py:Nothing", {}, tmp_path)
    with pytest.raises(Refused, match=r"mine.py:Last': there is no|has no 'Lats'.*did you mean 'Last'"):
        load_sampler("mine.py:Lats", {}, tmp_path)
    with pytest.raises(Refused, match=r"option 'skip' of sampler 'mine.py:Last': 'a' will not do: Expected `int`"):
        load_sampler("mine.py:Last", {"skip": "a"}, tmp_path)
    with pytest.raises(Refused, match=r"mine.py:Anything': it raised KeyError"):
        load_sampler("mine.py:Anything", {}, tmp_path)


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        ("fifoo", {}, r"sampler 'fifoo': there is none of that name \(did you mean 'fifo'\? there are fifo, whole_"),
        ("x", {}, r"sampler 'x': there is none of that name \(there are"),
        ("nowhere.at_all:X", {}, "nowhere.at_all cannot be imported: ModuleNotFoundError"),
        ("json:loads", {}, "it is a function, not a class"),
        ("fifo", {"windwo": 3}, r"option 'windwo' of sampler 'fifo': .*did you mean 'window'\? its options are window"),
        ("fifo", {"window": 0}, "option 'window' of sampler 'fifo': 0 will not do: Expected `int` >= 1"),
        ("priority", {"window": "many"}, "'many' will not do: Expected `int`, got `str`"),
        ("sequence_balanced", {"goal": "speed"}, "option 'goal' .*'speed' will not do: Invalid enum value"),
        ("sequence_balanced", {"batches": 2.5}, "option 'batches' .*2.5 will not do"),
        (f"{__name__}:Faulty", {"fualt": 1}, r"option 'fualt' .*did you mean 'fault'\? its options are fault, twice"),
    ],
)
def test_a_wrong_name_or_option_is_an_error_that_says_what_there_is(
    path: str, options: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        load_sampler(path, options)


def test_every_sampler_keeps_to_the_protocol() -> None:
    made: list[BatchSampler] = [kind() for kind in SAMPLERS.values()]
    assert [sampler.whole_groups for sampler in made] == [name == "whole_group" for name in SAMPLERS]
