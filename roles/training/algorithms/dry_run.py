"""A dry run of a user's own parts of [algorithm] on a small made-up batch, before anything starts.

`check_own_parts` (the launch's checks call it) starts this module as a process of its own, which calls the parts and
reports what went wrong first.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

import msgspec
import numpy as np

from relax_rt.config.problems import KeyPath
from relax_rt.roles.base.sample import Sample, TurnSpan, bare_meta
from relax_rt.roles.base.user_code import user_line
from relax_rt.roles.training.algorithms.inputs import TokenTensors
from relax_rt.roles.training.algorithms.objective import Objective, read_parts
from relax_rt.roles.training.algorithms.registry import UserPartFailed
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.rpc.errors import Refused

MAX_SAMPLES, PROMPT, LENGTHS = 4096, 2, 4
LOSS_GROUPS = 2
"""A micro-batch is of few of a step's groups."""
RELEASE_TIMEOUT_S = 5
"""A part that catches what interrupts it is ended after so much longer."""
NO_GRADIENT = "its loss has no gradient to tokens.logprobs: nothing would be learnt"


class DoesNotReturn(Exception):
    """Raised in the middle of a part that takes too long, so that the line is known."""


class DryRunRequest(msgspec.Struct, frozen=True):
    """What to call, and for how many seconds at most. `turns`: samples come with turn rewards and states."""

    table: AlgorithmTable
    base: Path
    longest: int
    turns: bool
    calls_s: float


class DryRunFailure(msgspec.Struct, frozen=True):
    """What went wrong first. `returned`: the part returned something wrong, which it does on any device."""

    place: KeyPath
    message: str
    returned: bool = False


def first_failure(asked: DryRunRequest) -> DryRunFailure | None:
    """Call the advantage, its returns, the aggregation's count and the loss, with all that belongs to it."""
    parts = read_parts(asked.table, base=asked.base, longest=asked.longest)
    if isinstance(parts, list):
        return None
    _interrupt_after(asked.calls_s)
    try:
        objective = Objective(asked.table, parts, base=asked.base, longest=asked.longest)
        samples = _samples(objective, asked)
        objective.advantages(samples)
        if parts.advantage.target and "returns" in parts.advantage.part.extras:
            objective.returns(samples)
        objective.count(samples)
        tokens = _tokens(samples[: LOSS_GROUPS * asked.table.group_size], objective)
        loss, _ = objective.loss(tokens)
        if parts.loss.target and not loss.requires_grad:
            raise parts.loss.wrong(NO_GRADIENT, tokens)
    except UserPartFailed as error:
        return DryRunFailure(error.place, f"{error.who} failed in a dry run: {error.detail}", not error.raised)
    except Refused:
        # The made-up batch lacks something that a part of a known name asks for: nothing can be said of the user's.
        return None
    except Exception as error:  # noqa: BLE001 - it ends this process, and is reported
        # Of memory or a device, for which no part is blamed; or of a known part, after what a user's returned.
        message = f"{type(error).__name__}: {error} at {user_line(error)}"
        return DryRunFailure(("algorithm",), f"a part failed in a dry run: {message}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def _interrupt_after(seconds: float) -> None:
    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, RELEASE_TIMEOUT_S)
        raise DoesNotReturn(f"it does not return within {seconds:g} s")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _samples(objective: Objective, asked: DryRunRequest) -> list[Sample]:
    """A step's groups, of several lengths and rewards, with the columns that a trainer would give them."""
    table, needs = asked.table, objective.needs
    groups = min(table.prompts_per_step, max(LOSS_GROUPS, MAX_SAMPLES // table.group_size))
    proximal = "proximal" in needs and (objective.proximal_first or table.updates_per_step > 1)
    made = []
    for group in range(groups):
        for member in range(table.group_size):
            length = PROMPT + 3 + member % LENGTHS
            mask = (np.arange(length) >= PROMPT).astype(np.uint8)
            numbers = (-0.1 * mask * (1 + np.arange(length))).astype(np.float32)
            turn = TurnSpan(PROMPT, length, "assistant")
            info = {"turn_rewards": [float(member % 2)], "turn_states": ["a state"]} if asked.turns else {}
            meta = msgspec.structs.replace(bare_meta(group, member), turns=[turn], info=info)
            made.append(
                Sample(
                    meta=meta,
                    tokens=np.arange(1, length + 1, dtype=np.int32),
                    loss_mask=mask,
                    behaviour_logprobs=numbers,
                    versions=[],
                    reward=float(member % 2),
                    proximal_logprobs=numbers * np.float32(1.1) if proximal else None,
                    reference_logprobs=numbers * np.float32(0.9) if "reference" in needs else None,
                    values=mask.astype(np.float32) * np.float32(0.5) if "values" in needs else None,
                )
            )
    return made


def _tokens(samples: Sequence[Sample], objective: Objective) -> TokenTensors:
    """The trained tokens of samples, as a backend would make them."""
    import torch

    def column(name: str) -> torch.Tensor | None:
        found = [getattr(one, name) for one in samples]
        if any(one is None for one in found):
            return None
        values = [one[sample.loss_mask != 0] for one, sample in zip(found, samples, strict=True)]
        return torch.from_numpy(np.concatenate(values).astype(np.float32))

    behaviour, advantages = column("behaviour_logprobs"), column("advantages")
    assert behaviour is not None and advantages is not None
    counts = torch.tensor([int((one.loss_mask != 0).sum()) for one in samples])
    sequence = torch.repeat_interleave(torch.arange(len(samples)), counts)
    return TokenTensors(
        logprobs=(behaviour * 1.1).requires_grad_(),
        behaviour=behaviour,
        advantages=advantages,
        mask=torch.ones(len(sequence), dtype=torch.bool),
        sequence=sequence,
        proximal=column("proximal_logprobs"),
        reference=column("reference_logprobs"),
        group=torch.tensor([one.meta.group for one in samples])[sequence],
        entropy=torch.full((len(sequence),), 0.5, requires_grad=True) if "entropy" in objective.needs else None,
    )


def main() -> None:
    """Read an `DryRunRequest` from standard input, and write what was found to standard output."""
    # What a part prints is not the answer.
    answer = os.dup(1)
    os.dup2(2, 1)
    asked: DryRunRequest = pickle.load(sys.stdin.buffer)
    found = first_failure(asked)
    with os.fdopen(answer, "wb") as stream:
        stream.write(msgspec.json.encode(found))


if __name__ == "__main__":
    main()


CALLS = "relax_rt.roles.training.algorithms.dry_run"
LOAD_S = 120.0
"""For its process to import torch and the user's files, and for all the calls."""


def call_in_process(asked: DryRunRequest) -> DryRunFailure | None:
    """Call the parts in a process of its own, and return what went wrong first."""
    command = [sys.executable, "-P", "-m", CALLS]
    try:
        ended = subprocess.run(
            command, input=pickle.dumps(asked), stdout=subprocess.PIPE, timeout=LOAD_S + asked.calls_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        message = f"a part failed in a dry run: it does not return within {error.timeout:g} s"
        return DryRunFailure(("algorithm",), message)
    if ended.returncode == -signal.SIGALRM:
        how = f"it does not return within {asked.calls_s:g} s, and catches what interrupts it"
    elif ended.returncode < 0:
        how = f"its process was ended by {signal.Signals(-ended.returncode).name}"
    else:
        how = f"its process ended with {ended.returncode} and no answer"
    if ended.returncode or not ended.stdout:
        return DryRunFailure(("algorithm",), f"a part failed in a dry run: {how}; what it printed stands above")
    return msgspec.json.decode(ended.stdout, type=DryRunFailure | None)
