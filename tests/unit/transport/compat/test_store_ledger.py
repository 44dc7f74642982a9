"""The store's ledger as a pure state machine, against a naive model."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_driver import WHO, Driver

from relax_rt.transport.compat.store import ledger as ev
from relax_rt.transport.compat.store.api import FetchedRows, FoundRows, RowNames, StoreConfig, StoredRows, StoreSampler
from relax_rt.transport.compat.store.ledger import StoreLedger
from relax_rt.transport.memory.refs import BlockRef, Extent
from relax_rt.transport.rpc.errors import Refused


def places(found: FetchedRows) -> list[dict[str, tuple[int, int]]]:
    """For each row of an answer, where each field lies: (offset of the block, row)."""
    rows: list[dict[str, tuple[int, int]]] = []
    for segment in found.segments:
        for number in range(segment.rows):
            at: dict[str, tuple[int, int]] = {}
            for index, first in segment.parts:
                block = found.blocks[index]
                assert block.extent is not None
                at.update(dict.fromkeys(block.fields, (block.extent.offset, first + number)))
            rows.append({field: at[field] for field in found.fields})
    return rows


class StoreModel(RuleBasedStateMachine):
    """The ledger's store does what dictionaries do, and gives memory back exactly when nobody needs it."""

    KEYS = ("k0", "k1", "k2", "k3", "k4", "k5")
    FIELDS = ("x", "y", "z")

    @initialize()
    def begin(self) -> None:
        self.driver = Driver()
        self.rows: dict[str, dict[str, dict[str, tuple[int, int]]]] = {}
        self.tags: dict[tuple[str, str], dict[str, bytes]] = {}
        self.order: dict[str, list[str]] = {}
        self.consumed: dict[tuple[str, str], set[str]] = {}
        self.pins: dict[int, tuple[str, set[int]]] = {}
        self.alive = set(WHO)

    @rule(
        who=st.sampled_from("ab"),
        partition=st.sampled_from("pq"),
        keys=st.lists(st.sampled_from(KEYS), min_size=1, unique=True),
        fields=st.sets(st.sampled_from(FIELDS)),
        tag=st.none() | st.binary(max_size=2),
    )
    def put(self, who: str, partition: str, keys: list[str], fields: set[str], tag: bytes | None) -> None:
        if who not in self.alive or not (fields or tag is not None):
            return
        tags = [] if tag is None else [{f"t{len(tag)}": tag}] * len(keys)
        block = self.driver.block(who, len(keys), tuple(sorted(fields))) if fields else None
        stored = self.driver.call(who, ev.PutRows(RowNames(partition, keys), block=block, tags=tags))
        for number, key in enumerate(keys):
            row = self.rows.setdefault(partition, {}).setdefault(key, {})
            if key not in self.order.setdefault(partition, []):
                self.order[partition].append(key)
            if block is not None and block.extent is not None:
                row.update(dict.fromkeys(block.fields, (block.extent.offset, number)))
            own = self.tags.setdefault((partition, key), {})
            own.update(*tags[:1])
        assert stored.fields == sorted(set.intersection(*(set(self.rows[partition][key]) for key in keys)))
        assert stored.tags == [self.tags[partition, key] for key in keys]

    @rule(
        who=st.sampled_from("bc"),
        partition=st.sampled_from("pq"),
        keys=st.lists(st.sampled_from(KEYS), min_size=1),
        fields=st.none() | st.lists(st.sampled_from(FIELDS)),
        repeat=st.booleans(),
    )
    def get(self, who: str, partition: str, keys: list[str], fields: list[str] | None, repeat: bool) -> None:
        if who not in self.alive:
            return
        event = ev.GetRows(RowNames(partition, keys), fields)
        found = self.driver.call(who, event)
        if repeat:
            again = self.driver.call(who, event, seq=self.driver.seq[who])
            assert (again.pin, again.fields, places(again)) == (found.pin, found.fields, places(found))
        known = [self.rows[partition][key] for key in keys if key in self.rows.get(partition, {})]
        common = set.intersection(*map(set, known)) if known else set()
        want = sorted(common if fields is None else common.intersection(fields))
        assert len(found.indexes) == len(known)
        assert found.fields == want
        if want:
            assert places(found) == [{field: row[field] for field in want} for row in known]
            used = {block.extent.offset for block in found.blocks if block.extent is not None}
            self.pins[found.pin] = (who, used)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = data.draw(st.sampled_from(sorted(self.pins)))
        self.driver.call(self.pins.pop(pin)[0], ev.UnpinRows([pin]))

    @rule(partition=st.sampled_from("pq"), keys=st.lists(st.sampled_from(KEYS)))
    def clear(self, partition: str, keys: list[str]) -> None:
        self.driver.call("c", ev.ClearRows(RowNames(partition, keys)))
        for key in keys or list(self.rows.get(partition, {})):
            if self.rows.get(partition, {}).pop(key, None) is not None:
                self.order[partition].remove(key)
                self.tags.pop((partition, key), None)
                for (name, _), done in self.consumed.items():
                    if name == partition:
                        done.discard(key)
        if not keys:
            self.rows.pop(partition, None)
            self.consumed = {at: done for at, done in self.consumed.items() if at[0] != partition}

    @rule(
        partition=st.sampled_from("pq"),
        task=st.sampled_from("st"),
        fields=st.sets(st.sampled_from(FIELDS), min_size=1),
        batch=st.integers(1, 3),
    )
    def sample(self, partition: str, task: str, fields: set[str], batch: int) -> None:
        found = self.driver.call("c", ev.SampleRows(partition, task, sorted(fields), batch))
        done = self.consumed.setdefault((partition, task), set())
        rows = self.rows.get(partition, {})
        ready = [k for k in self.order.get(partition, []) if k in rows and k not in done and fields <= set(rows[k])]
        want = ready[:batch] if len(ready) >= batch else []
        assert found.keys == want
        assert bool(found.waiting_on) == (not want)
        done.update(want)

    @rule(partition=st.sampled_from("pq"), task=st.sampled_from([None, "s", "t"]))
    def reset(self, partition: str, task: str | None) -> None:
        assert self.driver.call("c", ev.ResetTask(partition, task)) == (partition in self.rows)
        for name, of in self.consumed:
            if name == partition and task in (None, of):
                self.consumed[name, of] = set()

    @precondition(lambda self: "b" in self.alive)
    @rule()
    def reader_dies(self) -> None:
        self.alive.remove("b")
        self.driver.gone("b")
        self.pins = {pin: held for pin, held in self.pins.items() if held[0] != "b"}

    @invariant()
    def lists_what_is_there(self) -> None:
        if hasattr(self, "driver"):
            listed = self.driver.ledger.rows.list_keys(None)
            assert listed == {p: {k: self.tags[p, k] for k in keys} for p, keys in self.rows.items()}

    @invariant()
    def memory_is_kept_while_it_is_needed(self) -> None:
        if hasattr(self, "driver"):
            table = self.driver.ledger.state.blocks
            live = {at for slab in table.live.values() for at in slab}
            assert self.driver.ledger.audit() == []
            needed = {at for rows in self.rows.values() for row in rows.values() for at, _ in row.values()}
            needed |= {at for _, used in self.pins.values() for at in used}
            assert live == needed
            assert {e.offset for e in self.driver.free}.isdisjoint(live)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            assert self.driver.replayed().snapshot() == self.driver.ledger.snapshot()
            assert StoreLedger(self.driver.ledger.snapshot()).audit() == []


StoreModel.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestStoreModel = StoreModel.TestCase


def test_rows_of_one_put_are_one_segment() -> None:
    driver = Driver()
    keys = [f"k{n}" for n in range(100)]
    driver.put("a", "p", keys, "x", "y")
    found = driver.get("b", RowNames("p", keys[10:60]), ["x"])
    assert [(segment.rows, segment.parts) for segment in found.segments] == [(50, [(0, 10)])]
    assert [segment.rows for segment in driver.get("b", RowNames("p", keys[::-2])).segments] == [1] * 50


def test_a_block_is_freed_when_all_its_fields_were_put_again() -> None:
    driver = Driver()
    driver.put("a", "p", ["k"], "x", "y")
    driver.put("a", "p", ["k"], "x")
    assert not driver.free
    driver.put("a", "p", ["k"], "y")
    assert [extent.offset for extent in driver.free] == [0]


def test_what_is_read_is_freed_only_when_it_is_not_read_any_more() -> None:
    driver = Driver()
    driver.put("a", "p", ["k"], "x")
    pin = driver.get("b", RowNames("p", ["k"])).pin
    assert driver.call("c", ev.UnpinRows([pin])) == []
    driver.call("c", ev.ClearRows(RowNames("p", ["k"])))
    assert driver.call("a", ev.UnpinRows([])) == []
    driver.call("b", ev.UnpinRows([pin]))
    assert [extent.offset for extent in driver.call("a", ev.UnpinRows([]))] == [0]


def test_a_repeated_call_gets_its_first_answer_and_changes_nothing() -> None:
    driver = Driver()
    first = driver.put("a", "p", ["k"], "x")
    put = ev.PutRows(RowNames("p", ["k"]), block=driver.block("a", 1, ("x",)))
    stored = driver.call("a", put)
    assert stored.indexes == first.indexes and len(stored.freed) == 1
    before = driver.ledger.snapshot()
    assert driver.call("a", put, seq=driver.seq["a"]) == stored
    assert driver.ledger.snapshot() == before

    taken = driver.call("a", ev.SampleRows("p", "t", ["x"], 1))
    assert driver.call("a", ev.SampleRows("p", "t", ["x"], 1), seq=driver.seq["a"]) == taken
    assert driver.sample("t", 1, "x") == []


def test_a_number_used_for_two_calls_gives_nothing_of_the_first_away() -> None:
    driver = Driver()
    driver.put("a", "p", ["k"], "x")
    found = driver.call("b", ev.GetRows(RowNames("p", ["k"])))
    seq = driver.seq["b"]
    assert driver.call("b", ev.SampleRows("p", "t", ["x"], 1), seq=seq) == FoundRows()
    assert driver.call("b", ev.ClearRows(RowNames("p", ["k"])), seq=seq) == []
    assert driver.call("b", ev.PutRows(RowNames("p", ["l"])), seq=seq) == StoredRows([], [], [])
    assert driver.get("c", RowNames("p", ["k"])).pin != found.pin
    assert driver.ledger.audit() == []
    assert driver.replayed().snapshot() == driver.ledger.snapshot()


@pytest.mark.parametrize(
    ("event", "names"),
    [
        (ev.PutRows(RowNames("p", ["a", "a"])), "named twice"),
        (ev.PutRows(RowNames("p", [""])), "empty"),
        (ev.PutRows(RowNames("p", ["a"], [1])), "exactly one"),
        (ev.PutRows(RowNames("p")), "exactly one"),
        (ev.PutRows(RowNames("p", ["a"]), new=-1), "exactly one"),
        (ev.PutRows(RowNames("", [], [99])), "not there"),
        (ev.PutRows(RowNames("p", ["a"]), tags=[{}, {}]), "tags for 2 rows"),
        (
            ev.PutRows(RowNames("p", ["a"]), block=BlockRef(Extent("a-0-1-1.slab", 0, 8), 2, ("x",))),
            "a block of 2 rows",
        ),
        (ev.PutRows(RowNames("p", ["a"]), block=BlockRef(Extent("b-0-2-1.slab", 0, 8), 1, ("x",))), "not its own"),
        (ev.PutRows(RowNames("p", ["a", "b", "c", "d"])), "3 are allowed"),
        (ev.SampleRows("p", "t", ["x"], 0), "at least one row"),
        (ev.ConfigureStore(StoreConfig(StoreSampler("mine"))), "no such sampler"),
    ],
)
def test_what_cannot_be_done_is_refused_and_leaves_no_trace(event: ev.StoreCall, names: str) -> None:
    driver = Driver(None if isinstance(event, ev.ConfigureStore) else StoreConfig(max_rows=3))
    driver.put("a", "p", ["there"], "x")
    before = driver.ledger.snapshot()
    with pytest.raises(Refused, match=names):
        driver.call("a", event)
    assert driver.ledger.snapshot() == before
    assert driver.ledger.audit() == []


def test_all_rows_are_lost_with_the_shared_memory() -> None:
    driver = Driver()
    driver.put("a", "p", ["k"], "x")
    driver.get("b", RowNames("p", ["k"]))
    driver.enter(ev.StoreOpened("another memory", ev.StoreLimits()))
    assert driver.ledger.rows.list_keys(None) == {}
    assert driver.ledger.audit() == []
    assert driver.replayed().snapshot() == driver.ledger.snapshot()


# --- samplers


def test_ranked_gives_one_batch_to_all_that_ask_for_it() -> None:
    driver = Driver(StoreConfig(StoreSampler("ranked")))
    driver.put("a", "p", list("klmn"), "x")
    first = driver.sample("t", 2, "x", rank=0, batch_index=0)
    other = driver.sample("t", 2, "x", rank=1, batch_index=0)
    assert first + other == [0, 1, 2, 3]
    assert driver.sample("t", 2, "x", rank=0, batch_index=0) == first
    assert driver.sample("t", 2, "x", rank=0, batch_index=1) == []
    with pytest.raises(Refused, match="needs a rank"):
        driver.sample("t", 2, "x")


def test_groups_are_whole_and_neighbours() -> None:
    driver = Driver(StoreConfig(StoreSampler("groups", 3)))
    driver.put("a", "q", ["other"], "x")
    driver.put("a", "p", [f"k{n}" for n in range(9)], "y")
    for key in ("k0", "k1", "k3", "k4", "k5", "k7"):
        driver.put("a", "p", [key], "x")
        driver.put("a", "q", [key], "x")
    found = driver.call("a", ev.SampleRows("p", "t", ["x"], 3))
    assert found.keys == ["k3", "k4", "k5"]
    assert driver.sample("t", 3, "x") == []
    driver.put("a", "p", ["k6", "k8"], "x")
    assert driver.call("a", ev.SampleRows("p", "t", ["x"], 3)).keys == ["k6", "k7", "k8"]
    with pytest.raises(Refused, match="multiple of the group size"):
        driver.sample("t", 4, "x")


def test_balanced_deals_whole_groups_of_like_sums_and_keeps_each_rank_its_share() -> None:
    driver = Driver(StoreConfig(StoreSampler("balanced", 2, 2)))
    lengths = [10, 10, 1, 1, 8, 8, 3, 3, 50, 50, 50, 50]
    tags = [{"total_lengths": msgspec.msgpack.encode(length)} for length in lengths]
    driver.put("a", "p", [f"k{n}" for n in range(12)], "x", tags=tags)
    one = driver.sample("t", 4, "x", rank=0, batch_index=0)
    # A rank that is ahead does not take what was dealt to another.
    ahead = driver.sample("t", 4, "x", rank=0, batch_index=1)
    two = driver.sample("t", 4, "x", rank=1, batch_index=0)
    assert sorted(one + two) == list(range(8)) and ahead == []
    assert [sum(lengths[i] for i in share) for share in (one, two)] == [22, 22]
    for share in (one, two):
        assert all(share[at] // 2 == share[at + 1] // 2 for at in (0, 2))
    assert driver.ledger.rows.consumed("p", "t").flags == [[True]] * 8 + [[False]] * 4


def test_expected_rows_count_as_not_consumed() -> None:
    driver = Driver(StoreConfig(expected=3))
    driver.put("a", "p", ["k"], "x")
    assert driver.sample("t", 1, "x") == [0]
    status = driver.ledger.rows.consumed("p", "t")
    assert (status.indexes, status.flags) == ([0, 1, 2], [[True], [False], [False]])
    assert driver.ledger.rows.produced("p", ["x"]).flags == [[True], [False], [False]]
    driver.put("a", "p", ["l", "m", "n"], "x")
    assert driver.sample("t", 3, "x") == [1, 2, 3]


def test_rows_that_are_cleared_are_forgotten_by_their_batches() -> None:
    driver = Driver(StoreConfig(StoreSampler("ranked")))
    for number in range(4):
        driver.put("a", "p", [f"k{number}", f"l{number}"], "x")
        driver.sample("t", 2, "x", rank=0, batch_index=number)
    partition = driver.ledger.state.partitions["p"]
    # Out of order: those before the first that is left are known by a number alone.
    driver.call("c", ev.ClearRows(RowNames("p", ["k1", "l1", "k3"])))
    assert partition.granted["t"] == {0: {0: [0, 1], 1: [], 2: [4, 5], 3: [7]}}
    driver.call("c", ev.ClearRows(RowNames("p", ["k0", "l0"])))
    assert (partition.granted["t"], partition.past["t"]) == ({0: {2: [4, 5], 3: [7]}}, {0: 2})
    driver.put("a", "p", ["new", "newer"], "x")
    for number, left in enumerate(([], [], [4, 5], [7], [8, 9])):
        found = driver.call("a", ev.SampleRows("p", "t", ["x"], 2, 0, number))
        assert (found.indexes, "rows are cleared" in found.waiting_on) == (left, not left)
    assert StoreLedger(driver.ledger.snapshot()).state == driver.replayed().state


def test_a_rank_that_there_is_not_gets_nothing_and_spoils_nothing() -> None:
    driver = Driver(StoreConfig(StoreSampler("balanced", 1, 2)))
    driver.put("a", "p", list("klmnopqr"), "x")
    first = driver.sample("t", 1, "x", rank=0, batch_index=0)
    before = driver.ledger.snapshot()
    for rank in (2, -1):
        with pytest.raises(Refused, match="2 ranks"):
            driver.sample("t", 1, "x", rank=rank, batch_index=0)
    assert driver.ledger.snapshot() == before
    assert driver.sample("t", 1, "x", rank=0, batch_index=0) == first


def test_expected_rows_take_no_memory() -> None:
    driver = Driver(StoreConfig(expected=1 << 20))
    size = len(driver.ledger.snapshot())
    for name in map(str, range(1000)):
        driver.put("a", name, ["k"], "x")
    assert len(driver.ledger.snapshot()) - size < 1 << 18


def test_a_put_over_several_partitions_is_ready_in_each() -> None:
    driver = Driver()
    one, two = driver.put("a", "p", ["k"], "y").indexes, driver.put("a", "q", ["k"], "y").indexes
    assert driver.sample("t", 1, "x") == []
    assert driver.call("b", ev.SampleRows("q", "t", ["x"], 1)).indexes == []
    driver.call("a", ev.PutRows(RowNames(indexes=one + two), block=driver.block("a", 2, ("x",))))
    assert driver.sample("t", 2, "x") == []
    assert driver.sample("t", 1, "x") == one
    assert driver.call("b", ev.SampleRows("q", "t", ["x"], 1)).indexes == two


def test_new_rows_are_ready_for_who_needs_no_field() -> None:
    driver = Driver()
    driver.put("a", "p", ["k"])
    assert driver.sample("t", 2) == []
    driver.put("a", "p", ["l"])
    assert driver.sample("t", 2) == [0, 1]


def test_a_partition_without_a_name_is_not_what_an_empty_answer_names() -> None:
    driver = Driver()
    driver.put("a", "", ["secret"], "x")
    driver.put("a", "p", ["k"], "x")
    driver.sample("t", 1, "x")
    assert driver.call("b", ev.ResetTask("p"))
    seq = driver.seq["b"]
    assert driver.call("b", ev.SampleRows("p", "t", ["x"], 1), seq=seq) == FoundRows()
    assert driver.call("b", ev.PutRows(RowNames("p", ["l"])), seq=seq) == StoredRows([], [], [])


def test_a_late_copy_of_a_read_keeps_no_memory() -> None:
    driver = Driver()
    driver.put("a", "p", ["k"], "x")
    event, pin = ev.GetRows(RowNames("p", ["k"])), driver.get("b", RowNames("p", ["k"])).pin
    seq = driver.seq["b"]
    driver.call("b", ev.UnpinRows([pin]))
    for number in (seq, driver.seq["b"]):
        assert driver.call("b", event, seq=number) == FetchedRows()
    assert driver.ledger.state.pins == {}


def test_the_oldest_blocks_that_nobody_reads_are_spilled_first() -> None:
    driver = Driver(limits=ev.StoreLimits(capacity_bytes=128, spill_bytes=1 << 10, high_water=0.5))
    for key in "klm":
        driver.put("a", "p", [key], "x")
        if key == "k":
            assert driver.ledger.to_spill() == []
            driver.get("b", RowNames("p", ["k"]))
    # Two rows fill the capacity; the third one waits.
    assert driver.ledger.state.blocks.payload_bytes == 128
    ((id_, extent),) = driver.ledger.to_spill()
    assert extent.offset == 64 and driver.ledger.to_spill({id_}) == []
    moved = Extent("spill-1-1.slab", 0, 64)
    assert driver.enter(ev.BlocksSpilled([(id_, moved)])).reply == []
    assert [block.extent for block in driver.get("c", RowNames("p", ["l"])).blocks] == [moved]
    assert driver.call("a", ev.UnpinRows([])) == [extent]
    driver.put("a", "p", ["m"], "x")
    driver.call("c", ev.ClearRows(RowNames("p", ["m"])))
    assert driver.enter(ev.BlocksSpilled([(id_ + 1, Extent("spill-1-2.slab", 0, 64))])).reply == [
        Extent("spill-1-2.slab", 0, 64)
    ]
    assert driver.ledger.audit() == [] and driver.replayed().snapshot() == driver.ledger.snapshot()
