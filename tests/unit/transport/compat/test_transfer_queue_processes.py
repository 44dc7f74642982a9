"""The interface among processes: who starts the queue and who finds it, and what happens when one dies."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensordict", reason="transport.compat needs tensordict: pip install 'relax-rt[transferqueue]'")

import torch
from tensordict import NonTensorStack, TensorDict

import relax_rt.transport.compat.transfer_queue as tq
from relax_rt.transport.base.folder import find
from relax_rt.transport.compat.transfer_queue import connection
from relax_rt.transport.rpc.errors import OutOfSpace, Refused

FAR_END = Path(__file__).with_name("compat_far_end.py")
ROWS, WIDTH = 64, 2048
KEYS = [f"far{n}" for n in range(ROWS)]


def until(true: Callable[[], Any], what: str, wait_s: float = 120) -> None:
    deadline = time.monotonic() + wait_s
    while not true():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.delenv("RELAX_TRANSFER_QUEUE", raising=False)
    yield tmp_path / "queue"
    tq.close()


def begin(folder: Path, **relax: Any) -> Any:
    return tq.init({"controller": {"polling_mode": True}, "relax": {"folder": str(folder), **relax}})


def batch(value: float = 0.0, rows: int = ROWS) -> TensorDict:
    return TensorDict({"x": torch.full((rows, WIDTH), value)}, batch_size=rows)


def used_bytes() -> int:
    return connection.current().store.writer.statistics().used_bytes


def far_end(*arguments: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, FAR_END, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() in ("put", "holding", "started")
    return process


def ended(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


# --- memory


def test_what_is_read_lies_in_shared_memory_and_is_freed_after_its_last_tensor(folder: Path) -> None:
    begin(folder)
    tq.kv_batch_put(KEYS, "p", batch(1.0))
    held = tq.kv_batch_get(KEYS, "p")
    row = held["x"].values()[WIDTH : 2 * WIDTH]
    tq.kv_clear(KEYS, "p")
    assert used_bytes() > 0, "its memory is still looked at"
    tq.kv_batch_put(KEYS, "p", batch(2.0))
    del held
    gc.collect()
    assert float(row.sum()) == WIDTH, "a view of a view keeps the memory"
    tq.kv_clear(KEYS, "p")
    del row
    gc.collect()

    def freed() -> bool:
        tq.kv_put("k", "q", tag={})
        return used_bytes() == 0

    until(freed, "the memory is free again")


def test_a_large_read_copies_nothing_and_a_small_one_pins_nothing(folder: Path) -> None:
    begin(folder)
    tq.kv_batch_put(KEYS, "p", batch(1.0))
    for keys, copies in ((KEYS, False), (KEYS[10:60], False), (KEYS[:2], True), (KEYS[::2], True)):
        data = tq.kv_batch_get(keys, "p")
        pointer = data["x"].values().data_ptr()
        lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if _holds(line, pointer)]
        assert lines and ("/dev/shm/" not in lines[0]) == copies, (len(keys), lines)
        del data


def _holds(line: str, pointer: int) -> bool:
    first, _, end = line.split()[0].partition("-")
    return int(first, 16) <= pointer < int(end, 16)


def test_a_put_waits_for_memory_and_fails_with_the_reason(folder: Path) -> None:
    begin(folder, capacity_bytes=4 << 20)
    store = connection.current().store
    store._space_wait_s = 0.1
    names = iter(range(99))

    def put() -> None:
        name = next(names)
        tq.kv_batch_put([f"{name}/{key}" for key in KEYS], "p", batch())

    with pytest.raises(OutOfSpace, match="are in use"):
        while True:
            put()
    full = len(tq.kv_list("p")["p"])
    assert full >= 6 * ROWS
    with pytest.raises(Refused, match="put fewer rows at once"):
        tq.kv_batch_put([str(n) for n in range(ROWS * 9)], "p", batch(rows=ROWS * 9))
    store._space_wait_s = 20.0
    late = threading.Timer(0.2, lambda: tq.kv_clear([f"0/{key}" for key in KEYS], "p"))
    late.start()
    put()
    late.join()
    assert len(tq.kv_list("p")["p"]) == full


# --- processes


def test_another_process_finds_the_queue_by_the_environment(folder: Path) -> None:
    begin(folder)
    process = far_end("put")
    process.communicate(timeout=120)
    data = tq.kv_batch_get(KEYS, "far")
    assert torch.equal(data["x"].values(), torch.arange(ROWS * WIDTH * 1.0))
    assert tq.kv_list("far")["far"]["far0"] == {"by": "far end"}


def test_what_a_dead_process_reads_is_freed_and_what_it_put_stays(folder: Path) -> None:
    begin(folder)
    ended(far_end("put"))
    tq.kv_batch_put(KEYS, "far", batch(3.0))
    holder = far_end("hold")
    tq.kv_clear(KEYS, "far")
    assert used_bytes() > 0
    holder.send_signal(signal.SIGKILL)
    holder.communicate()

    def freed() -> bool:
        tq.kv_put("k", "q", tag={})
        return used_bytes() == 0

    until(freed, "the dead reader's memory is free again")


def test_a_killed_broker_recovers_all_that_was_put(folder: Path) -> None:
    begin(folder)
    tq.kv_batch_put(KEYS, "p", batch(1.0), [{"n": n} for n in range(ROWS)])
    held = tq.kv_batch_get(KEYS, "p")
    old = find(folder).pid
    for round_ in range(2):
        os.kill(find(folder).pid, signal.SIGKILL)
        tq.kv_put(f"late{round_}", "p", fields={"x": torch.ones(WIDTH)})
    assert find(folder).pid != old
    assert torch.equal(tq.kv_batch_get(KEYS, "p")["x"].values(), held["x"].values())
    assert set(tq.kv_list("p")["p"]) == {*KEYS, "late0", "late1"}


def test_the_queue_ends_with_the_process_that_started_it(folder: Path) -> None:
    process = far_end("start", str(folder))
    place = find(folder)
    assert Path(place.shm_dir).is_dir()
    ended(process)
    until(lambda: not Path(f"/proc/{place.pid}").exists() and not Path(place.shm_dir).exists(), "the broker ends")


def test_closing_ends_what_was_started_and_init_begins_anew(folder: Path) -> None:
    tq.init()
    own = Path(os.environ["RELAX_TRANSFER_QUEUE"])
    tq.kv_put("k", "p", tag={"a": 1})
    place = find(own)
    tq.close()
    assert not own.exists() and not Path(place.shm_dir).exists() and "RELAX_TRANSFER_QUEUE" not in os.environ
    with pytest.raises(tq.NotInitialized, match=r"call init\(\) first"):
        tq.kv_list()
    tq.close()
    begin(folder)
    assert tq.kv_list() == {}


def test_many_threads_and_loops_use_one_connection(folder: Path) -> None:
    begin(folder)
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for i in range(20):
                tq.kv_put(f"{n}/{i}", "p", fields={"x": torch.full((3,), n)}, tag={"i": i})
                assert tq.kv_batch_get(f"{n}/{i}", "p")["x"].values().tolist() == [n] * 3
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(tq.kv_list("p")["p"]) == 80


# --- what is not offered, and how it says so


@pytest.mark.parametrize(
    ("conf", "what"),
    [
        ({"backend": {"storage_backend": "MooncakeStore"}}, "storage backend MooncakeStore"),
        ({"metrics": {"enabled": True}}, "metrics.enabled"),
        ({"controller": {"sampler": type("Mine", (tq.BaseSampler,), {})()}}, "sampler Mine"),
    ],
)
def test_settings_that_are_not_offered_say_so(conf: dict[str, Any], what: str, folder: Path) -> None:
    with pytest.raises(tq.NotOffered, match=what) as raised:
        tq.init({**conf, "relax": {"folder": str(folder)}})
    assert isinstance(raised.value, NotImplementedError)
    assert not folder.exists()


def test_calls_that_are_not_offered_say_so(folder: Path) -> None:
    begin(folder)
    for call in (
        lambda: tq.save_checkpoint(folder / "x"),
        lambda: tq.load_checkpoint(folder / "x"),
        lambda: tq.get_client().save_storage_checkpoint("x"),
        lambda: tq.kv_put("k", "p", fields=TensorDict({"in": batch()}, batch_size=ROWS)[:1]),
    ):
        with pytest.raises(tq.NotOffered):
            call()
    assert tq.get_metrics_endpoint() is None


@pytest.mark.parametrize(
    ("sampler", "error"), [("Nobody's", ValueError), (5, TypeError), (tq.SeqlenBalancedSampler, None)]
)
def test_samplers_are_checked_before_anything_starts(sampler: Any, error: type[Exception] | None, folder: Path) -> None:
    conf = {"controller": {"sampler": sampler}, "relax": {"folder": str(folder)}}
    if error is None:
        assert tq.init(conf).controller.sampler is sampler
        return
    with pytest.raises(error, match="sampler"):
        tq.init(conf)


def test_the_number_of_samples_can_be_bounded(folder: Path) -> None:
    simple = {"SimpleStorage": {"total_storage_size": 3}}
    tq.init({"backend": simple, "relax": {"folder": str(folder)}})
    tq.kv_batch_put(["a", "b"], "p", batch(rows=2))
    with pytest.raises(Refused, match="2 rows are there and 3 are allowed"):
        tq.kv_batch_put(["c", "d"], "p", batch(rows=2))
    tq.kv_batch_put(["b", "c"], "p", batch(rows=2))
    assert set(tq.kv_list("p")["p"]) == {"a", "b", "c"}


def test_without_polling_too_few_samples_are_an_error_after_a_while(folder: Path) -> None:
    tq.init({"relax": {"folder": str(folder)}})
    tq.kv_put("k", "p", fields={"x": torch.ones(1)})
    client = tq.get_client()
    late = threading.Timer(0.1, lambda: tq.kv_put("l", "p", fields={"x": torch.ones(1)}))
    late.start()
    assert client.get_meta(["x"], 2, "p", task_name="t").size == 2
    with pytest.raises(tq.NotReady, match="1 rows for 't', of which 0 are ready"):
        client.wait_meta(["x"], 1, "p", "t", {}, 0.05)


# --- micro-batches


def test_micro_batches_are_cut_with_their_meta(folder: Path) -> None:
    begin(folder)
    fields = TensorDict(
        {
            "ids": torch.nested.as_nested_tensor([torch.arange(n) for n in (1, 2, 3, 4, 5)], layout=torch.jagged),
            "s": torch.arange(5.0),
            "t": NonTensorStack(*"abcde"),
        },
        batch_size=5,
    )
    tq.kv_batch_put(list("abcde"), "p", fields, [{"n": n} for n in range(5)])
    dataset = tq.StreamingDataset(None, 5, 3, ["ids", "s", "t"], "p", "train", 0)
    first, second = next(items := iter(dataset)), next(items)
    for (data, meta), numbers in ((first, [0, 1, 2]), (second, [3, 4])):
        assert data["s"].tolist() == numbers and [tags["n"] for tags in meta.custom_meta] == numbers
        assert [len(row) for row in data["ids"].unbind()] == [n + 1 for n in numbers]
        assert data["t"] == list("abcde"[numbers[0] : numbers[-1] + 1])


def test_the_last_batch_reaches_every_process_of_a_rank(folder: Path) -> None:
    tq.init({"controller": {"sampler": tq.RankAwareSampler, "polling_mode": True}, "relax": {"folder": str(folder)}})
    tq.kv_batch_put(list("abcd"), "p", batch(rows=4))
    sets = [tq.StreamingDataset(None, 2, 2, ["x"], "p", "t", 0, should_check_consumption_status=True) for _ in range(2)]
    assert [[meta.global_indexes for _, meta in one] for one in sets] == [[[0, 1], [2, 3]]] * 2


def test_balanced_shares_for_ranks(folder: Path) -> None:
    sampler = tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2)
    tq.init({"controller": {"sampler": sampler, "polling_mode": True}, "relax": {"folder": str(folder)}})
    tags = [{"total_lengths": n} for n in (9, 9, 1, 1, 5, 5, 5, 5)]
    tq.kv_batch_put([f"k{n}" for n in range(8)], "p", batch(rows=8), tags)
    client = tq.get_client()
    shares = [
        client.get_meta(["x"], 4, "p", task_name="t", sampling_config={"dp_rank": rank, "batch_index": 0})
        for rank in (0, 1)
    ]
    assert [sum(tags["total_lengths"] for tags in share.custom_meta) for share in shares] == [20, 20]
