"""Completions of a run's newest checkpoint, for a look at what it has learnt."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_rt.roles.checks import settings
from relax_rt.roles.data.items import RawItem
from relax_rt.roles.sections import EvaluatorSettings, RLConfig
from relax_rt.transport.errors import RelaxError

TIMEOUT_S = 600.0
MAX_COMPLETIONS = 1024


def newest_checkpoint(run_dir: Path) -> Path:
    """The folder of the highest step.

    Raises:
        RelaxError: the run has no checkpoint yet.
    """
    folders = sorted((run_dir / "checkpoints").glob("step-*"))
    if not folders:
        hint = "the first one comes after checkpoint.every_steps steps"
        raise RelaxError(f"{run_dir} has no checkpoint yet", hint=hint)
    return folders[-1]


def sample(run_dir: Path, config: RLConfig, prompts: Sequence[str], items: int) -> list[dict[str, Any]]:
    """Completions of the newest checkpoint, at evaluation.temperature.

    Args:
        prompts: each is put into the template as its question; if there is none, held-out items are taken.
        items: how many of those.

    Returns:
        For each: prompt, completion, step, finish_reason, tokens; of a held-out item also its answer and `right`.

    Raises:
        RelaxError: there is no checkpoint, or the completions did not come in time.
    """
    from relax_rt.roles.data.source import PromptSource, conversation
    from relax_rt.roles.evaluation import answers_are_integers, exact
    from relax_rt.roles.models.tokenizer import load_tokenizer

    folder = newest_checkpoint(run_dir)
    tokenizer = load_tokenizer(folder)
    config_dir = Path(config.config_dir)
    asked: list[tuple[str, list[int], str | None]] = []
    if prompts:
        for prompt in prompts[:MAX_COMPLETIONS]:
            raw = RawItem(question=prompt, answer="", metadata={}, where="the command line")
            template = config.data.template if "{question}" in config.data.template else "{question}"
            asked.append((prompt, tokenizer.render(conversation(raw, template, config.data.system)), None))
    else:
        source = PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=config_dir)
        for item in source.held_out[: min(items, MAX_COMPLETIONS)]:
            asked.append((str(item.messages[-1]["content"]), item.tokens, item.answer))
    done = _complete(folder, config, [tokens for _, tokens, _ in asked], tokenizer.stop_ids)
    integers = answers_are_integers([answer for _, _, answer in asked if answer is not None])
    found = []
    for (prompt, _, answer), (tokens, reason) in zip(asked, done, strict=True):
        text = tokenizer.decode(tokens)
        record: dict[str, Any] = {"step": int(folder.name.rpartition("-")[2]), "finish_reason": reason}
        record |= {"tokens": len(tokens), "prompt": prompt, "completion": text}
        if answer is not None:
            record |= {"answer": answer, "right": reason == "stop" and exact(text, answer, integers=integers)}
        found.append(record)
    return found


def _complete(
    folder: Path, config: RLConfig, prompts: Sequence[Sequence[int]], stop_ids: frozenset[int]
) -> list[tuple[list[int], str]]:
    """Tokens and finish reason of one completion of each prompt."""
    from relax_rt.roles.data.order import sample_seed
    from relax_rt.roles.engines.base import Completion, GroupRequest
    from relax_rt.roles.engines.embedded import EmbeddedEngine

    table = settings(config, "evaluator", EvaluatorSettings)
    engine = EmbeddedEngine(folder, dtype=table.dtype, max_sequences=table.max_sequences, threads=table.threads)
    arrived: dict[int, Completion] = {}
    failures: list[BaseException] = []
    over = threading.Event()

    def arrive(completion: Completion) -> None:
        arrived[completion.request] = completion
        if len(arrived) == len(prompts):
            over.set()

    def fail(error: BaseException) -> None:
        failures.append(error)
        over.set()

    engine.start(arrive, fail)
    try:
        engine.submit(
            [
                GroupRequest(
                    id=number,
                    prompt=tuple(tokens),
                    seeds=(sample_seed(config.run.seed, number, 0, 0),),
                    temperature=config.evaluation.temperature,
                    max_new_tokens=config.sampling.max_new_tokens,
                    stop_ids=stop_ids,
                )
                for number, tokens in enumerate(prompts)
            ]
        )
        in_time = over.wait(TIMEOUT_S) if prompts else True
    finally:
        engine.close(5.0)
    if failures:
        raise RelaxError(f"sampling from {folder}", why=f"{type(failures[0]).__name__}: {failures[0]}")
    if not in_time:
        raise RelaxError(f"sampling from {folder}", why=f"{len(arrived)} of {len(prompts)} came in {TIMEOUT_S:.0f} s")
    return [(arrived[n].tokens, arrived[n].finish_reason) for n in range(len(prompts))]
