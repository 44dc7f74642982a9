"""Slow checks before a run starts: model, data, reward function, and how they fit together."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from relax_rt.cluster.nodes.checks import node_problems
from relax_rt.config.problems import KeyPath, Problem
from relax_rt.config.schema import RoleSettings
from relax_rt.roles.agentic.preflight import preflight_environment
from relax_rt.roles.agentic.rewards import reward_table
from relax_rt.roles.agentic.settings import env_settings
from relax_rt.roles.config.algorithm_checks import check_own_parts
from relax_rt.roles.config.cold_start_checks import preflight_cold_start
from relax_rt.roles.config.evaluation_checks import preflight_evaluation
from relax_rt.roles.config.model_checks import check_computed, check_engine_model, check_images, engine_warnings
from relax_rt.roles.config.publication_checks import preflight_publication, wire_note
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import RECORD, PromptSource, check_data
from relax_rt.roles.models.cache import say, stage
from relax_rt.roles.models.precision import cpu_dtype
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.models.tokenizer import ChatTokenizer, check_vocabulary, load_tokenizer
from relax_rt.roles.planning.division import divides_model
from relax_rt.roles.rewards.answer_checks import MAX_PRINTED, answer_reports
from relax_rt.roles.rewards.checks import describe_sandboxes, preflight_judge
from relax_rt.roles.rewards.dry_run import dry_run, task_of
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.rollout.engines.sglang.options import check_sglang
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.checks import check_adapters, check_packing, check_reference
from relax_rt.transport.rpc.errors import RelaxError

SETTING = re.compile(r"(model|data|reward)(\.[a-z_]+|\[\d+\])+")
BUSY = ("rollout", "trainer", "reference", "genrm")
"""Roles that hold a core for each of their threads. Rewards and evaluations are short."""
SOURCES = 4
"""At most so many sources of prompts are named by a stage."""
NEEDED = ("torch", "transformers", "safetensors")

Stage = tuple[str, Callable[[], Iterable[Problem]]]
"""A slow check: its description, printed before it runs (empty: it takes no time), and its problems."""


def preflight(config: RLConfig, config_dir: Path, *, answers: bool = True) -> list[Problem]:
    """Check the model folder (a package is converted here), the prompts and the reward, each unless it depends on one
    that is wrong. Warnings go to standard error.

    Args:
        answers: whether to score some right answers of the data.
    """
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        hint = "pip install relax-rt[cpu], or relax-rt[gpu]"
        return [Problem(("model",), f"not installed: {', '.join(lacking)}", hint, at="key")]
    for warning in warnings(config):
        say(f"warning: {warning}")
    if (rewards := reward_table(config)) is not None and (sandboxes := asyncio.run(describe_sandboxes(rewards))):
        say(sandboxes)
    problems = [*node_problems(config, config.roles), *check_sglang(config, config_dir)]
    problems += preflight_publication(config, config_dir)
    problems += check_own_parts(config)
    with stage(f"reading the model {config.model.path}"):
        folder, tokenizer = _model(config, config_dir, problems)
    if env_settings(config) is not None:
        return [*problems, *_episodes(config, config_dir, folder, tokenizer, answers=answers)]
    source = None
    if tokenizer is not None:
        with stage(f"reading the prompts of {_source_names(config.data)}"):
            source = _prompts(config, config_dir, tokenizer, problems)
    if tokenizer is None or source is None:
        # The rest of the data and the reward function depend on neither.
        problems += _without_prompts(config, config_dir, data=tokenizer is None)
        return problems
    say(str(source.report))
    for note in source.report.notes:
        say(f"data: {note}")
    for warning in engine_warnings(config, folder):
        say(f"warning: {warning}")
    if len(source.held_out) < config.evaluation.items:
        say(f"warning: evaluation.items = {config.evaluation.items}, but {len(source.held_out)} prompts are held out")
    longest, positions = source.report.longest_tokens, _positions(folder)
    stages: list[Stage] = [
        ("checking that engines and trainer can compute the model", lambda: _check_model(config, folder)),
        ("checking that model and prompts fit together", lambda: _context(config, folder, longest)),
        ("", lambda: check_reference(config, config_dir, tokenizer, longest + config.sampling.max_new_tokens)),
        ("", lambda: _epochs(config, source)),
        (
            "calling the reward on a prompt",
            lambda: dry_run(config.reward, config_dir, source.train, task_of(config.data)),
        ),
        *([_answers_stage(config, config_dir)] if answers else []),
        ("", lambda: preflight_judge(config, config_dir, source.train)),
        ("checking the evaluation", lambda: preflight_evaluation(config, config_dir, source, tokenizer, positions)),
    ]
    if config.cold_start.wanted:
        rows = config.cold_start.path or "answers"
        check = partial(preflight_cold_start, config, config_dir, source, tokenizer, positions)
        stages.append((f"reading the cold start's {rows}", check))
    return [*problems, *_run(stages)]


def _run(stages: Sequence[Stage]) -> list[Problem]:
    """Run the checks in order and collect their problems; print the description of each that takes time."""
    problems: list[Problem] = []
    for what, check in stages:
        with stage(what) if what else nullcontext():
            problems += check()
    return problems


def _episodes(
    config: RLConfig, config_dir: Path, folder: Path, tokenizer: ChatTokenizer | None, *, answers: bool
) -> list[Problem]:
    """Check a run whose samples are episodes of an environment."""
    env = env_settings(config)
    assert env is not None
    positions = _positions(folder) if tokenizer else None
    play = partial(preflight_environment, config, config_dir, tokenizer, positions)
    stages: list[Stage] = [(f"beginning an episode of {env.environment}", play)]
    if tokenizer is not None:
        stages += [
            ("checking that engines and trainer can compute the model", lambda: _check_model(config, folder)),
            *([_answers_stage(config, config_dir)] if answers else []),
            ("", lambda: check_reference(config, config_dir, tokenizer, env.max_tokens)),
        ]
    return _run(stages)


def _check_model(config: RLConfig, folder: Path) -> list[Problem]:
    return [
        *check_computed(config, folder),
        *_division(config, folder),
        *check_engine_model(config, folder),
        *check_adapters(config, folder),
        *check_packing(config, folder),
        *check_images(config, folder),
    ]


def _model(config: RLConfig, config_dir: Path, problems: list[Problem]) -> tuple[Path, ChatTokenizer | None]:
    try:
        folder = resolve_model(config.model.path, config_dir)
        tokenizer = load_tokenizer(folder)
        tokenizer.stop_ids  # noqa: B018 - refuses a tokenizer without any
    except RelaxError as error:
        problems.append(as_problem(error, ("model", "path")))
        return Path(), None
    problems += check_vocabulary(folder, tokenizer)
    return folder, tokenizer


def _prompts(
    config: RLConfig, config_dir: Path, tokenizer: ChatTokenizer, problems: list[Problem]
) -> PromptSource | None:
    # Of a run that is resumed the rows must be those that it began with.
    run_dir = Path(config.run.dir)
    resumed = run_dir if (run_dir / RECORD).is_file() else None
    try:
        return PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=config_dir, run_dir=resumed)
    except RelaxError as error:
        problems.append(as_problem(error, ("data",)))
        return None


def _source_names(data: DataTable) -> str:
    """Name where the prompts come from."""
    if not data.sources:
        return str(data.path or data.task)
    more = len(data.sources) - SOURCES
    return ", ".join(one.path for one in data.sources[:SOURCES]) + (f" and {more} more" if more > 0 else "")


def _without_prompts(config: RLConfig, config_dir: Path, *, data: bool) -> list[Problem]:
    """Check what needs neither the model nor rendered prompts.

    Args:
        data: the data was not looked at yet.
    """
    problems: list[Problem] = []
    if data:
        try:
            check_data(config.data, config_dir)
        except RelaxError as error:
            problems.append(as_problem(error, ("data",)))
    # No item to call it on: it is loaded only.
    return [*problems, *dry_run(config.reward, config_dir, [], None)]


def warnings(config: RLConfig) -> list[str]:
    """Return warnings about settings that work but are probably not meant."""
    found = [note] if (note := wire_note(config)) else []
    if config.checkpoint.keep == 1:
        found.append("checkpoint.keep = 1: if the newest checkpoint is damaged, there is none before it to go on from")
    busy = [table for kind in BUSY if isinstance(table := config.roles.get(kind), RoleSettings)]
    threads, cores = sum(table.count * table.threads for table in busy), os.cpu_count() or 1
    if threads > cores:
        found.append(f"the roles that compute have {threads} threads on {cores} cores; they will slow each other down")
    return found + _slow_dtypes(config) + _rounded_adapters(config)


def _rounded_adapters(config: RLConfig) -> list[str]:
    trainer, rollout = config.roles.get("trainer"), config.roles.get("rollout")
    if not isinstance(trainer, TrainerSettings) or trainer.lora is None:
        return []
    if not isinstance(rollout, EngineSettings) or rollout.dtype != "bfloat16":
        return []
    return [
        "roles.trainer.lora, with weights published in bfloat16: what adapters change by less than about 1/256 of a "
        "weight is rounded away before it reaches the engines; `changes_kept` in the publications' records is the part "
        'that is left, and roles.rollout.dtype = "float32" keeps all'
    ]


def _slow_dtypes(config: RLConfig) -> list[str]:
    """Warn about roles that use bfloat16, by their table or a start on another machine, on a CPU where it is slow."""
    rounded = [
        f'roles.{kind}.dtype = "float32"'
        for kind, table in config.roles.items()
        if isinstance(table, EngineSettings | ShardedSettings)
        and (bool(table.count), table.gpus, table.dtype) == (True, 0, "bfloat16")
    ]
    if not rounded or (fast := cpu_dtype()).dtype == "bfloat16":
        return []
    return [f"{fast.why}; float32 is faster and takes twice the memory: set {', '.join(rounded)}"]


def as_problem(error: RelaxError, default: KeyPath) -> Problem:
    """Return an error as a problem of the setting that it names, else of `default`."""
    named = SETTING.match(error.what)
    path: KeyPath = default
    if named:
        path = tuple(int(part) if part.isdigit() else part for part in re.findall(r"\w+", named[0]))
    return Problem(path, error.what + (f": {error.why}" if error.why else ""), error.hint)


def _division(config: RLConfig, folder: Path) -> list[Problem]:
    """Check that Megatron-Core gangs can compute the model and divide it as configured."""
    gangs = [t for t in config.roles.values() if isinstance(t, ShardedSettings) and t.backend == "megatron"]
    if not gangs:
        return []
    from relax_rt.roles.training.megatron.model import read_architecture

    try:
        shape = read_architecture(folder).shape
    except RelaxError as error:
        return [as_problem(error, ("model", "path"))]
    return [*divides_model(config, shape)]


def _answers_stage(config: RLConfig, config_dir: Path) -> Stage:
    return "scoring right answers against themselves", lambda: _check_answers(config, config_dir)


def _check_answers(config: RLConfig, config_dir: Path) -> list[Problem]:
    """Report right answers that their own reward cannot read: some are a warning, most are a problem."""
    try:
        reports = answer_reports(reward_table(config), config.data, config_dir)
    except RelaxError as error:
        return [as_problem(error, ("reward",))]
    problems = [problem for report in reports if (problem := report.problem(MAX_PRINTED))]
    for report in reports if not problems else []:
        for line in report.lines(MAX_PRINTED):
            say(line if line.startswith(" ") else f"warning: {line}")
    return problems


def _positions(folder: Path) -> int | None:
    """Return the model's context in tokens, if its config has it."""
    values = json.loads((folder / "config.json").read_text())
    context = values.get("max_position_embeddings") or values.get("text_config", {}).get("max_position_embeddings")
    return context if isinstance(context, int) else None


def _context(config: RLConfig, folder: Path, longest_tokens: int) -> list[Problem]:
    context = _positions(folder)
    need = longest_tokens + config.sampling.max_new_tokens
    if context is None or need <= context:
        return []
    message = (
        f"the longest prompt has {longest_tokens} tokens; with max_new_tokens = {config.sampling.max_new_tokens} that "
        f"is {need}, and the model's context is {context}"
    )
    return [Problem(("sampling", "max_new_tokens"), message, "lower it, or data.max_prompt_tokens")]


def _epochs(config: RLConfig, source: PromptSource) -> list[Problem]:
    wanted = config.algorithm.steps * config.algorithm.prompts_per_step
    if source.limit is None or source.limit >= wanted:
        return []
    steps = source.limit // config.algorithm.prompts_per_step
    message = (
        f"{config.data.epochs} epochs of {len(source.train)} prompts are {source.limit}, and "
        f"{config.algorithm.steps} steps of {config.algorithm.prompts_per_step} need {wanted}"
    )
    return [Problem(("data", "epochs"), message, f"set algorithm.steps = {steps}, or leave data.epochs out")]
