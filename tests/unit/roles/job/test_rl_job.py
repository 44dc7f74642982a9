"""The RL job: what it refuses, what it plans, and how the checks before a start read."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_model import save_fresh
from job_config import ROLES_TOML, problems

from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors
from relax_rt.roles.config.checks import needed_bytes, retained_batches
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.job.job import RLJob
from relax_rt.roles.job.preflight import as_problem, warnings
from relax_rt.roles.job.try_out import newest_checkpoint
from relax_rt.roles.models.precision import DtypeTiming
from relax_rt.roles.models.tiny import character_tokenizer, tiny_model
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.planning.estimate import DELTA_PART, SERVED_BESIDE, STAGE_BUFFERS, model_size
from relax_rt.roles.training.checkpoints.store import CheckpointState, CheckpointStore
from relax_rt.transport.rpc.errors import Corrupt, RelaxError
from relax_rt.transport.weights.manifest import MAX_DELTA
from relax_rt.transport.weights.stage import MAX_BUFFERS
from relax_rt.transport.weights.stream import MAX_SIDE_VERSIONS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fresh(tmp_path_factory.mktemp("model"))


@pytest.fixture
def toml(tmp_path: Path, model: Path) -> Path:
    (tmp_path / "model").symlink_to(model)
    path = tmp_path / "roles.toml"
    path.write_text(ROLES_TOML.format(dir=tmp_path))
    return path


def loaded(toml: Path, *overrides: str) -> RLConfig:
    config = load_config(toml, overrides)
    assert isinstance(config, RLConfig)
    return config


def test_the_config_of_these_tests_is_right(toml: Path) -> None:
    assert problems(toml, preflight=True) == {}


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("sampling.top_p=0.9", "sampling.top_p", "behaviour log-probabilities are of the full softmax"),
        ("sampling.top_k=5", "sampling.top_k", "refused for training"),
        ('data.path="p.jsonl"', "data.path", "both set"),
        ('data.columns={promt="q"}', "data.columns", "'promt' is no column of a prompt"),
        ('data.columns={prompt="q",messages="m"}', "data.columns", "both mapped"),
        ('data.columns={metadata=""}', "data.columns", "mapped to no column"),
        ('data.form="verl"', "data.form", "about rows of files; with task it has no effect"),
        ('data.ignore=["images"]', "data.ignore", "with task it has no effect"),
        ('data.sources=[{path="a.jsonl"}]', "data.sources", "task and sources are both set"),
        ('data.sources=[{path="a.jsonl",weight=1},{path="b.jsonl"}]', "data.sources", "some sources have a weight"),
        ('data.sources=[{path="a",name="x"},{path="b",name="x"}]', "data.sources", "two sources have the name 'x'"),
        ('data.template="Answer."', "data.template", "all prompts would be the same"),
        ('data.template="{{question}}"', "data.template", "all prompts would be the same"),
        ("algorithm.max_staleness=1.5", "algorithm.max_staleness", "whole number, or inf"),
        ("algorithm.adam_betas=[0.9, 1.0]", "algorithm.adam_betas", "must lie in"),
        ("algorithm.warmup_steps=100", "algorithm.warmup_steps", "the rate is never reached"),
        ("algorithm.learning_rate_floor=1e-7", "algorithm.learning_rate_floor", "has no effect"),
        ("algorithm.max_grad_norm=inf", "algorithm.max_grad_norm", "finite"),
        ("roles.rollout.count=0", "roles.rollout.count", "at least 1"),
        ("roles.reward.count=0", "roles.reward.count", "at least one reward"),
        ("reward.timeout_s=120", "reward.timeout_s", "would be killed as a hang"),
        ("queue.capacity_mib=16", "queue.capacity_mib", r"= 22 batches of 96 samples"),
    ],
)
def test_what_cannot_work_is_refused_at_its_key(toml: Path, override: str, key: str, words: str) -> None:
    extra = ("queue.slab_mib=8", "sampling.max_new_tokens=4000") if key.startswith("queue") else ()
    found = problems(toml, override, *extra)
    assert list(found) == [key]
    assert re.search(words, found[key].message)


def test_evaluation_during_the_run_needs_an_evaluator(toml: Path) -> None:
    assert list(problems(toml, "evaluation.every_steps=5", "roles.evaluator.count=0")) == ["evaluation.every_steps"]


@pytest.mark.parametrize(
    ("overrides", "slowdown"),
    [
        ((), 1.0),
        (("roles.trainer.threads=2",), 1.5),
        (("roles.trainer.threads=2", "roles.evaluator.count=0", "evaluation.every_steps=0"), 1.0),
        (("roles.trainer.threads=2", "roles.trainer.cpus=[0]"), 1.0),
        (("roles.trainer.threads=2", 'roles.evaluator.node="other"'), 1.0),
    ],
)
def test_the_time_left_knows_when_trainer_and_evaluator_share_cores(
    toml: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], slowdown: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    config = loaded(toml, *overrides)
    assert RLJob().pacing(config).contention == slowdown


def test_no_data_at_all(toml: Path) -> None:
    toml.write_text(toml.read_text().replace('task = "chain_sum"\nsize = 300\n', "").replace("options = ", "#"))
    assert "none of task, path and sources" in problems(toml)["data"].message


def test_unbounded_staleness_is_allowed_and_capacity_bounds_it(toml: Path) -> None:
    config = loaded(toml, "algorithm.max_staleness=inf")
    assert retained_batches(config) == 21
    assert RLJob().ledger_policy(config).max_staleness == float("inf")


def test_the_capacity_asked_for_is_enough(toml: Path) -> None:
    overrides = ("queue.slab_mib=1", "sampling.max_new_tokens=2000", "queue.capacity_mib=8")
    (problem,) = problems(toml, *overrides).values()
    suggested = problem.hint.partition(",")[0]
    assert problems(toml, *overrides[:2], f"queue.{suggested.replace(' ', '')}") == {}


def test_the_ledger_policy_is_the_config(toml: Path) -> None:
    policy = RLJob().ledger_policy(loaded(toml, "algorithm.group_size=4", "algorithm.max_staleness=3"))
    policy.check()
    assert (policy.group_size, policy.prompts_per_step, policy.max_staleness, policy.prompts) == (4, 12, 3, None)
    assert set(policy.tasks) == {"reward", "train"} and "reward" in policy.tasks["train"]


def test_epochs_bound_the_prompts(toml: Path) -> None:
    config = loaded(toml, "data.epochs=2", "algorithm.steps=10")
    limit = RLJob().ledger_policy(config).prompts
    assert limit is not None and 400 < limit < 600 and limit % 2 == 0
    found = problems(toml, "data.epochs=1", "algorithm.steps=100", preflight=True)
    assert "100 steps of 12 need 1200" in found["data.epochs"].message


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ('model.path="modle"', "model.path", "there is no folder"),
        ('data.task="chain_sun"', "data.task", "no such task"),
        ("data.options={min_term=2}", "data.options.min_term", "no such option"),
        ('data.template="{expresion}"', "data.template", "names {expresion}"),
        ("data.max_prompt_tokens=4", "data", "no training prompts among 0"),
        ("sampling.max_new_tokens=500", "sampling.max_new_tokens", "the model's context is 512"),
        ('reward.function="relax_rt.roles.rewards.builtin:interger"', "reward.function", "has no 'interger'"),
    ],
)
def test_preflight_finds_what_only_shows_when_loaded(toml: Path, override: str, key: str, words: str) -> None:
    found = problems(toml, override, preflight=True)
    assert list(found) == [key]
    assert words in found[key].message
    assert found[key].place is not None


@pytest.mark.parametrize(
    ("count", "named"), [(1, "p0.jsonl…"), (2, "p0.jsonl, p1.jsonl…"), (6, "p3.jsonl and 2 more…")]
)
def test_stage_names_the_sources_of_the_prompts(
    toml: Path, capsys: pytest.CaptureFixture[str], count: int, named: str
) -> None:
    for number in range(count):
        lines = [json.dumps({"prompt": f"{number} + {other}?", "answer": number + other}) for other in range(60)]
        (toml.parent / f"p{number}.jsonl").write_text("\n".join(lines))
    sources = ", ".join(f'{{ path = "p{number}.jsonl" }}' for number in range(count))
    task = toml.read_text().index("task ="), toml.read_text().index("[reward]")
    toml.write_text(f"{toml.read_text()[: task[0]]}sources = [{sources}]\n{toml.read_text()[task[1] :]}")
    assert problems(toml, preflight=True) == {}
    assert f"{named}\n" in capsys.readouterr().err


GOOD_ROW = '{"prompt": "1?", "answer": 1}\n'


@pytest.mark.parametrize(
    ("files", "more", "words"),
    [
        ({"c.jsonl": None}, "", ["there is no file"]),
        ({"c.jsonl": GOOD_ROW + "{"}, "", ["c.jsonl:2: not a JSON object"]),
        (
            {"c.jsonl": '{"question": "1?", "answer": 1}'},
            "",
            ["c.jsonl:1: there is neither", 'data.sources[2].columns = { prompt = "question" }'],
        ),
        (
            {"c.jsonl": GOOD_ROW},
            'columns = { prompt = "q" }',
            ["c.jsonl:1: data.sources[2].columns.prompt = 'q', and the row has no 'q'"],
        ),
        (
            {"c.jsonl": GOOD_ROW.replace("1}", f"{2**64}}}")},
            "",
            ["c.jsonl:1: an integer in it has more than 64 bits"],
        ),
        ({"c.jsonl/x.jsonl": ""}, "", ["there are no rows in it"]),
        ({"c.jsonl/x.jsonl": GOOD_ROW + "[]"}, "", ["x.jsonl:2: a row is an object"]),
    ],
)
def test_an_error_of_a_source_names_it_and_its_line(
    toml: Path, files: dict[str, str | None], more: str, words: list[str]
) -> None:
    text = toml.read_text()
    task, reward = text.index("task ="), text.index("[reward]")
    tables = "".join(f'[[data.sources]]\npath = "{name}.jsonl"\n' for name in "abc")
    toml.write_text(f"{text[:task]}{tables}{more}\n{text[reward:]}")
    for name, rows in {"a.jsonl": GOOD_ROW, "b.jsonl": GOOD_ROW, **files}.items():
        (toml.parent / name).parent.mkdir(exist_ok=True)
        if rows is not None:
            (toml.parent / name).write_text(rows)
    (problem,) = problems(toml, preflight=True).values()
    assert problem.path == ("data", "sources", 2, "path")
    assert problem.place is not None and problem.place.text == 'path = "c.jsonl"'
    told = f"{problem.message} {problem.hint}"
    assert told.startswith("data.sources[2].path = 'c.jsonl'") and all(word in told for word in words), told


@pytest.mark.parametrize(
    ("paths", "wrong"), [(["*.jsonl.gz", "b.jsonl"], "b.jsonl"), (["long_folder", "*2.jsonl"], "long_folder2.jsonl")]
)
@pytest.mark.parametrize("overlong", [False, True])
def test_an_error_is_placed_at_its_source_whatever_the_other_paths_are(
    toml: Path, paths: list[str], wrong: str, overlong: bool
) -> None:
    text = toml.read_text()
    task, reward = text.index("task ="), text.index("[reward]")
    limit = 'overlong = "error"\nmax_prompt_tokens = 20\n' if overlong else ""
    tables = "".join(f"[[data.sources]]\npath = {name!r}\n" for name in paths)
    toml.write_text(f"{text[:task]}{limit}{tables}\n{text[reward:]}")
    (toml.parent / "long_folder").mkdir()
    (toml.parent / "long_folder" / "x.jsonl").write_text(GOOD_ROW)
    with gzip.open(toml.parent / "a.jsonl.gz", "wt") as packed:
        packed.write(GOOD_ROW)
    row = json.dumps({"prompt": "12 " * 100, "answer": 1}) if overlong else "{"
    (toml.parent / wrong).write_text(GOOD_ROW + row)
    (problem,) = problems(toml, preflight=True).values()
    assert problem.path == ("data", "sources", 1, "path"), problem
    assert f"{wrong}:2" in problem.message


def test_a_column_of_all_sources_is_named_by_its_own_key(toml: Path) -> None:
    text = toml.read_text()
    task, reward = text.index("task ="), text.index("[reward]")
    toml.write_text(f'{text[:task]}columns = {{ prompt = "q" }}\n[[data.sources]]\npath = "a.jsonl"\n{text[reward:]}')
    (toml.parent / "a.jsonl").write_text(GOOD_ROW)
    (problem,) = problems(toml, preflight=True).values()
    assert problem.path == ("data", "sources", 0, "path")
    assert "a.jsonl:1: data.columns.prompt = 'q'" in problem.message
    assert problem.hint == "mend data.columns.prompt, or the row"


def test_a_tokenizer_that_is_not_the_models_is_refused(toml: Path) -> None:
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(toml.parent / "mixed")
    tiny_model(len(tokenizer) - 3, seed=0).save_pretrained(toml.parent / "mixed")
    found = problems(toml, 'model.path="mixed"', preflight=True)
    assert "3 tokens that the model, with vocab_size = " in found["model.path"].message


def test_preflight_finds_at_once_what_does_not_rest_on_each_other(toml: Path) -> None:
    wrong = {
        "data.options": "data.options={min_terms=0}",
        "reward.function": 'reward.function="relax_rt.roles.rewards.builtin:interger"',
    }
    assert problems(toml, *wrong.values(), preflight=True).keys() == wrong.keys()
    # The template is read with the items of the task, and needs no model.
    (toml.parent / "broken").mkdir()
    for name in ("config.json", "tokenizer.json", "a.safetensors"):
        (toml.parent / "broken" / name).write_text("nothing of the kind")
    wrong |= {"model.path": 'model.path="broken"'}
    assert problems(toml, *wrong.values(), preflight=True).keys() == wrong.keys()
    del wrong["data.options"]
    wrong |= {"data.template": 'data.template="{expresion}"'}
    assert problems(toml, *wrong.values(), preflight=True).keys() == wrong.keys()


def test_mistakes_that_show_without_reading_anything_are_reported_alone_and_all_of_them(toml: Path) -> None:
    quick = {
        "model.path": 'model.path="modle"',
        "run.seed": "run.seed=-1",
        "roles.trainer.tensor_parallel": "roles.trainer.tensor_parallel=2",
        "roles.rollout.count": "roles.rollout.count=-1",
        "data.task": 'data.task="chain_sun"',
    }
    slow = ("data.options={min_terms=0}", 'reward.function="relax_rt.roles.rewards.builtin:interger"')
    assert problems(toml, *quick.values(), *slow, preflight=True).keys() == quick.keys()


def test_a_missing_key_hides_no_check_of_others(toml: Path) -> None:
    text = toml.read_text().replace('path = "model"', "").replace('name = "r"', "")
    toml = toml.with_name("missing.toml")
    toml.write_text(text)
    cut = "roles.trainer.tensor_parallel"
    found = problems(toml, f"{cut}=2", "sampling.top_p=0.5", 'reward.function="x.py:y"', preflight=True)
    assert found.keys() == {"model.path", "run.name", cut, "sampling.top_p", "reward.function"}


def test_errors_become_problems_of_the_setting_they_name() -> None:
    assert as_problem(RelaxError("data.options.x", why="no"), ("data",)).path == ("data", "options", "x")
    assert as_problem(RelaxError("/tmp/f.jsonl:3", why="no"), ("data",)).path == ("data",)
    assert as_problem(RelaxError("data", why="no"), ("model",)).path == ("model",)
    assert as_problem(RelaxError("data.sources[1]", why="no"), ("data",)).path == ("data", "sources", 1)


def test_the_plan_counts(toml: Path) -> None:
    config = loaded(toml, "roles.rollout.count=2", "algorithm.max_staleness=2")
    lines = {(line.section, line.name): line for line in RLJob().plan(config)}
    assert lines["steps", "samples a step"].value == "96"
    assert lines["steps", "admitted at a time"].value == "288 samples"
    assert lines["steps", "ends when stalled"].value == "after 20m 00s"
    assert lines["memory, estimated", "parameters"].value == "0.8 M"
    assert ("memory, estimated", "rollout, each of 2") in lines
    order = [line.name for line in RLJob().plan(config) if line.section.startswith("processes")]
    assert order.index("registry") < order.index("queue") < order.index("rollout")
    assert needed_bytes(config) <= config.queue.capacity_mib << 20


def test_the_weight_stage_is_asked_for(toml: Path) -> None:
    parameters = model_size("model", toml.parent).parameters
    assert (STAGE_BUFFERS, DELTA_PART, SERVED_BESIDE) == (MAX_BUFFERS, MAX_DELTA, MAX_SIDE_VERSIONS)
    half = 'roles.rollout.dtype="bfloat16"'
    assert RLJob().shm_bytes(loaded(toml, half)) == STAGE_BUFFERS * 2 * parameters + (1 << 20)
    # With deltas, room for the one to the committed version and the one being written.
    deltas = loaded(toml, half, "publication.delta=true")
    assert RLJob().shm_bytes(deltas) == (STAGE_BUFFERS + 2 * DELTA_PART) * 2 * parameters + (1 << 20)
    # And between nodes for those that are still read by one.
    more = loaded(toml, half, "publication.delta=true", 'supervision.nodes.listen="127.0.0.1:0"')
    assert RLJob().shm_bytes(more) == (STAGE_BUFFERS + 2 * DELTA_PART + SERVED_BESIDE) * 2 * parameters + (1 << 20)
    (line,) = (line for line in RLJob().plan(deltas) if (line.section, line.name) == ("shared memory", "weights"))
    assert "for deltas" in line.how
    assert RLJob().shm_bytes(loaded(toml, 'roles.rollout.dtype="float32"')) == STAGE_BUFFERS * 4 * parameters + (
        1 << 20
    )


def test_engines_of_different_dtypes_are_refused(toml: Path) -> None:
    with pytest.raises(ConfigErrors, match="published in one dtype"):
        loaded(toml, 'roles.rollout.dtype="float32"', 'roles.evaluator.dtype="bfloat16"')


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return monkeypatch


@pytest.mark.usefixtures("two_cores")
def test_more_threads_than_cores_is_a_warning(toml: Path) -> None:
    assert warnings(loaded(toml)) == []
    (warning,) = warnings(loaded(toml, "roles.trainer.threads=4"))
    assert "5 threads on 2 cores" in warning


@pytest.mark.usefixtures("two_cores")
def test_a_single_checkpoint_is_a_warning(toml: Path) -> None:
    (warning,) = warnings(loaded(toml, "checkpoint.keep=1"))
    assert "checkpoint.keep = 1" in warning and "damaged" in warning


def test_numbers_that_the_processor_is_slow_with_are_a_warning(toml: Path, two_cores: pytest.MonkeyPatch) -> None:
    kinds = ("rollout", "trainer", "evaluator")
    told = [f'roles.{kind}.dtype="bfloat16"' for kind in kinds]
    two_cores.setattr("relax_rt.roles.models.precision.computes_bfloat16", lambda: False)
    (warning,) = warnings(loaded(toml, *told))
    assert all(f'roles.{kind}.dtype = "float32"' in warning for kind in kinds)
    assert warnings(loaded(toml)) == [], "what was chosen is not slow"
    (warning,) = warnings(loaded(toml, *told, "roles.trainer.gpus=1"))
    assert "roles.trainer" not in warning and "roles.rollout" in warning


def test_adapters_whose_changes_would_be_rounded_away_are_a_warning(toml: Path, two_cores: pytest.MonkeyPatch) -> None:
    two_cores.setattr("relax_rt.roles.models.precision.computes_bfloat16", lambda: True)
    two_cores.setattr("relax_rt.roles.models.precision._read_cached", lambda: DtypeTiming(1.0, 0.5))
    lora, half = "roles.trainer.lora={rank=4}", 'roles.rollout.dtype="bfloat16"'
    (warning,) = warnings(loaded(toml, lora, half))
    assert "changes_kept" in warning and 'roles.rollout.dtype = "float32"' in warning
    assert warnings(loaded(toml, lora)) == warnings(loaded(toml, half)) == []


def test_model_size_is_read_from_headers(toml: Path, model: Path) -> None:
    size = model_size("model", toml.parent)
    assert size.known and size.parameters == sum(p.numel() for p in tiny_model(102, seed=0).parameters())
    config = json.loads((model / "config.json").read_text())
    assert size.kv_values_a_token == config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * 32
    assert not model_size("nowhere", toml.parent).known


def test_packaged_sizes_are_those_of_the_tiny_model() -> None:
    assert model_size("package:tiny", Path()).parameters == sum(p.numel() for p in tiny_model(102, 0).parameters())


def test_importing_the_job_is_light() -> None:
    code = "import sys, relax_rt.roles.job.job; print({'numpy', 'torch', 'transformers'} & set(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120).stdout
    assert said == "set()\n"


def test_sampling_before_the_first_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(RelaxError, match="no checkpoint yet"):
        newest_checkpoint(tmp_path)


def test_sampling_takes_the_newest_checkpoint(toml: Path, model: Path) -> None:
    run_dir = toml.parent / "run"
    store = CheckpointStore(run_dir / "checkpoints", 1, 2)
    for step in (2, 10):
        store.save(CheckpointState(step, step, "", 1, step), lambda to: shutil.copytree(model, to, dirs_exist_ok=True))
    # The trainer died while it replaced the newest one.
    (store.folder / "step-000010").rename(store.folder / "step-000010-replaced")
    found = RLJob().sample(loaded(toml, "roles.evaluator.max_sequences=4"), run_dir, 3, held_out=True)
    assert [(s.step, s.split, s.index) for s in found] == [(10, "held_out", n) for n in range(3)]
    assert found[0].model.endswith("step-000010-replaced")


def test_sampling_refuses_weights_that_are_not_what_was_written(tmp_path: Path) -> None:
    def fill(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"12345")
        (folder / "optimizer-00001-of-00001.safetensors").write_bytes(b"12345")

    folder = CheckpointStore(tmp_path / "checkpoints", 1, 1).save(CheckpointState(5, 6, "d", 1, 5), fill)
    (folder / "optimizer-00001-of-00001.safetensors").unlink()
    assert newest_checkpoint(tmp_path) == (folder, 5)
    (folder / "model.safetensors").write_bytes(b"12340")
    with pytest.raises(Corrupt, match=r"step-000005: model\.safetensors is not what was written"):
        newest_checkpoint(tmp_path)
    (folder / "relax_rt.json").write_text("{")
    with pytest.raises(RelaxError, match=r"no checkpoint of .* can be read: step-000005: "):
        newest_checkpoint(tmp_path)


def test_samples_are_those_that_a_run_would_make(toml: Path, model: Path) -> None:
    reward = "def score(completion, answer, tokens, split, question):\n    assert question and split == 'train'\n"
    (toml.parent / "mine.py").write_text(reward + "    return {'length': tokens, 'right': completion == answer}\n")
    config = loaded(toml, "reward.function=mine.py:score", "roles.rollout.max_sequences=2")
    found = RLJob().sample(config, None, 3)
    tokenizer = load_tokenizer(model)
    source = PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=toml.parent)
    for index, sample in enumerate(found):
        item, start = source.prompt(index), len(source.prompt(index).tokens)
        assert (sample.item, sample.answer, sample.tokens[:start]) == (item.item, item.answer, item.tokens)
        assert sample.prompt == tokenizer.text(item.messages)
        sampled = sample.tokens[start:]
        assert 0 < len(sampled) <= 8
        assert sample.loss_mask == [0] * start + [1] * len(sampled)
        assert all(p < 0 for p in sample.behaviour_logprobs[start:]) and not any(sample.behaviour_logprobs[:start])
        assert sample.mean_logprob == pytest.approx(sum(sample.behaviour_logprobs) / len(sampled))
        assert sample.completion == tokenizer.decode(sampled)
        assert (sample.stop_token != "") == (sample.finish_reason == "stop") == (sampled[-1] in tokenizer.stop_ids)
        right = float(sample.completion == item.answer)
        assert (sample.rewards, sample.reward) == ({"length": len(sampled), "right": right}, len(sampled) + right)
    assert RLJob().sample(config, None, 3) == found


def test_a_reward_that_fails_is_reported_with_its_sample(toml: Path) -> None:
    (toml.parent / "mine.py").write_text("def fails(completion, answer):\n    raise ValueError('never')\n")
    (one,) = RLJob().sample(loaded(toml, "reward.function=mine.py:fails"), None, 1)
    assert (one.reward, one.rewards) == (None, {})
    assert "ValueError: never" in one.unscored


def test_own_prompts_are_rendered_and_not_scored(toml: Path) -> None:
    (own,) = RLJob().sample(loaded(toml, "data.template=Sum: {question}"), None, 4, prompts=["1 + 1 ="])
    assert "Sum: 1 + 1 =" in own.prompt
    assert (own.split, own.answer, own.reward, own.item) == ("own", None, None, "")
    assert own.unscored and sum(own.loss_mask) > 0


def test_no_more_held_out_prompts_than_there_are(toml: Path) -> None:
    config = loaded(toml, "data.size=30", "data.epochs=1", "algorithm.prompts_per_step=1", "algorithm.steps=1")
    train, held_out = RLJob().sample(config, None, 1000), RLJob().sample(config, None, 1000, held_out=True)
    assert train and held_out
    assert not {s.item for s in train} & {s.item for s in held_out}
    assert len({s.item for s in [*train, *held_out]}) == len(train) + len(held_out) <= 30


def test_prompts_that_do_not_fit_the_context_are_refused(toml: Path) -> None:
    with pytest.raises(RelaxError, match="context"):
        RLJob().sample(loaded(toml), None, 1, prompts=["1" * 100_000])


def test_what_this_machine_cannot_place_is_refused_by_the_slow_checks(
    toml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relax_rt.cluster.nodes.checks.count_gpus", lambda: 0)
    gpu = "roles.rollout.gpus=1"
    assert problems(toml, gpu) == {}
    found = problems(toml, gpu, preflight=True)["roles.rollout.gpus"]
    assert found.message == "roles.rollout.gpus = 1: this machine has 0, and no other node can join"
    assert problems(toml, gpu, 'supervision.nodes.listen="127.0.0.1:0"', preflight=True) == {}
    assert "one node only" in problems(toml, 'roles.rollout.node="b"', preflight=True)["roles.rollout.node"].message
    monkeypatch.setattr("relax_rt.cluster.nodes.checks.count_gpus", lambda: 1)
    assert problems(toml, gpu, preflight=True) == {}
