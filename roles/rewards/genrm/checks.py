"""What keeps a generative judge from judging."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RoleSettings, RunConfig
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.rewards.settings import JudgeTable, RewardTable
from relax_rt.roles.rollout.engines.settings import SamplingTable

if TYPE_CHECKING:
    from relax_rt.roles.data.items import PromptItem
    from relax_rt.roles.rewards.judge import Judging

VERDICT, ALIAS = "verdict", "genrm"
PLACE = ("reward", "judge")


def check_judge(config: RunConfig) -> Iterator[Problem]:
    """What shows without model, data and user code."""
    reward = config.table(RewardTable)
    table, role = reward.judge, config.roles.get("genrm")
    if table is None:
        if isinstance(role, RoleSettings):
            message = "nobody asks the judge: there is no [reward.judge]"
            yield Problem(("roles", "genrm"), message, "say there what it is asked, or leave the role out", at="key")
        if ALIAS in (reward.function, *(one.name for one in reward.components)):
            message = f'"{ALIAS}" is the verdict of a judge, and there is no [reward.judge]'
            yield Problem(("reward", "function"), message, "say there what it is asked")
        return
    if not isinstance(role, RoleSettings):
        message = "nobody answers: there is no [roles.genrm]"
        yield Problem(PLACE, message, "add the table; its slots are the judge's engines", at="key")
    elif role.count < 1:
        yield Problem(("roles", "genrm", "count"), "nobody answers what [reward.judge] asks", "at least 1")
    yield from _table(table)
    if isinstance(role, GenrmSettings):
        yield from _role(config, role)


def _table(table: JudgeTable) -> Iterator[Problem]:
    from relax_rt.roles.rewards.judge import fields_of

    place = (*PLACE, "prompt")
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
        yield Problem((*PLACE, "pattern"), f"reward.judge.pattern is no regular expression: {error}")
    else:
        if pattern.match("") is not None:
            yield Problem((*PLACE, "pattern"), "reward.judge.pattern matches nothing at all, and so everywhere")
    numbers = {"lowest": table.lowest, "highest": table.highest, "otherwise": table.otherwise or 0.0}
    for name, value in numbers.items():
        if not math.isfinite(value):
            yield Problem((*PLACE, name), f"{name} must be finite")
    if not table.lowest < table.highest:
        message = f"lowest = {table.lowest:g} is not below highest = {table.highest:g}"
        yield Problem((*PLACE, "highest"), message)
    for word, value in table.words.items():
        if not 0 <= value <= 1:
            yield Problem((*PLACE, "words"), f"{word} = {value:g}: verdicts go from 0 to 1")
    if table.otherwise is not None and not 0 <= table.otherwise <= 1:
        yield Problem((*PLACE, "otherwise"), f"otherwise = {table.otherwise:g}: verdicts go from 0 to 1")
    if table.samples > 1 and table.temperature == 0:
        message = f"samples = {table.samples} at temperature 0 are {table.samples} times the same"
        yield Problem((*PLACE, "samples"), message, "raise temperature, or leave samples out")


def _role(config: RunConfig, role: GenrmSettings) -> Iterator[Problem]:
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
    """The judge's model, what it is asked about these items, and whether the reward function hears of it."""
    reward = config.table(RewardTable)
    from relax_rt.roles.rewards.compose import wanted
    from relax_rt.transport.rpc.errors import RelaxError

    table, role = reward.judge, config.roles.get("genrm")
    if table is None or not isinstance(role, GenrmSettings) or role.target is not None:
        return
    try:
        wants = wanted(reward, config_dir)
    except RelaxError:
        wants = None  # said elsewhere
    if wants is not None and VERDICT not in wants:
        message = f"the reward takes no `{VERDICT}`, so that the judge would be asked for nothing"
        yield Problem(("reward", "function"), message, f'add the parameter, or use function = "{ALIAS}"')
    try:
        judging = judging_of(config, config_dir)
    except RelaxError as error:
        message = error.what.replace("model.path", "roles.genrm.model") + (f": {error.why}" if error.why else "")
        yield Problem(("roles", "genrm", "model"), message, error.hint)
        return
    yield from _asked(config, judging, items)


def judging_of(config: RunConfig, config_dir: Path) -> Judging:
    """What the judge of this config is asked, by the tokenizer of its model.

    Raises:
        RelaxError: there is no such model.
    """
    reward = config.table(RewardTable)
    from relax_rt.roles.models.tokenizer import load_tokenizer
    from relax_rt.roles.rewards.genrm.role import judge_folder
    from relax_rt.roles.rewards.judge import Judging

    assert reward.judge is not None
    return Judging(reward.judge, load_tokenizer(judge_folder(config, config_dir)))


def _asked(config: RunConfig, judging: Judging, items: Sequence[PromptItem]) -> Iterator[Problem]:
    """Whether the questions about a few items can be put, and fit."""
    sampling = config.table(SamplingTable)
    from relax_rt.roles.rewards.scoring import Request

    values = json.loads((judging.tokenizer.folder / "config.json").read_text())
    context = (values.get("text_config") or values).get("max_position_embeddings")
    longest = 0
    for item in items[:4]:
        info = {"question": item.question, "metadata": item.metadata}
        try:
            asked = judging.questions(Request("", item.answer, info))
        except ValueError as error:
            yield Problem((*PLACE, "prompt"), str(error))
            return
        longest = max(longest, len(asked[0].prompt))
    # A token of the policy's may be several of the judge's, or fewer; this finds what is hopeless.
    need = longest + sampling.max_new_tokens + judging.table.max_new_tokens
    if isinstance(context, int) and need > context:
        message = (
            f"a question of {longest} tokens, a completion of up to {sampling.max_new_tokens} and "
            f"{judging.table.max_new_tokens} for the judge's words are {need}; its context is {context}"
        )
        yield Problem(
            (*PLACE, "max_new_tokens"), message, "lower it, or sampling.max_new_tokens, or shorten the prompt"
        )
