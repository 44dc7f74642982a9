"""The same calls on our interface and on the package that it follows; run as a program, it prints the answers.

``python compat_cases.py MODULE``: MODULE is ``transfer_queue`` or ``relax_rt.transport.compat.transfer_queue``. Each
answer is plain data that says what a user can see of it: types, dtypes, shapes, values, classes of errors.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from tensordict import NonTensorStack, TensorDict

os.environ.setdefault("TQ_CONTROLLER_GET_METADATA_CHECK_INTERVAL", "1")
Case = Callable[[Any], Any]
CASES: dict[str, Case] = {}
SAMPLED: dict[str, tuple[dict[str, Any], Callable[[Any], Any], Case]] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def sampled(sampler: Callable[[Any], Any], **controller: Any) -> Callable[[Case], Case]:
    """A case with a queue of its own, of this sampler."""

    def enter(function: Case) -> Case:
        SAMPLED[function.__name__] = (controller, sampler, function)
        return function

    return enter


def seen(value: Any) -> Any:
    """What a user sees of an answer, as plain data."""
    if isinstance(value, TensorDict):
        return {
            "batch": list(value.batch_size),
            "fields": {name: seen(value.get(name)) for name in sorted(value.keys())},
        }
    if isinstance(value, torch.Tensor):
        rows = [row.tolist() for row in value.unbind()] if value.is_nested else value.tolist()
        shape = None if value.is_nested else list(value.shape)
        return [
            type(value).__name__,
            str(value.dtype),
            str(value.layout),
            shape,
            value.dim(),
            value.is_contiguous(),
            rows,
        ]
    if isinstance(value, NonTensorStack):
        return ["NonTensorStack", [seen(item) for item in value.tolist()]]
    if isinstance(value, np.ndarray):
        return ["ndarray", str(value.dtype), value.tolist()]
    if type(value).__name__ == "KVBatchMeta":
        return [
            value.keys,
            seen(value.tags),
            value.partition_id,
            value.fields,
            value.extra_info,
            value.size,
            len(value),
        ]
    if type(value).__name__ == "BatchMeta":
        ready = [value.is_ready, value.production_status.tolist()]
        return [value.size, value.field_names, *ready, value.partition_ids, seen(value.custom_meta)]
    if isinstance(value, dict):
        return {str(key): seen(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [type(value).__name__, [seen(item) for item in value]]
    return value if isinstance(value, bool | int | float | str | type(None)) else repr(value)


def tried(work: Callable[[], Any]) -> Any:
    """The answer, or the error's nearest class of Python's own."""
    try:
        return seen(work())
    except Exception as error:  # noqa: BLE001
        return ["raised", next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")]


def batch(n: int = 3, **more: Any) -> TensorDict:
    fields = {"x": torch.arange(4 * n).reshape(n, 4), "score": torch.arange(n, dtype=torch.float32) / 2}
    return TensorDict({**fields, **more}, batch_size=n)


def jagged(*lengths: int) -> torch.Tensor:
    return torch.nested.as_nested_tensor(
        [torch.arange(n, dtype=torch.float32) + n for n in lengths], layout=torch.jagged
    )


# --- keys, fields, tags


@case
def put_one_of_everything(tq: Any) -> Iterator[Any]:
    fields = {
        "ids": torch.arange(3),
        "matrix": torch.ones(2, 3),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0),
        "flag": torch.tensor([True, False]),
        "bf16": torch.tensor([1.5], dtype=torch.bfloat16),
        "fp8": torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn).view(torch.int8),
        "i8": torch.tensor([-1], dtype=torch.int8),
        "half": torch.tensor([0.25], dtype=torch.float16),
        "text": "ein Wort, 一个词",
        "data": b"\x00\xff",
        "none": None,
        "number": 1.5,
        "list": [1, "a", None, [2.5]],
        "dict": {"a": {"b": [1, 2]}, "c": "d"},
        "array": np.arange(3, dtype=np.int32),
    }
    yield tq.kv_put("k", "one", fields=fields, tag={"score": 0.5, "ok": True, "of": ["a", 1]})
    yield tq.kv_batch_get("k", "one")
    yield tq.kv_batch_get(["k"], "one", select_fields="text")["text"][0]
    yield tq.kv_list("one")


@case
def put_a_batch(tq: Any) -> Iterator[Any]:
    text = NonTensorStack("one", "two", {"three": 3})
    keys = ["k0", "k1", "k2"]
    tags = [{"n": n, "who": "me"} for n in range(3)]
    yield tq.kv_batch_put(keys, "batch", batch(n=3, text=text, ragged=jagged(2, 5, 1)), tags)
    for wanted in (keys, keys[1:], ["k2", "k0"], ["k1", "k1"], "k1"):
        yield tq.kv_batch_get(wanted, "batch")
    yield tq.kv_batch_get(keys, "batch", select_fields=["ragged", "score"])
    yield tq.kv_list("batch")


@case
def put_many_dimensions(tq: Any) -> Iterator[Any]:
    rows = [torch.arange(2 * n, dtype=torch.int16).reshape(n, 2) for n in (1, 3, 2)]
    images = torch.arange(24, dtype=torch.uint8).reshape(3, 2, 2, 2)
    fields = {"images": images, "rows": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
    yield tq.kv_batch_put(["a", "b", "c"], "dims", TensorDict(fields, batch_size=3))
    yield tq.kv_batch_get(["a", "b", "c"], "dims")
    yield tq.kv_batch_get(["c", "a"], "dims")


@case
def put_again(tq: Any) -> Iterator[Any]:
    keys = ["k0", "k1", "k2"]
    yield tq.kv_batch_put(keys, "again", batch(), [{"a": 1, "b": 1}] * 3)
    yield tq.kv_batch_put(keys[:2], "again", TensorDict({"x": torch.ones(2, 7, dtype=torch.int64)}, batch_size=2))
    yield tq.kv_batch_get(keys, "again", select_fields="x")
    yield tq.kv_batch_put(keys[1:], "again", TensorDict({"new": torch.zeros(2, 1)}, batch_size=2), [{"b": 2}, {"c": 3}])
    yield tq.kv_batch_get(keys, "again")
    yield tq.kv_batch_get(keys[1:], "again")
    yield tq.kv_put("k0", "again", tag={"a": None})
    yield tq.kv_put("k3", "again", fields=batch(1), tag={"late": True})
    yield tq.kv_batch_get([*keys, "k3"], "again", select_fields=["x", "new"])
    yield tq.kv_list("again")


@case
def put_tags_alone(tq: Any) -> Iterator[Any]:
    yield tq.kv_put("k", "tags", tag={"a": 1})
    yield tq.kv_batch_put(["k", "l"], "tags", tags=[{"b": 2}, {}])
    yield tq.kv_list("tags")
    yield tried(lambda: tq.kv_batch_get("k", "tags"))
    yield tq.kv_put("k", "tags", fields={"x": torch.ones(2)})
    yield tried(lambda: tq.kv_batch_get(["k", "l"], "tags"))
    yield tq.kv_batch_get("k", "tags")


@case
def get_what_is_not_there(tq: Any) -> Iterator[Any]:
    tq.kv_batch_put(["k0", "k1", "k2"], "not", batch())
    yield tried(lambda: tq.kv_batch_get(["k0", "other", "k2"], "not"))
    yield tried(lambda: tq.kv_batch_get(["other"], "not"))
    yield tried(lambda: tq.kv_batch_get("k0", "nowhere"))
    yield tried(lambda: tq.kv_batch_get("k0", "not", select_fields=["x", "other"]))
    yield tried(lambda: tq.kv_batch_get("k0", "not", select_fields="other"))
    yield tried(lambda: tq.kv_batch_get("k0", "not", select_fields=[]))
    yield tq.kv_list("nowhere")


@case
def clear(tq: Any) -> Iterator[Any]:
    keys = ["k0", "k1", "k2"]
    tq.kv_batch_put(keys, "clear", batch(), [{"n": n} for n in range(3)])
    yield tq.kv_clear(["k0", "other"], "clear")
    yield tq.kv_list("clear")
    yield tq.kv_batch_get(keys, "clear")
    yield tq.kv_clear("k0", "clear")
    yield tq.kv_clear(keys, "nowhere")
    tq.kv_put("k0", "clear", fields={"x": torch.zeros(1)})
    yield tq.kv_batch_get(["k0"], "clear")
    yield tq.kv_clear(keys, "clear")
    yield tq.kv_list("clear")
    yield tried(lambda: tq.kv_batch_get(keys, "clear"))


@case
def wrong_calls(tq: Any) -> Iterator[Any]:
    two = TensorDict({"x": torch.ones(2)}, batch_size=2)
    for work in (
        lambda: tq.kv_put("k", "wrong"),
        lambda: tq.kv_put("k", "wrong", fields=5),
        lambda: tq.kv_put("k", "wrong", fields={"x": jagged(1, 2)}),
        lambda: tq.kv_batch_put(["a", "b"], "wrong"),
        lambda: tq.kv_batch_put(["a"], "wrong", two),
        lambda: tq.kv_batch_put(["a", "b"], "wrong", tags=[{}]),
        lambda: tq.kv_batch_put([], "wrong", tags=[]),
        lambda: tq.kv_batch_put([1, 2], "wrong", tags=[{}, {}]),
        lambda: tq.kv_batch_put(["a", "a"], "wrong", two),
        lambda: tq.kv_batch_get([], "wrong"),
        lambda: tq.kv_batch_get([1], "wrong"),
        lambda: tq.kv_batch_get(5, "wrong"),
        lambda: tq.kv_clear([], "wrong"),
    ):
        yield tried(work)


@case
def get_by_meta(tq: Any) -> Iterator[Any]:
    meta = tq.kv_batch_put(["k0", "k1", "k2"], "meta", batch(text=NonTensorStack("a", "b", "c")))
    yield tq.kv_batch_get_by_meta(meta)
    yield tq.kv_batch_get_by_meta(meta, "text")
    yield tried(lambda: tq.kv_batch_get_by_meta(meta, ["x", "other"]))
    part = meta.select_keys(["k2", "k0"])
    yield part
    yield tq.kv_batch_get_by_meta(part, ["x"])
    chunks = meta.chunk(2)
    yield chunks
    yield tq.KVBatchMeta.concat(chunks)
    part.reorder([1, 0])
    yield part
    yield str(part)
    yield tried(lambda: meta.select_keys(["k0", "k0"]))
    yield tried(lambda: meta.select_keys(["other"]))
    yield tried(lambda: meta.reorder([0, 0, 1]))
    yield tried(lambda: tq.KVBatchMeta(keys=["a"], tags=[]))
    yield tried(lambda: tq.KVBatchMeta(keys=["a", "a"], tags=[{}, {}]))
    yield tried(lambda: tq.kv_batch_get_by_meta(tq.KVBatchMeta(keys=["a"], tags=[{}])))


@case
def awaited(tq: Any) -> Iterator[Any]:
    async def work() -> list[Any]:
        keys = [f"k{n}" for n in range(4)]
        answers = [await tq.async_kv_put("k0", "async", fields={"x": torch.ones(2)}, tag={"n": 0})]
        fields = TensorDict({"x": torch.full((3, 2), 2.0)}, batch_size=3)
        answers.append(await tq.async_kv_batch_put(keys[1:], "async", fields))
        answers += await asyncio.gather(*(tq.async_kv_batch_get(key, "async") for key in keys))
        answers.append(await tq.async_kv_batch_get_by_meta(answers[1]))
        answers.append(await tq.async_kv_list("async"))
        await tq.async_kv_clear(keys[:3], "async")
        answers.append(await tq.async_kv_list("async"))
        return answers

    yield from asyncio.run(work())


@case
def changes_stay_with_who_makes_them(tq: Any) -> Iterator[Any]:
    source = torch.zeros(512, 64)
    keys = [f"k{n}" for n in range(512)]
    tq.kv_batch_put(keys, "own", TensorDict({"x": source}, batch_size=512))
    source += 1
    first, second = tq.kv_batch_get(keys, "own"), tq.kv_batch_get(keys, "own")
    first["x"] += 2
    values = [float(answer["x"].values().sum()) for answer in (first, second, tq.kv_batch_get(keys, "own"))]
    tq.kv_clear(keys, "own")
    tq.kv_batch_put(keys, "own", TensorDict({"x": source + 3}, batch_size=512))
    yield values + [float(answer["x"].values().sum()) for answer in (first, second)]


@case
def parse_while_putting(tq: Any) -> Iterator[Any]:
    urls = NonTensorStack("a.png", "b.png")
    fields = TensorDict({"url": urls, "x": torch.ones(2, 2)}, batch_size=2)
    tq.kv_batch_put(["a", "b"], "parse", fields, data_parser=_load)
    yield tq.kv_batch_get(["a", "b"], "parse")
    yield tried(lambda: tq.kv_batch_put(["c"], "parse", fields[:1], data_parser=_drops_a_field))


def _load(columns: dict[str, Any]) -> dict[str, Any]:
    columns["url"] = [f"contents of {url}" for url in columns["url"]]
    return columns


def _drops_a_field(columns: dict[str, Any]) -> dict[str, Any]:
    return {"x": columns["x"]}


# --- the lower-level interface


@case
def low_level(tq: Any) -> Iterator[Any]:
    client = tq.get_client()
    meta = client.put(batch(4), partition_id="low")
    yield meta
    yield client.get_data(meta)
    yield tq.kv_list("low")
    taken = client.get_meta(["x"], 3, "low", task_name="a")
    yield taken
    yield client.get_data(taken)
    yield client.check_consumption_status("a", "low")
    yield [client.get_consumption_status(task, "low")[1] for task in ("a", "b")]
    yield client.get_consumption_status("a", "nowhere")
    out = client.put(TensorDict({"y": torch.ones(3, 1)}, batch_size=3), taken)
    yield out
    yield client.get_production_status(["x", "y"], "low")[1]
    yield client.get_production_status(["z"], "low")
    yield [client.check_production_status(fields, "low") for fields in (["x"], ["x", "y"], ["z"])]
    yield client.get_meta(["y"], 3, "low", task_name="b")
    taken = client.get_meta(["x"], 1, "low", task_name="a")
    yield client.check_consumption_status("a", "low")
    yield client.reset_consumption("low", "a")
    yield client.check_consumption_status("a", "low")
    yield client.get_meta(["x", "score"], 4, "low", task_name="a")
    yield "low" in client.get_partition_list()
    yield client.clear_samples(taken)
    yield client.clear_partition("low")
    yield "low" in client.get_partition_list()
    yield client.get_meta(["x"], 1, "low", task_name="a").size


@sampled(lambda tq: tq.SequentialSampler())
def low_level_metadata(tq: Any) -> Iterator[Any]:
    client = tq.get_client()
    fields = batch(4, ragged=jagged(1, 2, 3, 4), text=NonTensorStack(*"abcd"))
    meta = client.put(fields, partition_id="lowmeta")
    yield [meta.get_dtypes(name) for name in ("x", "text")], [list(shape) for shape in meta.get_shapes("ragged")]
    yield [chunk.size for chunk in meta.chunk(3)], meta[1:3], meta[-1].size
    meta.update_custom_meta([{"n": n} for n in range(4)])
    client.set_custom_meta(meta)
    found = client.get_meta(["ragged", "x"], 2, "lowmeta", task_name="t")
    yield found
    yield (
        found.select_fields(["x"]),
        found.select_samples([1]),
        tq.BatchMeta.concat([found, meta[2:].select_fields(["ragged", "x"])]),
    )
    yield [dict(sample.custom_meta) for sample in found.samples]
    yield [list(sample.fields["ragged"]["shape"]) for sample in meta.samples]
    yield found.union(found.select_fields(["x"]))
    meta.reorder([3, 2, 1, 0])
    yield client.get_data(meta)
    yield tried(lambda: meta.select_samples([9])), tried(lambda: meta.reorder([0])), tried(lambda: meta["x"])
    yield tried(lambda: meta.get_dtypes("other")), tq.BatchMeta.empty(), str(tq.BatchMeta.empty())


@case
def low_level_keys(tq: Any) -> Iterator[Any]:
    client = tq.get_client()
    tq.kv_batch_put(["a", "b", "c"], "lowkeys", batch(), [{"n": n} for n in range(3)])
    meta = client.get_meta(["x"], 3, "lowkeys", task_name="t")
    yield sorted(client.kv_retrieve_keys(meta.global_indexes, "lowkeys"))
    found = client.kv_retrieve_meta(["c", "a"], "lowkeys")
    yield found
    yield client.get_data(found.select_fields(["score"]))
    yield tried(lambda: client.kv_retrieve_keys([], "lowkeys"))
    yield tried(lambda: client.get_data(tq.BatchMeta.empty()))
    tq.kv_clear("a", "lowkeys")
    yield tried(lambda: client.get_data(found))


# --- samplers, each with a queue of its own


def groups_of(tq: Any, meta: Any, partition: str = "p") -> list[str]:
    return list(tq.get_client().kv_retrieve_keys(meta.global_indexes, partition)) if meta.size else []


def keys_put(tq: Any, n: int, *fields: str, first: int = 0, **more: Any) -> list[str]:
    keys = [f"k{i}" for i in range(first, first + n)]
    tq.kv_batch_put(keys, "p", TensorDict({name: torch.ones(n, 2) for name in fields}, batch_size=n), **more)
    return keys


@sampled(lambda tq: "SequentialSampler")
def sequential(tq: Any) -> Iterator[Any]:
    client = tq.get_client()
    keys_put(tq, 5, "x")
    for n in (2, 1):
        yield groups_of(tq, client.get_meta(["x"], n, "p", task_name="t"))
    yield tried(lambda: client.get_meta(["x"], 3, "p", task_name="t"))
    keys_put(tq, 2, "x", "y", first=3)
    yield groups_of(tq, client.get_meta(["y"], 2, "p", task_name="u"))
    yield groups_of(tq, client.get_meta(["x"], 2, "p", task_name="t", sampling_config={"dp_rank": 0, "batch_index": 0}))


@sampled(lambda tq: tq.RankAwareSampler(), polling_mode=True)
def rank_aware(tq: Any) -> Iterator[Any]:
    client = tq.get_client()
    keys_put(tq, 6, "x")
    for rank, index in ((0, 0), (1, 0), (0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (0, 2)):
        sampling = {"dp_rank": rank, "batch_index": index, "task_name": "t", "partition_id": "p"}
        yield rank, index, groups_of(tq, client.get_meta(["x"], 2, "p", task_name="t", sampling_config=sampling))


@sampled(lambda tq: tq.GRPOGroupNSampler(n_samples_per_prompt=2), polling_mode=True)
def whole_groups(tq: Any) -> Iterator[Any]:
    client = tq.get_client()
    keys_put(tq, 8, "x")
    for keys in ("k0", "k2", "k3"):
        tq.kv_put(keys, "p", fields={"y": torch.ones(1)})
    yield groups_of(tq, client.get_meta(["y"], 2, "p", task_name="t"))
    yield groups_of(tq, client.get_meta(["y"], 2, "p", task_name="t"))
    for key in ("k1", "k5", "k6", "k7"):
        tq.kv_put(key, "p", fields={"y": torch.ones(1)})
    sampling = {"dp_rank": 0, "batch_index": 0, "task_name": "t", "partition_id": "p"}
    for _ in range(2):
        yield groups_of(tq, client.get_meta(["y"], 4, "p", task_name="t", sampling_config=sampling))
    yield tried(lambda: client.get_meta(["y"], 1, "p", task_name="v"))
    yield tried(lambda: tq.GRPOGroupNSampler(0))


@sampled(lambda tq: tq.RankAwareSampler, polling_mode=True)
def streaming(tq: Any) -> Iterator[Any]:
    conf = tq.CONF
    fields = TensorDict(
        {"x": torch.arange(8.0), "ids": jagged(*range(1, 9)), "text": NonTensorStack(*"abcdefgh")}, batch_size=8
    )
    tq.kv_batch_put([f"k{n}" for n in range(8)], "p", fields, [{"n": n} for n in range(8)])
    sets = [
        tq.StreamingDataset(conf, 4, 2, ["ids", "text", "x"], "p", "train", rank, should_check_consumption_status=True)
        for rank in (0, 1)
    ]
    loaders = [tq.StreamingDataLoader(one, num_workers=0) for one in sets]
    for loader in loaders:
        ranks = iter(loader)
        yield [next(ranks) for _ in range(2)]
    yield [list(loaders[0])[2:], [len(loader.get_buffer()) for loader in loaders]]
    loaders[0].reset()
    yield [data["x"].tolist() for data, _ in loaders[0]]
    tq.kv_batch_put(["a", "b", "c", "d"], "q", fields[:4].exclude("ids"))
    loaders[1].step("q")
    sets[1].data_fields = ["x"]
    yield [data["x"].tolist() for data, _ in loaders[1]], sets[1].batch_index
    for wrong in ({"micro_batch_size": 0}, {"data_fields": []}, {"dp_rank": -1}):
        arguments = {"batch_size": 1, "micro_batch_size": 1, "data_fields": ["x"], "dp_rank": 0, **wrong}
        yield tried(lambda arguments=arguments: tq.StreamingDataset(conf, partition_id="p", task_name="t", **arguments))


@sampled(lambda tq: tq.RankAwareSampler(), polling_mode=True)
def streaming_in_workers(tq: Any) -> Iterator[Any]:
    keys_put(tq, 6, "x")
    own = tq.StreamingDataset(tq.CONF, 2, 2, ["x"], "p", "train", 0, should_check_consumption_status=True)
    loader = tq.StreamingDataLoader(own, num_workers=1, prefetch_factor=1)
    yield [(data, meta.size) for data, meta in loader]


@sampled(lambda tq: tq.SequentialSampler(), polling_mode=True)
def streaming_with_functions_of_ones_own(tq: Any) -> Iterator[Any]:
    keys_put(tq, 4, "x")

    def fetch(tq_client: Any, data_fields: Any, batch_size: int, partition_id: str, task_name: str, **_: Any) -> Any:
        meta = tq_client.get_meta(data_fields, batch_size, partition_id, task_name=task_name)
        return (tq_client.get_data(meta), meta) if meta.size else (None, meta)

    def process(data: Any, meta: Any, micro_batch_size: int) -> Any:
        return [(data["x"].values().shape[0], meta.size, micro_batch_size)]

    own = tq.StreamingDataset(tq.CONF, 2, 1, ["x"], "p", "t", 0, True, fetch_batch_fn=fetch, process_batch_fn=process)
    yield list(own)


def run(tq: Any, conf: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """All answers, by case."""
    answers: dict[str, Any] = {}
    tq.init(conf({"controller": {"polling_mode": True}}))
    for name, function in CASES.items():
        answers[name] = [seen(answer) for answer in function(tq)]
    tq.close()
    for name, (controller, sampler, function) in SAMPLED.items():
        tq.CONF = tq.init(conf({"controller": {"sampler": sampler(tq), **controller}}))
        answers[name] = [seen(answer) for answer in function(tq)]
        tq.close()
    return answers


def main() -> None:
    name = sys.argv[1]
    conf: Callable[[dict[str, Any]], Any] = dict
    if name == "transfer_queue":
        import ray
        from omegaconf import OmegaConf

        ray.init(num_cpus=8, log_to_driver=False, object_store_memory=200 << 20, include_dashboard=False)

        def conf(values: dict[str, Any]) -> Any:
            return OmegaConf.create(values, flags={"allow_objects": True})

    answers = run(importlib.import_module(name), conf)
    lines = [f"{json.dumps(case)}: {json.dumps(answers[case], sort_keys=True)}" for case in sorted(answers)]
    print("{\n" + ",\n".join(lines) + "\n}")  # noqa: T201


if __name__ == "__main__":
    main()
