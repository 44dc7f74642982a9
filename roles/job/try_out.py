"""Generate and score a few samples as a run would, without one (`relax-rt sample`)."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from relax_rt.config.job import TriedSample
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.items import PromptItem, RawItem, answer_text
from relax_rt.roles.data.order import sample_seed
from relax_rt.roles.data.source import PromptSource, conversation
from relax_rt.roles.evaluation.sampling import SEED_DOMAIN
from relax_rt.roles.evaluation.settings import EvaluatorSettings
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.dry_run import offered_info, task_of
from relax_rt.roles.rewards.genrm.settings import GenrmSettings
from relax_rt.roles.rewards.scoring import RewardFailed, RewardRequest, Score
from relax_rt.roles.rollout.engines.base import GroupRequest, generate
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.checkpoints.digests import verify_digests
from relax_rt.roles.training.checkpoints.store import find_checkpoints
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError

if TYPE_CHECKING:
    from relax_rt.roles.models.tokenizer import ChatTokenizer
    from relax_rt.roles.rewards.judge import JudgeVerdict
    from relax_rt.roles.rollout.engines.base import Completion

TIMEOUT_S = 600.0
MAX_ITEMS = 1024
OWN = "own"
"""Split of a prompt from the command line."""


class PromptToSample(msgspec.Struct, frozen=True):
    """A prompt, its place in its split's order, and the seed and temperature of its one completion."""

    index: int
    item: PromptItem
    seed: int
    temperature: float


def newest_checkpoint(run_dir: Path) -> tuple[Path, int]:
    """Find the checkpoint that the run would resume from: its folder and step.

    Raises:
        RelaxError: the run has no checkpoint yet, none can be read, or the weights are not those that were written, as
            far as it says.
    """
    found = find_checkpoints(run_dir / "checkpoints")
    for folder, state, _ in found:
        if state is not None:
            verify_digests(folder, {name: of for name, of in state.files.items() if name.startswith("model")})
            return folder, state.step
    if found:
        raise RelaxError(f"no checkpoint of {run_dir} can be read", why=f"{found[0].folder.name}: {found[0].why}")
    hint = "the first one comes after checkpoint.every_steps steps"
    raise RelaxError(f"{run_dir} has no checkpoint yet", hint=hint)


def sample(
    config: RLConfig, run_dir: Path | None, items: int, *, held_out: bool, prompts: Sequence[str]
) -> list[TriedSample]:
    """Implement Job.sample. Training prompts are sampled as their group's first member, held-out ones as the evaluator
    does: with its seed, temperature, dtype and threads.

    Raises:
        RelaxError: bad model, data or reward function, no checkpoint, or the completions did not come in time.
    """
    from relax_rt.roles.job.preflight import NEEDED

    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise RelaxError(f"not installed: {', '.join(lacking)}", hint="pip install relax-rt[cpu], or relax-rt[gpu]")
    from transformers.utils import logging

    from relax_rt.roles.models.resolve import resolve_model

    logging.disable_progress_bar()
    config_dir = Path(config.config_dir)
    folder, step = (
        (resolve_model(config.model.path, config_dir), None) if run_dir is None else newest_checkpoint(run_dir)
    )
    tokenizer = load_tokenizer(folder)
    results: Sequence[Score | RewardFailed | None]
    if prompts:
        asked = _own(config, tokenizer, prompts)
        done = _complete(folder, config, asked, tokenizer.stop_ids, evaluating=False)
        results, words = [None] * len(asked), [""] * len(asked)
    else:
        asked = _of_the_data(config, tokenizer, items, held_out=held_out)
        done = _complete(folder, config, asked, tokenizer.stop_ids, evaluating=held_out)
        results, words = _score(config, tokenizer, asked, done)
    return [
        _tried(config, tokenizer, one, completion, result, said, str(folder), step)
        for one, completion, result, said in zip(asked, done, results, words, strict=True)
    ]


def _of_the_data(config: RLConfig, tokenizer: ChatTokenizer, items: int, *, held_out: bool) -> list[PromptToSample]:
    source = PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=Path(config.config_dir))
    known = len(source.held_out) if held_out else source.limit
    most = min(items, MAX_ITEMS) if known is None else min(items, MAX_ITEMS, known)
    asked = []
    for index in range(most):
        seed = source.sample_seed(index, 0, 0)
        if held_out:
            asked.append(
                PromptToSample(index, source.held_out[index], seed | SEED_DOMAIN, config.evaluation.temperature)
            )
        else:
            asked.append(PromptToSample(index, source.prompt(index), seed, config.sampling.temperature))
    return asked


def _own(config: RLConfig, tokenizer: ChatTokenizer, prompts: Sequence[str]) -> list[PromptToSample]:
    """Put each prompt into the template as its question."""
    # A template of other fields of the items cannot be filled from a question alone.
    template = config.data.template if "{question}" in config.data.template else "{question}"
    asked = []
    for index, prompt in enumerate(prompts[:MAX_ITEMS]):
        raw = RawItem(question=prompt, answer="", metadata={}, where="the command line")
        messages = conversation(raw, template, config.data.system)
        item = PromptItem(
            item="",
            split=OWN,
            question=prompt,
            answer="",
            metadata={},
            messages=messages,
            tokens=tokenizer.render(messages),
        )
        asked.append(
            PromptToSample(index, item, sample_seed(config.run.seed, index, 0, 0), config.sampling.temperature)
        )
    return asked


def _complete(
    folder: Path, config: RLConfig, asked: Sequence[PromptToSample], stop_ids: frozenset[int], *, evaluating: bool
) -> list[Completion]:
    """Sample one completion of each prompt."""
    from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

    table: EvaluatorSettings | RolloutSettings = (
        config.role("evaluator", EvaluatorSettings) if evaluating else config.role("rollout", RolloutSettings)
    )
    try:
        engine = EmbeddedEngine(folder, dtype=table.dtype, max_sequences=table.max_sequences, threads=table.threads)
    except (OSError, ValueError) as error:
        raise RelaxError(f"the model {folder} cannot be loaded", why=str(error).splitlines()[0]) from error
    requests = [
        GroupRequest(
            id=number,
            prompt=tuple(one.item.tokens),
            seeds=(one.seed,),
            temperature=one.temperature,
            max_new_tokens=config.sampling.max_new_tokens,
            stop_ids=stop_ids,
        )
        for number, one in enumerate(asked)
    ]
    try:
        arrived = asyncio.run(generate(engine, requests, timeout_s=TIMEOUT_S))
    except DeadlineExceeded as error:
        hint = "take a smaller -n, or sampling.max_new_tokens"
        raise RelaxError(f"sampling from {folder}", why=error.why, hint=hint) from None
    except Exception as error:
        raise RelaxError(f"sampling from {folder}", why=f"{type(error).__name__}: {error}") from error
    return [arrived[number, 0] for number in range(len(asked))]


def _score(
    config: RLConfig,
    tokenizer: ChatTokenizer,
    asked: Sequence[PromptToSample],
    done: Sequence[Completion],
) -> tuple[list[Score | RewardFailed], list[str]]:
    """Score the completions as the reward role would; also return a judge's words."""
    from relax_rt.roles.rewards.judge import JudgeVerdict, with_verdict

    requests = []
    for group, (one, completion) in enumerate(zip(asked, done, strict=True)):
        info = offered_info(
            one.item.question,
            one.item.metadata,
            None,
            item=one.item.item,
            split=one.item.split,
            finish_reason=completion.finish_reason,
            truncated=completion.finish_reason == "length",
            tokens=len(completion.tokens),
            turns=[],
        )
        requests.append(RewardRequest(tokenizer.decode(completion.tokens), one.item.answer, info, group))
    verdicts: list[JudgeVerdict | RewardFailed] = _verdicts(config, requests) if config.reward.judge is not None else []
    if verdicts:
        requests = [with_verdict(r, v) for r, v in zip(requests, verdicts, strict=True) if isinstance(v, JudgeVerdict)]
    scores = asyncio.run(_by_rewards(config, requests))
    if not verdicts:
        return scores, [""] * len(scores)
    left = iter(scores)
    results = [next(left) if isinstance(verdict, JudgeVerdict) else verdict for verdict in verdicts]
    return results, ["; ".join(v.words) if isinstance(v, JudgeVerdict) else "" for v in verdicts]


async def _by_rewards(config: RLConfig, requests: Sequence[RewardRequest]) -> list[Score | RewardFailed]:
    rewards = Rewards(config.reward, Path(config.config_dir), task_of(config.data))
    try:
        await rewards.start()
        return await rewards.score(requests)
    finally:
        await rewards.close()


def _verdicts(config: RLConfig, requests: Sequence[RewardRequest]) -> list[JudgeVerdict | RewardFailed]:
    """Get the judge's verdicts from an engine in this process."""
    from relax_rt.roles.rewards.judge import load_judging
    from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

    judging, table = load_judging(config, Path(config.config_dir)), config.role("genrm", GenrmSettings)
    folder = judging.tokenizer.folder
    try:
        asked = [judging.questions(request) for request in requests]
    except ValueError as error:
        raise RelaxError("asking the judge", why=str(error)) from None
    engine = EmbeddedEngine(folder, dtype=table.dtype, max_sequences=table.max_sequences, threads=table.threads)
    wanted = [
        GroupRequest(
            id=number,
            prompt=questions[0].prompt,
            seeds=tuple(question.seed for question in questions),
            temperature=judging.table.temperature,
            max_new_tokens=judging.table.max_new_tokens,
            stop_ids=judging.tokenizer.stop_ids,
        )
        for number, questions in enumerate(asked)
    ]
    try:
        arrived = asyncio.run(generate(engine, wanted, timeout_s=TIMEOUT_S))
    except RelaxError as error:
        raise RelaxError(f"asking the judge in {folder}", why=str(error)) from None
    return [
        judging.verdict([arrived[number, sample].tokens for sample in range(judging.table.samples)])
        for number in range(len(requests))
    ]


def _tried(
    config: RLConfig,
    tokenizer: ChatTokenizer,
    one: PromptToSample,
    completion: Completion,
    result: Score | RewardFailed | None,
    said: str,
    model: str,
    step: int | None,
) -> TriedSample:
    prompt, sampled = one.item.tokens, completion.tokens
    scored = result if isinstance(result, Score) else None
    unscored = (
        "no answer is known for it" if result is None else result.reason if isinstance(result, RewardFailed) else ""
    )
    cut = completion.finish_reason == "length" and config.algorithm.truncated != "none"
    notes = [f'the trainer applies algorithm.truncated = "{config.algorithm.truncated}"'] if cut else []
    if said:
        notes.append(f"the judge said {said!r}")
    return TriedSample(
        model=model,
        step=step,
        split=one.item.split,
        index=one.index,
        item=one.item.item,
        prompt=tokenizer.spell(prompt),
        completion=tokenizer.decode(sampled),
        tokens=[*prompt, *sampled],
        loss_mask=[0] * len(prompt) + [1] * len(sampled),
        behaviour_logprobs=[0.0] * len(prompt) + completion.logprobs,
        finish_reason=completion.finish_reason,
        stop_token=tokenizer.spell(sampled[-1:]) if completion.finish_reason == "stop" else "",
        temperature=one.temperature,
        mean_logprob=sum(completion.logprobs) / len(sampled),
        answer=None if result is None else answer_text(one.item.answer),
        reward=scored.total if scored else None,
        rewards=scored.components if scored else {},
        unscored=unscored,
        note="; ".join(note for note in notes if note),
    )
