"""`relax-rt sample`: generate and score a few completions without training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.text import Text

from relax_rt.cli.app import DEFAULT_CONFIG, OK, Json, Overrides, errors_are_bad_input
from relax_rt.cli.display import LABEL_WIDTH, console_for_output, show_json
from relax_rt.cli.runs import find_run_dir, resolved_config
from relax_rt.config.job import TriedSample, load_job
from relax_rt.config.loader import load_config
from relax_rt.config.problems import BadInput
from relax_rt.config.schema import RunConfig

PROMPT_STYLE, TRAINED_STYLE = "dim", "green"


def sample(
    config: Annotated[Path | None, Parameter(help="A roles.toml. Default: ./roles.toml if it exists.")] = None,
    *,
    items: Annotated[int, Parameter(name=["-n", "--items"], help="Number of prompts; one completion each.")] = 4,
    run: Annotated[Path | None, Parameter(help="Sample from this run's newest checkpoint, with its config.")] = None,
    prompts: Annotated[
        list[str] | None,
        Parameter(name="--prompt", help="Use this prompt instead of the data. Repeatable.", negative_iterable=()),
    ] = None,
    held_out: Annotated[bool, Parameter(help="Held-out prompts instead of training prompts.")] = False,
    overrides: Overrides = None,
    json: Json = False,
) -> int:
    """Sample a few completions without training."""
    if items < 1:
        raise BadInput(f"-n {items}", why="at least one prompt must be sampled")
    if prompts and held_out:
        raise BadInput("both --prompt and --held-out", why="a prompt given by --prompt has no split", hint="give one")
    with errors_are_bad_input():
        loaded, run_dir = _config_to_sample(config, run, overrides or ())
        samples = load_job(loaded.run.job).sample(loaded, run_dir, items, held_out=held_out, prompts=prompts or ())
    show_json(samples) if json else show_samples(samples)
    return OK


def _config_to_sample(config: Path | None, run: Path | None, overrides: Sequence[str]) -> tuple[RunConfig, Path | None]:
    """The config to sample with, and the run whose checkpoint is used, if any."""
    if run is not None and config is not None:
        raise BadInput(f"both {config} and --run {run}", why="a run has its own config", hint="give one of them")
    if config is None and run is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    if config is not None:
        return load_config(config, overrides, inputs=True), None
    if overrides:
        hint = "name the roles.toml to override its keys"
        raise BadInput("--set with a run", why="a run is sampled with the config it was started with", hint=hint)
    run_dir = find_run_dir(run)
    return resolved_config(run_dir), run_dir


def show_samples(samples: Sequence[TriedSample]) -> None:
    """Print samples: the prompt dim, trained tokens green."""
    console = console_for_output()
    if samples:
        first = samples[0]
        trained = f"  step {first.step}" if first.step is not None else ""
        console.print(Text(f"model {first.model}{trained}  temperature {first.temperature:g}", "bold"))
    for sample in samples:
        console.print()
        for name, value in _sample_rows(sample):
            # One write a row: a grid would cut lines that are copied, and wrap a prompt away from its own newlines.
            for number, line in enumerate(value.split("\n", allow_blank=True)):
                head = Text(f"{'' if number else name:<{LABEL_WIDTH}}", "bright_black")
                console.print(head + line, soft_wrap=True)


def _sample_rows(sample: TriedSample) -> Iterator[tuple[str, Text]]:
    start = len(sample.loss_mask) - sum(sample.loss_mask)
    splits = {"own": "own prompt", "held_out": "held-out prompt"}
    origin = f"{splits.get(sample.split, 'training prompt')} {sample.index}"
    yield "sample", Text(origin + (f"  item {sample.item}" if sample.item else ""), "bold")
    yield "prompt", Text(visible(sample.prompt), PROMPT_STYLE)
    yield "completion", Text(visible(sample.completion), TRAINED_STYLE)
    prompt_ids = (" ".join(map(str, sample.tokens[:start])), PROMPT_STYLE)
    yield "tokens", Text.assemble(prompt_ids, " | ", (" ".join(map(str, sample.tokens[start:])), TRAINED_STYLE))
    lengths = f"{start} of the prompt, {len(sample.tokens) - start} sampled and trained on"
    yield "loss mask", Text.assemble(run_lengths(sample.loss_mask), (f"  {lengths}", "bright_black"))
    ended = f" at {visible(sample.stop_token)}" if sample.stop_token else ""
    note = (f"  {sample.note}" if sample.note else "", "yellow")
    yield "finish", Text.assemble(f"{sample.finish_reason}{ended}", note)
    yield "logprob", Text.assemble(f"{sample.mean_logprob:.4f}", ("  mean of the sampled tokens", "bright_black"))
    if sample.answer is not None:
        yield "answer", Text(visible(sample.answer))
    if sample.reward is None:
        yield "reward", Text(f"none: {sample.unscored}", "yellow")
    else:
        parts = "  ".join(f"{name} {value:g}" for name, value in sample.rewards.items() if name != "reward")
        yield "reward", Text.assemble((f"{sample.reward:g}", "bold"), (f"  {parts}" if parts else "", "bright_black"))


def run_lengths(mask: Sequence[int]) -> str:
    """A mask as run lengths: `0x31 1x3` is 31 zeros, then 3 ones."""
    return " ".join(f"{value}x{len(list(members))}" for value, members in groupby(mask))


def visible(text: str) -> str:
    """Text with control characters except newlines escaped: a model's output could move the terminal's cursor."""
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
