"""Carries out the runs that tools/bench/end_to_end.py compares: the system, the plain process, TRL's trainer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import peer_env

from relax_rt.config.loader import load_config
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.source import PromptSource
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.training.algorithms.objective import Objective

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "addition_job/roles.toml"
SYSTEM_TIMEOUT_S = 1800
PLAIN_TIMEOUT_S = 3600
TRL_TIMEOUT_S = 10_800
Trial = tuple[str, int, int]
"""TRL's dtype, threads, and samples of one backward pass."""


def read_lines(text: str) -> list[dict[str, Any]]:
    """The JSON objects among the lines; a trainer may print dictionaries of its own."""
    return [json.loads(line) for line in text.splitlines() if line.startswith('{"')]


def run_system(steps: int, every: int, items: int, more: Mapping[str, Any]) -> list[dict[str, Any]]:
    """metrics.jsonl of a run of the system. `more`: settings over the job's."""
    folder = Path(tempfile.mkdtemp(prefix="relax-bench-"))
    sets = {
        "run.dir": json.dumps(str(folder / "run")),
        "algorithm.steps": steps,
        "evaluation.every_steps": every,
        "evaluation.items": items,
        "evaluation.during_items": items,
        **more,
    }
    command = [str(Path(sys.executable).with_name("relax-rt")), "up", str(CONFIG)]
    command += [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SYSTEM_TIMEOUT_S, check=False)
        if done.returncode:
            raise SystemExit(f"the run failed with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
        return read_lines((folder / "run" / "metrics.jsonl").read_text())
    finally:
        shutil.rmtree(folder)


def run_plain(
    threads: int,
    steps: int,
    every: int,
    target: float,
    items: int,
    sets: Sequence[str] = (),
    *,
    late: bool = False,
) -> list[dict[str, Any]]:
    """Records of the plain process.

    Args:
        sets: key=value over the job, as of `relax-rt up --set`. late: samples are one update old.
    """
    command = [sys.executable, str(HERE / "plain_grpo.py"), str(CONFIG), f"--threads={threads}", f"--steps={steps}"]
    command += [
        f"--evaluate-every={every}",
        f"--target={target}",
        f"--items={items}",
        *(f"--set={one}" for one in sets),
        *(["--late"] if late else []),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PLAIN_TIMEOUT_S, check=False, env=environment
    )
    if done.returncode:
        raise SystemExit(f"the plain process failed with {done.returncode}:\n{done.stderr[-3000:]}")
    return read_lines(done.stdout)


def write_job(path: Path, steps: int) -> None:
    """The job as peers/trl_grpo.py reads it: it cannot import what this package has."""
    config = load_config(CONFIG)
    assert isinstance(config, RLConfig)
    folder, base = resolve_model(config.model.path, Path(config.config_dir)), Path(config.config_dir)
    tokenizer, table = load_tokenizer(folder), config.algorithm
    source = PromptSource.load(config.data, tokenizer, seed=config.run.seed, config_dir=base)

    def told(item: Any) -> dict[str, Any]:
        return {"prompt": tokenizer.text(item.messages), "tokens": list(item.tokens), "answer": item.answer}

    parts = Objective.of(table, base=base).parts
    loss, advantage = parts.loss.options, parts.advantage.options
    names = ("group_size", "prompts_per_step", "learning_rate", "adam_betas", "weight_decay", "max_grad_norm")
    job = {
        "model": str(folder),
        "reward": str(base / config.reward.function),
        "seed": config.run.seed,
        "temperature": config.sampling.temperature,
        "max_new_tokens": config.sampling.max_new_tokens,
        "train": [told(source.prompt(index)) for index in range(steps * table.prompts_per_step)],
        "held_out": [told(item) for item in source.held_out],
        **{name: getattr(table, name) for name in names},
        "clip_low": loss.clip_low,
        "clip_high": loss.clip_high,
        "normalise_std": advantage.normalise_std,
    }
    path.write_text(json.dumps(job))


def run_trl(job: Path, trial: Trial, steps: int, every: int, target: float, items: int) -> list[dict[str, Any]]:
    """Records of TRL's trainer; none if it cannot be run, which is told on the standard error."""
    dtype, threads, micro_batch = trial
    options = [f"--dtype={dtype}", f"--threads={threads}", f"--micro-batch={micro_batch}", f"--steps={steps}"]
    options += [f"--evaluate-every={every}", f"--target={target}", f"--items={items}"]
    out = peer_env.run("trl_grpo.py", [str(job), *options], timeout_s=TRL_TIMEOUT_S)
    return read_lines(out) if out is not None else []
