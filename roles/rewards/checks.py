"""Checks of the reward before a run: its components, its sandboxes, and what the judge is asked."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.process.sandbox import SandboxFailed, cached_mode
from relax_rt.roles.rewards.compose import Component, read_components, requested_info, takes_groups
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.rewards.judge import Judging, fields_of, load_judging
from relax_rt.roles.rewards.scoring import RewardRequest
from relax_rt.roles.rewards.settings import JudgeTable, RewardTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig
    from relax_rt.roles.data.items import PromptItem

VERDICT, ALIAS = "verdict", "genrm"
JUDGE = ("reward", "judge")


def check_reward(table: RewardTable, group_size: int) -> Iterator[Problem]:
    """Check components, their options and weights, without user code."""
    yield from (one for one in read_components(table) if isinstance(one, Problem))
    if takes_groups(table) and group_size < 2:
        message = "a reward that compares the completions of a prompt, and algorithm.group_size is 1"
        yield Problem(("reward",), message, "raise algorithm.group_size", at="key")


def sandbox_commands(table: RewardTable) -> list[list[str]]:
    """Return the commands that rewards run programs with, each once; an empty one is this interpreter."""
    found = [one for one in read_components(table) if isinstance(one, Component)]
    commands = [one.sandbox.command for one in found if one.sandbox is not None]
    return [one for number, one in enumerate(commands) if one not in commands[:number]]


async def describe_sandboxes(table: RewardTable) -> str:
    """Describe how the programs of rewards are isolated on this machine; empty if there are none.

    The dry run checks whether that is sufficient.
    """
    modes = []
    for command in sandbox_commands(table):
        try:
            modes.append(str(await cached_mode(command)))
        except SandboxFailed as error:
            modes.append(f"no program can be run here: {error.why}")
    return "; ".join(dict.fromkeys(modes))


def check_judge(config: RunConfig) -> Iterator[Problem]:
    """Check the judge's tables, without model, data and user code."""
    table, role = config.table(RewardTable).judge, config.roles.get("genrm")
    if table is None:
        if isinstance(role, RoleSettings):
            message = "nobody asks the judge: there is no [reward.judge]"
            yield Problem(("roles", "genrm"), message, "say there what it is asked, or leave the role out", at="key")
        if ALIAS in (config.table(RewardTable).function, *(one.name for one in config.table(RewardTable).components)):
            message = f'"{ALIAS}" is the verdict of a judge, and there is no [reward.judge]'
            yield Problem(("reward", "function"), message, "say there what it is asked")
        return
    if not isinstance(role, RoleSettings):
        message = "nobody answers: there is no [roles.genrm]"
        yield Problem(JUDGE, message, "add the table; its slots are the judge's engines", at="key")
    elif role.count < 1:
        yield Problem(("roles", "genrm", "count"), "nobody answers what [reward.judge] asks", "at least 1")
    yield from _check_table(table)
    if isinstance(role, GenrmSettings):
        yield from _check_role(config, role)


def _check_table(table: JudgeTable) -> Iterator[Problem]:
    place = (*JUDGE, "prompt")
    try:
        fields = fields_of(table.prompt)
    except ValueError as error:
        yield Problem(place, f"reward.judge.prompt: {error}", "a brace that stands for itself is doubled: {{ }}")
    else:
        if "completion" not in fields:
            message = "the judge's prompt has no {completion}: its verdict would be the same for all"
            yield Problem(place, message, 'as "{question}\\n{completion}\\nIs that right, yes or no?"')
    try:
        pattern = re.compile(table.pattern)
    except re.error as error:
        yield Problem((*JUDGE, "pattern"), f"reward.judge.pattern is no regular expression: {error}")
    else:
        if pattern.match("") is not None:
            yield Problem((*JUDGE, "pattern"), "reward.judge.pattern matches nothing at all, and so everywhere")
    numbers = {"lowest": table.lowest, "highest": table.highest, "otherwise": table.otherwise or 0.0}
    for name, value in numbers.items():
        if not math.isfinite(value):
            yield Problem((*JUDGE, name), f"{name} must be finite")
    if not table.lowest < table.highest:
        message = f"lowest = {table.lowest:g} is not below highest = {table.highest:g}"
        yield Problem((*JUDGE, "highest"), message)
    for word, value in table.words.items():
        if not 0 <= value <= 1:
            yield Problem((*JUDGE, "words"), f"{word} = {value:g}: verdicts go from 0 to 1")
    if table.otherwise is not None and not 0 <= table.otherwise <= 1:
        yield Problem((*JUDGE, "otherwise"), f"otherwise = {table.otherwise:g}: verdicts go from 0 to 1")
    if table.samples > 1 and table.temperature == 0:
        message = f"samples = {table.samples} at temperature 0 are {table.samples} times the same"
        yield Problem((*JUDGE, "samples"), message, "raise temperature, or leave samples out")


def _check_role(config: RunConfig, role: GenrmSettings) -> Iterator[Problem]:
    if not role.follow:
        return
    if role.model is not None:
        message = "follow = true with a model of its own: the policy's weights are of another model"
        yield Problem(("roles", "genrm", "follow"), message, "leave one of them out")
    rollout = config.roles.get("rollout")
    if (other := getattr(rollout, "dtype", role.dtype)) != role.dtype:
        message = f"roles.genrm.dtype = {role.dtype} and roles.rollout.dtype = {other} differ"
        yield Problem(("roles", "genrm", "dtype"), f"{message}: weights are published in one dtype", "use one for both")


def preflight_judge(config: RunConfig, config_dir: Path, items: Sequence[PromptItem]) -> Iterator[Problem]:
    """Check the judge's model, its questions about these items, and that the reward function takes its verdict."""
    table, role = config.table(RewardTable).judge, config.roles.get("genrm")
    if table is None or not isinstance(role, GenrmSettings) or role.target is not None:
        return
    try:
        wants = requested_info(config.table(RewardTable), config_dir)
    except RelaxError:
        wants = None  # reported by the dry run
    if wants is not None and VERDICT not in wants:
        message = f"the reward takes no `{VERDICT}`, so that the judge would be asked for nothing"
        yield Problem(("reward", "function"), message, f'add the parameter, or use function = "{ALIAS}"')
    try:
        judging = load_judging(config, config_dir)
    except RelaxError as error:
        message = error.what.replace("model.path", "roles.genrm.model") + (f": {error.why}" if error.why else "")
        yield Problem(("roles", "genrm", "model"), message, error.hint)
        return
    yield from _check_questions(config, judging, items)


def _check_questions(config: RunConfig, judging: Judging, items: Sequence[PromptItem]) -> Iterator[Problem]:
    """Check that the questions about a few items can be asked, and fit the judge's context."""
    values = json.loads((judging.tokenizer.folder / "config.json").read_text())
    context = (values.get("text_config") or values).get("max_position_embeddings")
    longest = 0
    for item in items[:4]:
        info = {"question": item.question, "metadata": item.metadata}
        try:
            asked = judging.questions(RewardRequest("", item.answer, info))
        except ValueError as error:
            yield Problem((*JUDGE, "prompt"), str(error))
            return
        longest = max(longest, len(asked[0].prompt))
    # A token of the policy's may be several of the judge's, or fewer; this finds what is hopeless.
    need = longest + config.table(SamplingTable).max_new_tokens + judging.table.max_new_tokens
    if isinstance(context, int) and need > context:
        message = (
            f"a question of {longest} tokens, a completion of up to {config.table(SamplingTable).max_new_tokens} and "
            f"{judging.table.max_new_tokens} for the judge's words are {need}; its context is {context}"
        )
        yield Problem(
            (*JUDGE, "max_new_tokens"), message, "lower it, or sampling.max_new_tokens, or shorten the prompt"
        )
