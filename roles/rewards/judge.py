"""Verdicts of a generative judge: its prompts, the parsing of its answers, and the calls of its engines.

The reward role asks for a verdict on each completion and offers it to the reward function (role.py).
"""

from __future__ import annotations

import asyncio
import re
import string
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from relax_rt.config.schema import RunConfig
from relax_rt.roles.data.items import answer_text
from relax_rt.roles.models.tokenizer import ChatTokenizer, load_tokenizer
from relax_rt.roles.rewards.genrm.settings import judge_folder
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest
from relax_rt.roles.rewards.settings import JudgeTable, RewardTable
from relax_rt.roles.rollout.router import GenerationRequest, NotGenerated, Outcome
from relax_rt.transport.rpc.errors import RelaxError

if TYPE_CHECKING:
    from pathlib import Path


SHOWN = 200
MAX_IN_FLIGHT = 256
"""Questions of one batch that are sent to the judge at once."""


class JudgeQuestion(msgspec.Struct, frozen=True):
    """A prompt for the judge, and the seed of its answer: the same question has the same seeds in every run."""

    prompt: tuple[int, ...]
    seed: int


class JudgeVerdict(msgspec.Struct, frozen=True):
    """The verdict on a completion, 0 to 1, and the judge's answers, one text for each sample."""

    value: float
    words: list[str]


def fields_of(template: str) -> list[str]:
    """Return the names of a template's fields.

    Raises:
        ValueError: it is no format string, or asks for more of a field than its text.
    """
    found = []
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is None:
            continue
        if not name.isidentifier() or form or conversion:
            raise ValueError(f"{{{name}}} is not a plain field, as {{completion}}")
        found.append(name)
    return found


def known_fields(request: RewardRequest) -> dict[str, Any]:
    """Return the fields that a prompt about this request may use."""
    metadata: Mapping[str, Any] = request.info.get("metadata", {})
    answer = answer_text(request.answer)
    own = {"question": request.info.get("question", ""), "completion": request.completion, "answer": answer}
    return {**metadata, **own}


class Judging:
    """Renders the judge's prompts and parses its answers. Pure.

    Args:
        tokenizer: of the judge's model.
    """

    def __init__(self, table: JudgeTable, tokenizer: ChatTokenizer) -> None:
        self.table, self.tokenizer = table, tokenizer
        self._pattern = re.compile(table.pattern, re.IGNORECASE if table.words else 0)
        self._words = {word.casefold(): value for word, value in table.words.items()}

    def questions(self, request: RewardRequest) -> list[JudgeQuestion]:
        """Return one question for each sample of the verdict.

        Raises:
            ValueError: the prompt names a field that the item does not have.
        """
        fields = known_fields(request)
        if lacking := [name for name in fields_of(self.table.prompt) if name not in fields]:
            raise ValueError(
                f"reward.judge.prompt names {{{lacking[0]}}}, and the item has {', '.join(sorted(fields))}"
            )
        text = self.table.prompt.format_map({name: str(value) for name, value in fields.items()})
        system = [{"role": "system", "content": self.table.system}] if self.table.system else []
        prompt = tuple(self.tokenizer.render([*system, {"role": "user", "content": text}]))
        content = repr(prompt).encode()
        numbers = range(self.table.samples)
        return [JudgeQuestion(prompt, xxhash.xxh3_64_intdigest(content, seed=number) >> 1) for number in numbers]

    def read(self, words: str) -> float | None:
        """Return the verdict in an answer of the judge, 0 to 1; None if there is none."""
        matches = list(self._pattern.finditer(words))
        if not matches:
            return self.table.otherwise
        found = matches[-1]
        said = found.group(1) if found.re.groups else found.group()
        if self._words:
            value = self._words.get((said or "").casefold())
            return self.table.otherwise if value is None else min(1.0, max(0.0, value))
        try:
            number = float(said)
        except (TypeError, ValueError):
            return self.table.otherwise
        low, high = self.table.lowest, self.table.highest
        return min(1.0, max(0.0, (number - low) / (high - low)))

    def verdict(self, answers: Sequence[Sequence[int]]) -> JudgeVerdict | RewardFailed:
        """Return the verdict on one completion.

        Args:
            answers: token ids of the judge's answer to each of its questions.
        """
        words = [self.tokenizer.decode(tokens) for tokens in answers]
        values = [self.read(text) for text in words]
        if None in values:
            text = words[values.index(None)]
            return RewardFailed(f"the judge's words hold no verdict (reward.judge.pattern): {text[-SHOWN:]!r}")
        numbers = [value for value in values if value is not None]
        return JudgeVerdict(sum(numbers) / len(numbers), words)


Generate = Callable[[GenerationRequest], Awaitable[Outcome]]
"""As `Router.generate`."""


class LateVerdict(RewardFailed, frozen=True):
    """No judge answered in time; neither the sample nor the judge's answer is at fault."""


class Judge:
    """Asks the engines of [roles.genrm] for verdicts.

    Args:
        generate: generates one answer, within its timeout.
    """

    def __init__(self, judging: Judging, generate: Generate) -> None:
        self._judging, self._generate = judging, generate
        self._room = asyncio.Semaphore(MAX_IN_FLIGHT)

    async def verdicts(
        self, requests: Sequence[RewardRequest], after_each: Callable[[], None] = lambda: None
    ) -> list[JudgeVerdict | RewardFailed]:
        """Return verdicts in order; `after_each` is called for each as it comes. An error fails its sample only."""

        async def one(request: RewardRequest) -> JudgeVerdict | RewardFailed:
            try:
                answers = [await self._answer(question) for question in self._judging.questions(request)]
                verdict = self._judging.verdict(answers)
            except NotGenerated as error:
                failed = f"the judge did not answer: {error}"
                verdict = LateVerdict(failed) if error.outcome.kind == "late" else RewardFailed(failed)
            except (RelaxError, ValueError) as error:
                verdict = RewardFailed(f"the judge cannot be asked: {error}")
            after_each()
            return verdict

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
        return [task.result() for task in tasks]

    async def _answer(self, question: JudgeQuestion) -> list[int]:
        table = self._judging.table
        async with self._room:
            outcome = await self._generate(
                GenerationRequest(
                    prompt=question.prompt,
                    seed=question.seed,
                    temperature=table.temperature,
                    max_new_tokens=table.max_new_tokens,
                    stop_ids=self._judging.tokenizer.stop_ids,
                    timeout_s=table.timeout_s,
                    prefix=True,
                )
            )
        return outcome.tokens


def load_judging(config: RunConfig, config_dir: Path) -> Judging:
    """Load the judge's prompts with the tokenizer of its model.

    Raises:
        RelaxError: there is no such model.
    """

    table = config.table(RewardTable).judge
    assert table is not None
    return Judging(table, load_tokenizer(judge_folder(config, config_dir)))


def with_verdict(request: RewardRequest, verdict: JudgeVerdict) -> RewardRequest:
    """Return the request with the verdict among what a reward function may ask for."""
    return msgspec.structs.replace(request, info={**request.info, "verdict": verdict.value})
