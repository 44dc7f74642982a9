"""A call of a user's own parts of [algorithm], on a small made-up batch, before anything starts."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.models.cache import say
from relax_rt.roles.models.settings import ShardedSettings
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.dry_run_calls import Asked, Found
from relax_rt.roles.training.algorithms.objective import read_parts
from relax_rt.roles.training.algorithms.settings import AlgorithmTable

CALLS = "relax_rt.roles.training.algorithms.dry_run_calls"
LOAD_S, CALLS_S = 120.0, 30.0
"""For its process to import torch and the user's files, and for all the calls."""


def check_own_parts(config: RunConfig, *, calls_s: float = CALLS_S) -> list[Problem]:
    """What goes wrong first when the parts of [algorithm] that are a user's own are called; nothing, without any.

    They are called in a process of their own, on the CPU. What they raise there is said on standard error only, where
    the trainer has a GPU: they may be written for it.

    Args:
        calls_s: for all the calls together.
    """
    table, base, longest = (
        config.table(AlgorithmTable),
        Path(config.config_dir),
        config.table(SamplingTable).max_new_tokens,
    )
    parts = read_parts(table, base=base, longest=longest)
    if isinstance(parts, list) or not any(part.target for part in parts.all()):
        # What is wrong with how they are named is told already.
        return []
    needs = frozenset[str]().union(*(part.needs for part in parts.all()))
    turns = "env" in config.roles or bool(needs & {"turn_rewards", "turn_states"})
    found = _called(Asked(table, base, longest, turns, calls_s))
    if found is None:
        return []
    if not found.returned and _trains_on_gpu(config):
        say(f"warning: your parts of [algorithm] are not tried, as the trainer has a GPU: on the CPU, {found.message}")
        return []
    return [Problem(found.place, found.message, "mend it there")]


def _called(asked: Asked) -> Found | None:
    command = [sys.executable, "-P", "-m", CALLS]
    try:
        ended = subprocess.run(
            command, input=pickle.dumps(asked), stdout=subprocess.PIPE, timeout=LOAD_S + asked.calls_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        told = f"a part failed in a dry run: it does not return within {error.timeout:g} s"
        return Found(("algorithm",), told)
    if ended.returncode == -signal.SIGALRM:
        how = f"it does not return within {asked.calls_s:g} s, and catches what interrupts it"
    elif ended.returncode < 0:
        how = f"its process was ended by {signal.Signals(-ended.returncode).name}"
    else:
        how = f"its process ended with {ended.returncode} and no answer"
    if ended.returncode or not ended.stdout:
        return Found(("algorithm",), f"a part failed in a dry run: {how}; what it printed stands above")
    return msgspec.json.decode(ended.stdout, type=Found | None)


def _trains_on_gpu(config: RunConfig) -> bool:
    trainer = config.roles.get("trainer")
    if not isinstance(trainer, ShardedSettings) or trainer.device == "cpu":
        return False
    return bool(trainer.gpus) or trainer.backend == "megatron"
