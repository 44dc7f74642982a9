"""Prompts: canonical form, split, order, rendering, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.data.gym import GymTask, _registered_tasks, find_fault
from relax_rt.roles.data.items import RawItem
from relax_rt.roles.data.order import epoch_order, sample_seed
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptSource, fill_template, truncate_conversation
from relax_rt.roles.data.split.canonical import canonical, in_held_out, item_id
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.transport.rpc.errors import RelaxError

ADDITION: dict[str, Any] = {
    "min_terms": 2,
    "max_terms": 2,
    "min_digits": 2,
    "max_digits": 2,
    "operators": ["+"],
    "allow_parentheses": False,
}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path.name


def numbered(n: int) -> list[dict[str, Any]]:
    return [{"prompt": f"what is {i}?", "answer": i} for i in range(n)]


@given(st.text(), st.sampled_from([" ", "\n", "\t ", "\u00a0"]))
def test_canonical_is_idempotent_and_blind_to_space_and_case(text: str, space: str) -> None:
    assert canonical(f"{space}A{space}b") == "a b"
    # Case folding can leave a form that folds again only outside NFKC; the id is what must agree.
    assert item_id(f"{space}{text}{space}") == item_id(text)


@given(st.text(), st.floats(0.01, 0.5), st.floats(0.0, 0.49))
def test_a_larger_share_holds_out_a_superset(question: str, share: float, more: float) -> None:
    assert not in_held_out(question, share) or in_held_out(question, share + more)


def test_held_out_share_is_about_what_was_asked() -> None:
    held = sum(in_held_out(f"question {i}", 0.25) for i in range(4000))
    assert 900 < held < 1100


@given(st.integers(0, 2**31 - 1), st.integers(0, 5), st.sets(st.text(min_size=1), max_size=50))
def test_epoch_order_is_a_permutation_that_ignores_file_order(seed: int, epoch: int, ids: set[str]) -> None:
    items = sorted(ids)
    order = epoch_order(seed, epoch, items)
    assert sorted(order) == list(range(len(items)))
    backwards = items[::-1]
    assert [items[i] for i in order] == [backwards[i] for i in epoch_order(seed, epoch, backwards)]


def test_orders_and_seeds_differ_where_they_must() -> None:
    items = [str(i) for i in range(100)]
    orders = {tuple(epoch_order(seed, epoch, items).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    seeds = {sample_seed(s, p, m, a) for s in range(4) for p in range(20) for m in range(8) for a in range(3)}
    assert len(seeds) == 4 * 20 * 8 * 3
    assert max(seeds) < 2**63
    # A change of the hash would silently change every run that is resumed.
    assert sample_seed(1, 2, 3, 0) == SEED_1_2_3_0
    assert epoch_order(7, 0, ["a", "b", "c", "d"]).tolist() == ORDER_7


SEED_1_2_3_0 = 2223786261031295267
ORDER_7 = [3, 2, 1, 0]


def source_of(
    tmp_path: Path, tokenizer: ChatTokenizer, n: int, seed: int = 0, epochs: int | None = None, shuffle: bool = True
) -> PromptSource:
    name = write(tmp_path / f"{n}.jsonl", [{"prompt": f"q{i}", "answer": ""} for i in range(n)])
    data = DataTable(path=name, epochs=epochs, shuffle=shuffle, held_out=0.3)
    return PromptSource.load(data, tokenizer, seed=seed, config_dir=tmp_path)


def test_each_epoch_gives_every_prompt_once(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    source = source_of(tmp_path, tokenizer, 14, epochs=3)
    n = len(source.train)
    assert source.limit == 3 * n
    passes = [[source.prompt(n * e + i).item for i in range(n)] for e in range(3)]
    assert len({tuple(p) for p in passes}) == 3
    assert {frozenset(p) for p in passes} == {frozenset(source.train.ids)}
    # Any index may be asked for at any time: a restarted worker asks from the middle.
    assert source_of(tmp_path, tokenizer, 14, epochs=3).prompt(2 * n + 5).item == passes[2][5]
    with pytest.raises(IndexError):
        source.prompt(3 * n)


def test_the_order_is_that_of_the_ids(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    """The same as for a list of ids, whose golden value is above: a resumed run goes on with the same prompts."""
    source = source_of(tmp_path, tokenizer, 14)
    ids = [item_id(item.question) for item in source.train]
    assert ids == list(source.train.ids)
    assert [source.place(i) for i in range(len(ids))] == epoch_order(0, 0, ids).tolist()


def test_without_shuffle_the_file_order_holds(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    source = source_of(tmp_path, tokenizer, 14, shuffle=False)
    n = len(source.train)
    asked = [f"q{i}" for i in range(14) if not in_held_out(f"q{i}", 0.3)]
    assert [source.prompt(i).question for i in range(n + 1)] == [*asked, asked[0]]


def test_an_empty_split_is_refused(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    name = write(tmp_path / "d.jsonl", numbered(3))
    with pytest.raises(RelaxError, match="no held-out prompts among 3"):
        PromptSource.load(DataTable(path=name, held_out=1e-9), tokenizer, seed=0, config_dir=tmp_path)


def test_reasoning_gym_task(tokenizer: ChatTokenizer) -> None:
    data = DataTable(task="basic_arithmetic", options=ADDITION, size=500, template="{expression} =")
    source = PromptSource.load(data, tokenizer, seed=3, config_dir=Path())
    report = source.report
    assert report.read == 500 == report.train + report.held_out + report.duplicates
    assert report.duplicates > 0
    item = source.prompt(0)
    a, b = map(int, item.metadata["expression"].split(" + "))
    assert item.messages == [{"role": "user", "content": f"{a} + {b} ="}]
    assert item.answer == str(a + b)
    assert item.tokens == tokenizer.render(item.messages)
    other = PromptSource.load(data, tokenizer, seed=4, config_dir=Path())
    assert [i.item for i in other.held_out] == [i.item for i in source.held_out]
    assert other.prompt(0).item != item.item or other.prompt(1).item != source.prompt(1).item


def test_the_verifier_of_the_task_scores() -> None:
    task = GymTask("chain_sum", {"min_terms": 2, "max_terms": 2}, 10)
    raw = list(task.items())[4]
    assert task.score(raw.answer, raw.metadata) == 1.0
    assert task.score("nothing", json.loads(json.dumps(raw.metadata))) == 0.0


@pytest.mark.parametrize(
    ("task", "options", "words"),
    [
        ("chain_sun", {}, "did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "did you mean 'm.._terms'"),
        ("chain_sum", {"size": 2}, "set data.size"),
        ("chain_sum", {"min_terms": 0}, "min_terms must be positive"),
    ],
)
def test_bad_tasks_and_options(task: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(RelaxError, match=words):
        GymTask(task, options, 10)


def test_tasks_and_options_are_known_without_importing_them() -> None:
    """The source of reasoning-gym shows every fault. Only for one that it shows is the package imported."""
    factory = pytest.importorskip("reasoning_gym.factory")
    wrong = {"no_such_option": 1}
    for task, (_, config) in factory.DATASETS.items():
        known = {field.name: 0 for field in dataclasses.fields(config) if field.name != "size"}
        assert find_fault(task, known, "data") is None
        assert (fault := find_fault(task, wrong, "data")) and fault.key == ("options", "no_such_option"), task
    assert (fault := find_fault("chain_sun", {}, "data")) and fault.hint == "did you mean 'chain_sum'?"
    assert f"there are {len(factory.DATASETS)}" in (find_fault("zzz", {}, "data") or fault).hint
    code = "import sys; from relax_rt.roles.data.gym import find_fault; "
    code += "find_fault('chain_sum', {'min_terms': 2}, 'data'); print('reasoning_gym' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert said == "False\n"


def test_a_fault_of_the_source_alone_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package registers decides, however its source is written."""
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "seen.py").write_text(
        '@dataclass\nclass SeenConfig:\n    x: int\nregister_dataset("seen", Seen, SeenConfig)'
    )
    (package / "latin.py").write_bytes(b'# \xe9\nregister_dataset("latin", Latin, LatinConfig)')
    (package / "gone.py").symlink_to(tmp_path / "nowhere.py")
    (package / "torn.py").write_text('register_dataset("torn", Torn, TornConfig)\n(')
    factory = "from dataclasses import make_dataclass\nDATASETS = {"
    factory += "".join(f'"{name}": (None, make_dataclass("C", ["x", "y"])), ' for name in ("seen", "hidden", "torn"))
    (package / "factory.py").write_text(factory + "}")
    for name in [one for one in sys.modules if one.partition(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    _registered_tasks.cache_clear()
    try:
        assert find_fault("hidden", {"x": 1}, "data") is None
        assert find_fault("seen", {"y": 1}, "data") is None
        assert find_fault("torn", {"z": 1}, "data") is None
        assert (fault := find_fault("seen", {"z": 1}, "data")) and fault.hint == "options are x, y"
        assert find_fault("latin", {}, "data") == (
            ("task",),
            "reasoning-gym has no such task",
            "there are 3, as chain_sum",
        )
    finally:
        for name in [one for one in sys.modules if one.partition(".")[0] == "reasoning_gym"]:
            del sys.modules[name]
        _registered_tasks.cache_clear()


def test_the_number_of_items_is_named_beside_the_task() -> None:
    pytest.importorskip("reasoning_gym")
    fault = find_fault("chain_sum", {"size": 2}, "evaluation.sets[0]")
    assert fault is not None and fault.hint == "set evaluation.sets[0].size"


def test_jsonl_with_prompts_and_messages(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    rows: list[Any] = [
        *numbered(40),
        "",
        {"prompt": "what is 3?", "answer": 3},
        {
            "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "answer": "x",
            "metadata": {"level": 2},
        },
    ]
    data = DataTable(path=write(tmp_path / "d.jsonl", rows), system="Be brief.", template="Q: {question}", held_out=0.3)
    source = PromptSource.load(data, tokenizer, seed=0, config_dir=tmp_path)
    items = {i.question: i for i in [*source.train, *source.held_out]}
    assert source.report.duplicates == 1
    assert len(items) == 41
    assert items["what is 3?"].answer == 3
    assert items["what is 3?"].messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Q: what is 3?"},
    ]
    chat = items["system: s\nuser: u"]
    assert chat.messages[0] == {"role": "system", "content": "s"}
    assert chat.info == {"question": "system: s\nuser: u", "metadata": {"level": 2}}


def test_parquet_reads_like_jsonl(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = numbered(40)
    for row in rows:
        row["answer"] = str(row["answer"])
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    write(tmp_path / "d.jsonl", rows)
    load = [
        PromptSource.load(DataTable(path=name), tokenizer, seed=0, config_dir=tmp_path)
        for name in ("d.parquet", "d.jsonl")
    ]
    assert list(load[0].train) == list(load[1].train)
    parquet.write_table(pyarrow.Table.from_pylist([*rows, {"answer": "1"}]), tmp_path / "bad.parquet")
    with pytest.raises(RelaxError, match=r"bad.parquet:row 41: `prompt` is null"):
        PromptSource.load(DataTable(path="bad.parquet"), tokenizer, seed=0, config_dir=tmp_path)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "not a JSON object"),
        ([1], "a row is an object"),
        ({"promt": "x", "answer": ""}, "is 'promt' meant to be 'prompt'"),
        ({"prompt": "x", "messages": [], "answer": ""}, "both `messages` and `prompt`"),
        ({"prompt": "x", "anwser": "1"}, "is 'anwser' meant to be 'answer'"),
        ({"prompt": " ", "answer": "1"}, "`prompt` is text"),
        ({"prompt": "x", "answer": "1", "metadata": 3}, "`metadata` is an object"),
        ({"messages": [], "answer": ""}, "`messages` is a list"),
        ({"messages": [{"role": "usr", "content": ""}], "answer": ""}, "message 1 has role 'usr'"),
        ({"messages": [{"role": "user"}], "answer": ""}, "message 1 is not an object with role and content"),
        ({"messages": [{"role": "assistant", "content": ""}], "answer": ""}, "nothing to generate"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path: Path, tokenizer: ChatTokenizer, row: Any, words: str) -> None:
    name = write(tmp_path / "d.jsonl", [{"prompt": "fine", "answer": ""}, row])
    with pytest.raises(RelaxError, match=f"d.jsonl:2: .*{words}"):
        PromptSource.load(DataTable(path=name), tokenizer, seed=0, config_dir=tmp_path)


def test_a_missing_file_is_answered_with_the_likely_one(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    write(tmp_path / "train.jsonl", numbered(2))
    with pytest.raises(RelaxError, match=r"did you mean .*train\.jsonl"):
        PromptSource.load(DataTable(path="trian.jsonl"), tokenizer, seed=0, config_dir=tmp_path)


@pytest.mark.parametrize(
    ("overlong", "longest", "dropped", "truncated"), [("drop", 16, 20, 0), ("truncate_left", 16, 0, 20)]
)
def test_overlong_prompts(
    tmp_path: Path, tokenizer: ChatTokenizer, overlong: Any, longest: int, dropped: int, truncated: int
) -> None:
    rows = [{"prompt": f"{i:03d}" + "x" * (10 if i % 2 else 20), "answer": ""} for i in range(40)]
    data = DataTable(path=write(tmp_path / "d.jsonl", rows), max_prompt_tokens=16, overlong=overlong, held_out=0.3)
    report = PromptSource.load(data, tokenizer, seed=0, config_dir=tmp_path).report
    assert (report.longest_tokens, report.dropped, report.truncated) == (longest, dropped, truncated)
    assert report.train + report.held_out + report.dropped == 40


def test_overlong_as_an_error_names_the_row(tmp_path: Path, tokenizer: ChatTokenizer) -> None:
    data = DataTable(path=write(tmp_path / "d.jsonl", numbered(3)), max_prompt_tokens=5, overlong="error")
    with pytest.raises(RelaxError, match=r"d.jsonl:1: it has \d+ tokens"):
        PromptSource.load(data, tokenizer, seed=0, config_dir=tmp_path)


def test_template_fields() -> None:
    raw = RawItem(question="q", answer="", metadata={"level": 3}, where="f:1")
    assert fill_template('{question} {level} {{"a": 1}} { x }', raw) == 'q 3 {"a": 1} { x }'
    with pytest.raises(RelaxError, match=r"names \{questoin\}.*did you mean \{question\}"):
        fill_template("{questoin}", raw)


TEMPLATE = (
    "<|pad|>{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '<|end|>' }}{% endfor %}"
    "{{ '<|assistant|>' if add_generation_prompt }}"
)
"""`<|pad|>` stands for a beginning of sequence."""


@pytest.fixture(scope="module")
def marked_tokenizer() -> ChatTokenizer:
    raw = character_tokenizer()
    raw.chat_template = TEMPLATE
    return ChatTokenizer(raw, Path("tiny"))


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


SYSTEM, OLD, REPLY = say("system", "SYS"), say("user", "a" * 20), say("assistant", "b" * 20)
NEW = say("user", "0123456789")
FUNCTION = {"name": "f", "arguments": {}}
CALL = {**say("assistant", None), "tool_calls": [{"id": "1", "type": "function", "function": FUNCTION}]}
PARTS = [{"type": "text", "text": "01234"}, {"type": "text", "text": "56789"}]
RESULT = say("tool", "42")
OPENING = "<|end|><|assistant|>"


@pytest.mark.parametrize(
    ("messages", "most", "text"),
    [
        # One message: its beginning goes, its marks do not. 1 + 1 + content + 1 + 1 tokens.
        ([NEW], 10, f"<|pad|><|user|>456789{OPENING}"),
        ([NEW], 5, f"<|pad|><|user|>9{OPENING}"),
        ([SYSTEM, NEW], 16, f"<|pad|><|system|>SYS<|end|><|user|>3456789{OPENING}"),
        ([say("developer", "SYS"), NEW], 16, f"<|pad|><|system|>SYS<|end|><|user|>3456789{OPENING}"),
        # Whole exchanges go first.
        ([OLD, REPLY, NEW], 20, f"<|pad|><|user|>0123456789{OPENING}"),
        ([SYSTEM, OLD, REPLY, NEW], 20, f"<|pad|><|system|>SYS<|end|><|user|>0123456789{OPENING}"),
        ([SYSTEM, OLD, REPLY, say("user", "c"), say("assistant", "d"), NEW], 26,
         f"<|pad|><|system|>SYS<|end|><|user|>c<|end|><|assistant|>d<|end|><|user|>0123456789{OPENING}"),
        ([SYSTEM, REPLY, NEW], 20, f"<|pad|><|system|>SYS<|end|><|user|>0123456789{OPENING}"),
        ([say("user", PARTS)], 8, f"<|pad|><|user|>6789{OPENING}"),
    ],
)  # fmt: skip
def test_the_oldest_content_goes(
    marked_tokenizer: ChatTokenizer, messages: list[dict[str, Any]], most: int, text: str
) -> None:
    found = truncate_conversation(messages, marked_tokenizer.render, most)
    assert found is not None
    kept, tokens = found
    assert marked_tokenizer.spell(tokens) == text and len(tokens) <= most
    assert tokens == marked_tokenizer.render(kept)


def test_a_call_stays_with_its_result(marked_tokenizer: ChatTokenizer) -> None:
    asked = [SYSTEM, OLD, REPLY, say("user", "c" * 30), CALL, RESULT]
    whole = len(marked_tokenizer.render(asked[3:]))
    found = truncate_conversation(asked, marked_tokenizer.render, whole)
    assert found is not None
    kept, tokens = found
    assert [one["role"] for one in kept] == ["system", "user", "assistant", "tool"] and len(tokens) <= whole
    assert set(kept[1]["content"]) == {"c"} and 0 < len(kept[1]["content"]) < 30


@pytest.mark.parametrize(
    ("messages", "most"),
    [
        ([NEW], 4),
        ([SYSTEM, NEW], 9),
        ([say("system", "s" * 40), NEW], 30),
        ([SYSTEM, say("user", "c"), CALL, say("tool", "r" * 40)], 30),
        ([SYSTEM, REPLY], 10),
        ([say("user", [{"type": "image"}, {"type": "text", "text": "c"}])], 1),
    ],
)
def test_what_cannot_be_shortened_is_not(
    marked_tokenizer: ChatTokenizer, messages: list[dict[str, Any]], most: int
) -> None:
    def render(some: list[dict[str, Any]]) -> list[int]:
        return [0] * 50 if isinstance(some[-1]["content"], list) else marked_tokenizer.render(some)

    assert truncate_conversation(messages, render, most) is None


def test_a_run_counts_what_was_cut_and_what_could_not_be(tmp_path: Path, marked_tokenizer: ChatTokenizer) -> None:
    rows = [{"prompt": f"{n:02d}" + "x" * (10 if n % 3 else 40), "answer": ""} for n in range(30)]
    rows += [{"messages": [say("system", f"{n:02d}" + "s" * 60), say("user", "x")], "answer": ""} for n in range(3)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = DataTable(path="d.jsonl", max_prompt_tokens=20, overlong="truncate_left", held_out=0.3)
    source = PromptSource.load(data, marked_tokenizer, seed=0, config_dir=tmp_path)
    assert (source.report.truncated, source.report.dropped, source.report.longest_tokens) == (10, 3, 20)
    for item in (*source.train, *source.held_out):
        assert marked_tokenizer.spell(item.tokens).startswith("<|pad|><|user|>")
        assert item.tokens == marked_tokenizer.render(item.messages)
