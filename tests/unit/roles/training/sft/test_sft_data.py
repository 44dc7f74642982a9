"""The data of a cold start: what is left out, how it is divided, in which order it comes, and what is refused."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sft_parts import config_of, write_rows

from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.training.algorithms.settings import ColdStartTable
from relax_rt.roles.training.sft.data import SftData, UnusableRows, load_sft_data, sft_samples
from relax_rt.roles.training.sft.phase import step_batches, total_steps
from relax_rt.transport.rpc.errors import RelaxError


def source_of(config: RLConfig, home: Path) -> PromptSource:
    tokenizer = load_tokenizer(home / "model")
    return PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=home)


def loaded(home: Path, *overrides: str) -> tuple[SftData, PromptSource]:
    config = config_of(home, *overrides)
    source = source_of(config, home)
    return load_sft_data(config, home, source, load_tokenizer(home / "model")), source


def test_the_runs_own_answers_are_those_of_its_training_prompts(home: Path) -> None:
    data, source = loaded(home, "cold_start.answers=true", 'cold_start.completion="it is {answer}"')
    report = data.report
    assert report.read == len(source.train) == report.train + report.validation and report.evaluated == 0
    assert 0 < report.validation < 0.2 * report.read
    made = load_tokenizer(home / "model")
    said = set()
    for item in [*data.train, *data.validation]:
        (one,) = item.sequences
        said.add(made.spell(one.tokens.tolist()))
    assert said == {made.spell(item.tokens) + f"it is {item.answer}<|end|>" for item in source.train}, (
        "none of the held-out ones, each with the prompt that rollouts get"
    )
    assert report.learnt == sum(int(one.mask.sum()) for item in data.train for one in item.sequences)


def rows_about(source: PromptSource) -> list[dict[str, Any]]:
    """Held-out questions in every form that they may have, and some others."""
    asked = source.held_out[:4]
    free = source.train[:4]
    rows: list[dict[str, Any]] = [{"prompt": item.question, "completion": "1"} for item in [asked[0], *free[:2]]]
    for item in (asked[1], free[2]):
        chat = {"role": "user", "content": item.messages[0]["content"]}
        rows.append({"messages": [{"role": "system", "content": "add"}, chat, {"role": "assistant", "content": "1"}]})
    later = {"role": "user", "content": asked[2].question.upper() + "  "}
    ho = {"role": "assistant", "content": "ho"}
    rows.append({"messages": [{"role": "user", "content": "hi"}, ho, later, ho]})
    return rows


def test_questions_that_the_run_evaluates_on_are_left_out_in_any_form(home: Path) -> None:
    source = source_of(config_of(home), home)
    name = write_rows(home / "rows.jsonl", rows_about(source))
    data, _ = loaded(home, f'cold_start.path="{name}"', "cold_start.held_out=0")
    assert (data.report.read, data.report.evaluated, data.report.train, data.report.validation) == (6, 3, 3, 0)
    assert "3 that the run evaluates on left out" in str(data.report)


def test_so_are_questions_of_further_evaluation_sets(home: Path) -> None:
    questions = [{"prompt": f"how much is {n}?", "answer": str(n)} for n in range(40)]
    write_rows(home / "set.jsonl", questions)
    rows = [
        {"prompt": row["prompt"], "completion": row["answer"]} for row in [*questions, {"prompt": "?", "answer": "!"}]
    ]
    name = write_rows(home / "rows.jsonl", rows)
    data, _ = loaded(
        home,
        f'cold_start.path="{name}"',
        "cold_start.held_out=0",
        'evaluation.sets=[{ name = "mine", path = "set.jsonl" }]',
    )
    assert (data.report.evaluated, data.report.train) == (40, 1)


def test_a_larger_share_for_validation_is_a_superset(home: Path) -> None:
    small, _ = loaded(home, "cold_start.answers=true", "cold_start.held_out=0.1")
    large, _ = loaded(home, "cold_start.answers=true", "cold_start.held_out=0.4")

    def texts(data: SftData) -> set[bytes]:
        return {item.sequences[0].tokens.tobytes() for item in data.validation}

    assert texts(small) < texts(large)
    assert small.digest != large.digest


def test_overlong_rows_are_dropped_or_told(home: Path) -> None:
    rows = [{"prompt": "a", "completion": "b" * n} for n in (3, 200)]
    name = write_rows(home / "rows.jsonl", rows)
    settings = (f'cold_start.path="{name}"', "cold_start.max_tokens=60", "cold_start.held_out=0")
    data, _ = loaded(home, *settings)
    assert (data.report.overlong, data.report.train) == (1, 1)
    with pytest.raises(RelaxError, match=r"rows\.jsonl:2") as caught:
        loaded(home, *settings, 'cold_start.overlong="error"')
    assert "cold_start.max_tokens is 60" in caught.value.why


def test_pairs_are_groups_of_two_with_the_preferred_one_first(home: Path) -> None:
    rows = [{"prompt": f"q{n}", "chosen": "yes", "rejected": "no!"} for n in range(3)]
    name = write_rows(home / "rows.jsonl", rows)
    data, _ = loaded(home, f'cold_start.path="{name}"', 'cold_start.kind="dpo"', "cold_start.held_out=0")
    samples = sft_samples(data.train)
    assert [(s.meta.group, s.meta.member, s.reward) for s in samples[:4]] == [
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 1),
        (1, 1, 0),
    ]
    made = load_tokenizer(home / "model")
    assert [made.decode(s.tokens[s.loss_mask != 0].tolist()) for s in samples[:2]] == ["yes", "no!"]


def test_faults_are_raised_together(home: Path) -> None:
    name = write_rows(home / "rows.jsonl", [{"prompt": "a"}, {"prompt": "a", "completion": "b"}, 3])
    with pytest.raises(UnusableRows) as caught:
        loaded(home, f'cold_start.path="{name}"')
    assert [error.what.rpartition(":")[2] for error in caught.value.each] == ["1", "3"]


def refused(home: Path, *overrides: str, preflight: bool = False) -> dict[str, str]:
    config_of(home)
    try:
        load_config(home / "roles.toml", overrides, preflight=preflight)
    except ConfigErrors as error:
        return {".".join(map(str, p.path)): f"{p.message} ({p.hint})" for p in error.problems}
    return {}


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["cold_start.steps=3"], "cold_start", "nothing to learn from"),
        (['cold_start.path="x.jsonl"', "cold_start.answers=true"], "cold_start.answers", "both set"),
        (["cold_start.answers=true", 'cold_start.kind="dpo"'], "cold_start.answers", "dpo compares two"),
        (["cold_start.answers=true", "cold_start.steps=3", "cold_start.epochs=1"], "cold_start.epochs", "both set"),
        (["cold_start.answers=true", "cold_start.beta=0.2"], "cold_start.beta", "no effect"),
        (["cold_start.answers=true", 'cold_start.completion="42"'], "cold_start.completion", "{answer}"),
        (['cold_start.path="x.jsonl"', 'cold_start.completion="{answer}."'], "cold_start.completion", "leave it out"),
        (["cold_start.answers=true", "cold_start.batch_tokens=100"], "cold_start.batch_tokens", "less than max_tokens"),
        (
            ["cold_start.answers=true", "cold_start.steps=3", "cold_start.warmup_steps=3"],
            "cold_start.warmup_steps",
            "never reached",
        ),
        (["cold_start.answers=true", "cold_start.step=3"], "cold_start.step", "steps"),
    ],
)
def test_what_does_not_go_together_is_refused(home: Path, overrides: list[str], key: str, says: str) -> None:
    found = refused(home, *overrides)
    assert key in found and says in found[key], found


def test_validation_reads_the_data_and_tells_each_fault(home: Path) -> None:
    name = write_rows(home / "rows.jsonl", [{"prompt": "a"}, {"prompt": "a", "completion": "b"}])
    found = refused(home, f'cold_start.path="{name}"', preflight=True)
    assert "rows.jsonl:1: there is no `completion`" in found["cold_start.path"]
    found = refused(home, 'cold_start.path="row.jsonl"', preflight=True)
    assert "there is no file" in found["cold_start.path"] and "rows.jsonl" in found["cold_start.path"]
    long = write_rows(home / "long.jsonl", [{"prompt": "a", "completion": "b" * 600}])
    found = refused(home, f'cold_start.path="{long}"', "cold_start.held_out=0", preflight=True)
    assert "the model's context is 512" in found["cold_start.max_tokens"]
    assert refused(home, "cold_start.answers=true", preflight=True) == {}


def test_a_completion_names_fields_of_the_item(home: Path) -> None:
    found = refused(home, "cold_start.answers=true", 'cold_start.completion="{anser}"', preflight=True)
    assert "did you mean {answer}?" in found["cold_start.completion"]


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    batch=st.integers(1, 9),
    tokens=st.none() | st.integers(30, 90),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
)
def test_a_pass_takes_every_row_once_and_steps_are_as_large_as_they_may_be(
    sizes: list[int], batch: int, tokens: int | None, epochs: int, seed: int
) -> None:
    table = ColdStartTable(answers=True, batch=batch, batch_tokens=tokens, epochs=epochs)
    steps = list(step_batches(table, sizes, seed))
    assert len(steps) == total_steps(table, sizes, seed)
    flat = [row for step in steps for row in step]
    for number in range(epochs):
        assert sorted(flat[number * len(sizes) : (number + 1) * len(sizes)]) == list(range(len(sizes)))
    for step, following in zip(steps, [*steps[1:], [None]], strict=True):
        size = sum(sizes[row] for row in step)
        assert len(step) == batch if tokens is None and following[0] is not None else len(step) <= max(batch, len(flat))
        if tokens is not None:
            assert size <= tokens
            assert following[0] is None or size + sizes[following[0]] > tokens


def test_steps_go_on_over_as_many_passes_as_they_need() -> None:
    table = ColdStartTable(answers=True, batch=4, steps=10)
    steps = list(step_batches(table, [1] * 6, 0))
    assert total_steps(table, [1] * 6, 0) == len(steps) == 10 and all(len(step) == 4 for step in steps)
    assert list(islice(step_batches(table, [1] * 6, 0), 7, 10)) == steps[7:], (
        "a resumed phase goes on with the same rows"
    )
    assert list(step_batches(table, [1] * 6, 1)) != steps
