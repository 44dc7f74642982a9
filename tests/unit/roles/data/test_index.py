"""The index of the rows: what is one prompt, what is kept, what is noticed, and what it costs."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_rt.roles.data import index as index_module
from relax_rt.roles.data import source as source_module
from relax_rt.roles.data.index import RowIndex
from relax_rt.roles.data.order import BLOCK, SourceMixture
from relax_rt.roles.data.settings import DataSource, DataTable
from relax_rt.roles.data.source import RECORD, ItemIds, PromptPositions, PromptSource
from relax_rt.roles.data.split.canonical import in_held_out
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.transport.rpc.errors import RelaxError


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def opened(path: str | Path, **more: Any) -> RowIndex:
    return RowIndex.open(DataTable(path=str(path), **more), Path())


def load(tokenizer: ChatTokenizer, run_dir: Path | None = None, seed: int = 0, **data: Any) -> PromptSource:
    return PromptSource.load(DataTable(**data), tokenizer, seed=seed, config_dir=Path(), run_dir=run_dir)


# --- what is one prompt

DISTINCT = [
    ("superscript", [("2² = ?", "4"), ("22 = ?", "22")]),
    ("case", [("print('Hello')", "Hello"), ("print('hello')", "hello"), ("PRINT('HELLO')", "")]),
    ("indentation", [("for i in x:\n    a()\n    b()", "1"), ("for i in x:\n    a()\nb()", "2")]),
    ("white space", [("a b", "1"), ("a  b", "2"), ("a\nb", "3"), ("a\u00a0b", "4"), (" a b", "5")]),
    ("answers", [("Name a colour", "red"), ("Name a colour", "blue"), ("Name a colour", ["red", "blue"])]),
    ("types", [("6 * 7", 42), ("6 * 7", "42"), ("6 * 7", 42.5), ("6 * 7", True), ("6 * 7", None)]),
    ("subscript", [("x₁ + 1", "a"), ("x1 + 1", "b"), ("x① + 1", "c")]),
    ("ligature", [("ﬁne", "f"), ("fine", "f"), ("ＦＩＮＥ", "f")]),
    ("sharp s", [("Maße", "x"), ("Masse", "x"), ("MASSE", "x")]),
]


@pytest.mark.parametrize(("kind", "rows"), DISTINCT, ids=[kind for kind, _ in DISTINCT])
def test_rows_that_differ_are_all_kept(tmp_path: Path, kind: str, rows: list[tuple[str, Any]]) -> None:
    index = opened(write(tmp_path / "d.jsonl", [{"prompt": prompt, "answer": answer} for prompt, answer in rows]))
    found = [index.raw(number) for number in range(len(index))]
    assert [(one.question, one.answer) for one in found] == rows
    assert (index.contents.duplicates, index.contents.notes) == (0, [])
    assert len(set(index.rows["item"].tolist())) == len(rows), "each has an id of its own"


@pytest.mark.parametrize(
    "more",
    [
        {"metadata": {"tests": "1"}},
        {"tests": "1"},
        {"metadata": {"tests": ["a", {"b": None}]}},
        {"system": "be brief"},
        {"tools": [{"name": "w"}]},
    ],
)
def test_rows_that_differ_in_what_the_reward_or_the_model_sees_are_kept(tmp_path: Path, more: dict[str, Any]) -> None:
    plain = {"prompt": "Rewrite", "answer": "a"}
    assert len(opened(write(tmp_path / "d.jsonl", [plain, plain | more]))) == 2


def test_near_identical_questions_fall_on_one_side_of_the_split(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": form.format(i), "answer": i} for i in range(60) for form in ("What is {}?", "what  is {}?")]
    source = load(tokenizer, path=write(tmp_path / "d.jsonl", rows), held_out=0.3)
    assert len(source.train) + len(source.held_out) == 120
    for items, held in ((source.train, False), (source.held_out, True)):
        assert {in_held_out(item.question, 0.3) for item in items} == {held}
        assert set(Counter(item.answer for item in items).values()) == {2}


def test_equal_rows_are_dropped_by_name_or_kept(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i % 10}", "answer": i % 10, "metadata": {"a": 1, "b": 2}} for i in range(18)]
    # The order of keys and the white space of the file are no part of a row.
    text = '{"metadata": {"b": 2, "a": 1},   "answer": 0, "prompt": "q0"}\n'
    (tmp_path / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "1.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    index = opened(tmp_path)
    assert (len(index), index.contents.read, index.contents.duplicates) == (10, 19, 9)
    assert [index.raw(number).where.rpartition(":")[2] for number in range(10)] == [str(n) for n in range(1, 11)]
    (note,) = index.contents.notes
    assert "9 rows have the text, answer and metadata of an earlier one" in note and "and 4 more" in note
    assert f"{tmp_path / '0.jsonl'}:11 (as {tmp_path / '0.jsonl'}:1)" in note
    kept = opened(tmp_path, duplicates="keep")
    assert (len(kept), kept.contents.duplicates, kept.contents.notes) == (19, 0, [])


def test_ids_depend_on_no_other_row(tmp_path: Path) -> None:
    rows = [{"prompt": "Name a colour", "answer": a} for a in ("red", "blue")] + [{"prompt": "q", "answer": 1}]
    ids = []
    for number, order in enumerate((rows, rows[::-1])):
        index = opened(write(tmp_path / f"{number}.jsonl", order))
        ids.append({json.dumps(index.raw(n).answer): int(index.rows["item"][n]) for n in range(3)})
    assert ids[0] == ids[1]


def test_places_of_ids() -> None:
    ids = ItemIds(np.array([5, 2**63, 0, 7], np.uint64))
    places = PromptPositions(ids)
    assert [places[item] for item in ids] == [0, 1, 2, 3] and list(places) == ids[:] and len(places) == 4
    for unknown in ("0000000000000006", "ffffffffffffffff", "no id", "f" * 17, ""):
        assert unknown not in places


# --- the cache


def test_the_second_time_nothing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    for name, pack in (("d.jsonl", bytes), ("d.jsonl.gz", gzip.compress)):
        rows = [{"prompt": f"q{i}", "answer": i} for i in range(30)]
        (tmp_path / name).write_bytes(pack("".join(json.dumps(row) + "\n" for row in rows).encode()))
        first = opened(tmp_path / name)
        with monkeypatch.context() as patched:
            patched.setattr(index_module.IndexBuilder, "build", None)
            again = opened(tmp_path / name)
            assert [again.raw(n) for n in range(30)] == [first.raw(n) for n in range(30)]
            assert isinstance(again.rows, np.memmap), "several roles share the pages"
            # What changes how rows are read is another index.
            for other in (
                {"ignore": ["x"]},
                {"columns": {"answer": "answer"}},
                {"form": "prompt"},
                {"duplicates": "keep"},
            ):
                with pytest.raises(TypeError):
                    opened(tmp_path / name, **other)
        assert opened(tmp_path / name, template="Q: {question}").contents == first.contents


def test_roles_that_start_together_index_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(2000)])
    built: list[int] = []
    build = index_module.IndexBuilder.build

    def counted(self: Any, *args: Any) -> None:
        built.append(1)
        build(self, *args)

    monkeypatch.setattr(index_module.IndexBuilder, "build", counted)
    lengths: list[int] = []
    threads = [threading.Thread(target=lambda: lengths.append(len(opened(path)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (lengths, len(built)) == ([2000] * 6, 1)


def test_without_a_cache_folder_it_is_built_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: ChatTokenizer
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "file" / "below"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    index_module.tempfile.tempdir = None
    try:
        path = write(tmp_path / "d.jsonl", [{"prompt": f"q{i}", "answer": i} for i in range(40)])
        source = load(tokenizer, path=path, held_out=0.3)
        assert sorted(item.answer for item in [*source.train, *source.held_out]) == list(range(40))
        assert list((tmp_path / "tmp").iterdir()) == []
    finally:
        index_module.tempfile.tempdir = None


def test_old_indices_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(index_module, "KEPT_INDICES", 3)
    paths = [write(tmp_path / f"{n}.jsonl", [{"prompt": f"q{n}", "answer": n}]) for n in range(6)]
    first = opened(paths[0])
    for number, path in enumerate(paths):
        opened(path)
        for folder in cache.glob("data-*/"):
            os.utime(folder, ns=(folder.stat().st_atime_ns, folder.stat().st_mtime_ns - 10**9 * (6 - number)))
    assert len(list(cache.glob("data-*/"))) == 3
    assert first.raw(0).answer == 0, "who has one open goes on"


def test_a_damaged_index_is_named(tmp_path: Path, cache: Path) -> None:
    path = write(tmp_path / "d.jsonl", [{"prompt": "q", "answer": 1}])
    opened(path)
    (folder,) = cache.glob("data-*/")
    (folder / "rows.npy").write_bytes(b"x")
    with pytest.raises(RelaxError, match=f"damaged.*remove the folder {folder}"):
        opened(path)


# --- changes


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("q1", "qX"),
        lambda text: text.replace('"answer": 1}', '"answer": 2}'),
        lambda text: "x" * len(text),
        lambda text: text[:5],
        lambda text: "",
    ],
)
def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "d.jsonl"
    write(path, [{"prompt": f"q{i}", "answer": 1} for i in range(3)])
    index = opened(path)
    assert index.raw(1).question == "q1"
    path.write_text(change(path.read_text()))
    with pytest.raises(RelaxError, match=r"d.jsonl:2: the file changed since it was indexed"):
        index.raw(1)


def test_a_resumed_run_notices_other_rows(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    run, path = tmp_path / "run", tmp_path / "d.jsonl"
    run.mkdir()
    rows = [{"prompt": f"q{i}", "answer": i} for i in range(40)]
    first = load(tokenizer, run, path=write(path, rows), held_out=0.3)
    assert json.loads((run / RECORD).read_text())["rows"] == 40
    # Written again, moved: the same rows.
    path.touch()
    (tmp_path / "e.jsonl").write_text(path.read_text())
    again = load(tokenizer, run, path=str(tmp_path / "e.jsonl"), held_out=0.3)
    assert [again.prompt(i) for i in range(50)] == [first.prompt(i) for i in range(50)]
    for changed in (
        rows[:-1],
        rows[::-1],
        [*rows, {"prompt": "new", "answer": 0}],
        [{**rows[0], "answer": 7}, *rows[1:]],
    ):
        write(path, changed)
        with pytest.raises(RelaxError, match=r"not those that the run was started with: 40 then, .*data\.json"):
            load(tokenizer, run, path=str(path), held_out=0.3)
    (run / RECORD).unlink()
    load(tokenizer, run, path=str(path), held_out=0.3)


# --- more rows than are measured


def test_overlong_rows_of_large_data_give_their_turn_to_others(
    tmp_path: Path, tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": f"{i:03d}" + "x" * (10 if i % 3 else 40), "answer": i} for i in range(300)]
    data = {"path": write(tmp_path / "d.jsonl", rows), "max_prompt_tokens": 30, "held_out": 0.3}
    exact = load(tokenizer, **data)
    monkeypatch.setattr(source_module, "MEASURED_WHOLE", 200)
    monkeypatch.setattr(source_module, "SAMPLE", 50)
    source = load(tokenizer, **data)
    assert source.report.measured == 50 and 10 <= source.report.dropped <= 25
    assert "of 50 that were measured" in str(source.report) and source.report.longest_tokens == 30
    items = [source.prompt(i) for i in range(len(source.train))]
    assert all(len(item.tokens) <= 30 and item.split == "train" for item in items)
    assert {item.item for item in items} == {item.item for item in exact.train}
    other = load(tokenizer, **data)
    assert [other.prompt(i) for i in range(len(items))] == items, "every role comes to the same one"
    # What is evaluated on is the same as where all rows were measured.
    assert source.held_out[:5] == exact.held_out[:5]
    assert list(source.held_out) == list(exact.held_out) == source.held_out[:]
    assert len(source.held_out) == len(exact.held_out) and source.held_out[-1] == exact.held_out[-1]
    with pytest.raises(RelaxError, match=r"d.jsonl:\d+: it has \d+ tokens"):
        load(tokenizer, **data, overlong="error")
    with pytest.raises(RelaxError, match="prompts in a row have more tokens"):
        load(tokenizer, **data | {"max_prompt_tokens": 3}).prompt(0)


def test_tools_that_the_template_does_not_show_are_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": f"q{i}", "answer": i} for i in range(30)]
    rows[7]["tools"] = [{"name": "w", "parameters": {}}]
    path = write(tmp_path / "d.jsonl", rows)
    with pytest.raises(RelaxError, match=r"the tools of .*d.jsonl:8: the chat template of .* does not show them"):
        load(tokenizer, path=path)
    assert len(load(tokenizer, path=path, ignore=["tools"]).train) > 20


# --- several sources


def sources(tmp_path: Path, *sizes: int, weights: tuple[float | None, ...]) -> list[DataSource]:
    return [
        DataSource(
            path=write(tmp_path / f"s{n}.jsonl", [{"prompt": f"s{n} q{i}", "answer": i} for i in range(size)]),
            name=f"s{n}",
            weight=weight,
        )
        for n, (size, weight) in enumerate(zip(sizes, weights, strict=True))
    ]


@pytest.mark.parametrize("weights", [(3, 1), (1, 1), (0.9, 0.1), (0.001, 5)])
def test_sources_come_in_the_shares_of_their_weights(
    tmp_path: Path, tokenizer: ChatTokenizer, weights: tuple[float, ...]
) -> None:
    source = load(tokenizer, sources=sources(tmp_path, 400, 30, weights=weights), held_out=0.1)
    came = [source.prompt(index).metadata["source"] for index in range(50 * BLOCK)]
    share = weights[1] / sum(weights)
    for block in range(50):
        here = came[block * BLOCK : (block + 1) * BLOCK].count("s1")
        assert abs(here - share * BLOCK) <= 1
    assert abs(came.count("s1") / len(came) - share) < 0.01
    # A small source is repeated, pass by pass: each of its rows comes equally often.
    small = Counter(
        item.item for item in (source.prompt(i) for i in range(50 * BLOCK)) if item.metadata["source"] == "s1"
    )
    assert max(small.values()) - min(small.values()) <= 1
    # Any index at any time, from another start.
    other = load(tokenizer, sources=sources(tmp_path, 400, 30, weights=weights), held_out=0.1)
    assert other.prompt(40 * BLOCK + 7) == source.prompt(40 * BLOCK + 7)


def test_sources_without_weights_are_one_pool(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    source = load(tokenizer, sources=sources(tmp_path, 60, 20, weights=(None, None)), held_out=0.1, epochs=1)
    assert {source.prompt(i).item for i in range(len(source.train))} == set(source.train.ids)


def test_a_source_has_columns_of_its_own(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    first = write(tmp_path / "a.jsonl", [{"q": f"a{i}", "answer": i} for i in range(20)])
    second = write(tmp_path / "b.jsonl", [{"problem": f"b{i}", "label": i} for i in range(20)])
    found = load(
        tokenizer,
        sources=[
            DataSource(path=first, columns={"prompt": "q"}),
            DataSource(path=second, columns={"prompt": "problem", "answer": "label"}),
        ],
        held_out=0.3,
    )
    assert {item.question[0] for item in found.train} == {"a", "b"}


@pytest.mark.parametrize("seed", range(5))
def test_a_mixture_counts_what_came_before(seed: int) -> None:
    mixture, seen = SourceMixture(seed, (0.5, 0.3, 0.2)), Counter[int]()
    for index in range(20 * BLOCK):
        source, before = mixture.place(index)
        assert before == seen[source]
        seen[source] += 1
    assert SourceMixture(seed, (5, 3, 2)).place(17 * BLOCK + 3) == mixture.place(17 * BLOCK + 3)


# --- what it costs

PROBE = """
import resource, sys
from pathlib import Path
from relax_rt.roles.data.index import RowIndex
from relax_rt.roles.data.order import epoch_order
from relax_rt.roles.data.source import ItemIds
from relax_rt.roles.data.settings import DataTable
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
index = RowIndex.open(DataTable(path=sys.argv[1]), Path())
epoch_order(0, 0, ItemIds(index.rows["item"]))
index.raw(len(index) - 1)
print(len(index), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_row_costs_bytes_and_not_objects(tmp_path: Path) -> None:
    """120,000 rows of 1 kB: as objects more than 300 MiB, in the index 64 bytes each while it is built."""
    filling = "x" * 900
    with (tmp_path / "d.jsonl").open("w") as file:
        for number in range(120_000):
            file.write(f'{{"prompt": "{number} {filling}", "answer": {number}, "metadata": {{"k": [1, 2, 3]}}}}\n')
    done = subprocess.run(
        [sys.executable, "-c", PROBE, str(tmp_path / "d.jsonl")], capture_output=True, text=True, check=True
    )
    rows, kib = map(int, done.stdout.split())
    assert rows == 120_000
    assert kib < 80 << 10, f"{kib >> 10} MiB more for 120,000 rows"


def test_error_of_the_build_is_not_taken_for_an_unwritable_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = 0

    def build(self: Any, *_: Any) -> None:
        nonlocal builds
        builds += 1
        raise RelaxError("the cache folder.jsonl", why="a row in it is wrong")

    monkeypatch.setattr(index_module.IndexBuilder, "build", build)
    path = write(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": 1}])
    with pytest.raises(RelaxError, match="a row in it is wrong"):
        RowIndex.open(DataTable(path=path), tmp_path)
    assert builds == 1
