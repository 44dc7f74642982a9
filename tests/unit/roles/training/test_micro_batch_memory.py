"""What the torch backend does when memory runs out in a micro-batch."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_backend import torch_backend

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from packing_samples import SAMPLES, make_sample  # noqa: E402
from starved import failing_backward, spoil_last  # noqa: E402

from relax_rt.roles.models.device import out_of_memory  # noqa: E402
from relax_rt.roles.training.batch.budget import TokenBudget  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.rpc.errors import RelaxError  # noqa: E402


def backend(model_dir: Path, budget: TokenBudget | int = 4096, **table: Any) -> TorchBackend:
    return torch_backend(model_dir, budget=budget, learning_rate=1e-3, **table)


def starve(trainer: TorchBackend, fits: int, *, error: Callable[[], BaseException], backward: bool = True) -> None:
    """Micro-batches of more tokens than `fits` run out of memory; in the backward pass, with half of it done."""
    predicted = trainer._predicted

    def scarce(batch: Any, **options: Any) -> Any:
        logprobs, entropy = predicted(batch, **options)
        if batch.ids.numel() <= fits:
            return logprobs, entropy
        if not backward or not torch.is_grad_enabled():
            raise error()
        return failing_backward(logprobs, error, lambda: spoil_last(trainer._model)), entropy

    trainer._predicted = scarce  # type: ignore[method-assign]


ERRORS = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"),
    "python": MemoryError,
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "forward"])
def test_a_step_with_smaller_micro_batches_is_the_same_step(
    model_dir: Path, error: Callable[[], BaseException], backward: bool
) -> None:
    wanted, told = backend(model_dir), list[tuple[int, int, str]]()
    whole = wanted.step(SAMPLES, 1)
    trainer = backend(model_dir, TokenBudget(4096, on_smaller=lambda *what: told.append(what)))
    starve(trainer, 12, error=error, backward=backward)
    parts = [trainer.accumulate(part) for part in (SAMPLES[:3], SAMPLES[3:])]
    result = trainer.apply(sum(part.count for part in parts), 1)
    for name in ("loss", "grad_norm", "tokens", "ratio_mean", "clip_fraction"):
        assert getattr(result, name) == pytest.approx(getattr(whole, name), rel=1e-5), name
    assert result.others["micro_batches_halved"] == len(told) > 0
    for (name, a), b in zip(wanted._model.named_parameters(), trainer._model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad, atol=2e-6, rtol=2e-4, msg=name)
    # It is kept: neither the next step nor log-probabilities run into it again.
    seen = len(told)
    assert trainer.step(SAMPLES, 2).others.get("micro_batches_halved") is None
    assert len(trainer.log_probabilities(SAMPLES)) == len(SAMPLES)
    assert len(told) == seen and all(after < before for before, after, _ in told)


def test_log_probabilities_are_computed_in_smaller_parts(model_dir: Path) -> None:
    wanted, trainer = backend(model_dir).log_probabilities(SAMPLES), backend(model_dir)
    starve(trainer, 12, error=MemoryError)
    for ours, theirs in zip(trainer.log_probabilities(SAMPLES), wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_one_sequence_that_does_not_fit_ends_it_with_what_to_do(model_dir: Path) -> None:
    trainer = backend(model_dir)
    starve(trainer, 5, error=MemoryError)
    with pytest.raises(RelaxError, match=r"one sequence of \d+ tokens does not fit.*lower sampling.max_new_tokens"):
        trainer.accumulate(SAMPLES)
    pairs = backend(model_dir, name="dpo")
    starve(pairs, 5, error=MemoryError)
    with pytest.raises(RelaxError, match="one group of"):
        pairs.accumulate(SAMPLES)


def test_other_errors_are_none_of_it(model_dir: Path) -> None:
    trainer = backend(model_dir)
    starve(trainer, 5, error=lambda: RuntimeError("shape mismatch"))
    with pytest.raises(RuntimeError, match="shape mismatch"):
        trainer.accumulate(SAMPLES)
    assert not out_of_memory(ValueError("out of memory")) and out_of_memory(RuntimeError("std::bad_alloc"))


def test_the_smaller_number_outlives_the_process_but_not_another_setting(tmp_path: Path) -> None:
    from relax_rt.roles.training.batch.rows import shared_rows

    file = tmp_path / "micro_batch.json"
    budget = TokenBudget(4096, file)
    rows = shared_rows([make_sample(0, n, [1, 2], [3, 4, 5]) for n in range(4)], 4096)
    budget.attempting(rows, 14)
    budget.halve("no memory")
    assert (budget.tokens, TokenBudget(4096, file).tokens, TokenBudget(2048, file).tokens) == (7, 7, 2048)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"configured": 4096}', '{"configured": 4096, "tokens": 0}', '{"configured": 4096, "tokens": "7"}'],
)
def test_a_file_that_is_not_whole_is_none(tmp_path: Path, text: str) -> None:
    file = tmp_path / "micro_batch.json"
    file.write_text(text)
    budget = TokenBudget(4096, file)
    assert budget.tokens == 4096
    # It is learnt again, and kept.
    budget.attempting_units(4000, 4)
    budget.halve("no memory")
    assert TokenBudget(4096, file).tokens == 2000


LIMITED = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import torch
from packing_samples import make_sample
from test_micro_batch_memory import backend
from relax_rt.roles.training.batch.budget import TokenBudget

torch.set_num_threads(1)
told = []
trainer = backend(Path(sys.argv[1]), TokenBudget(1 << 20, on_smaller=lambda *what: told.append(what)))
samples = [make_sample(n, 0, [1, 2], [3 + (n + k) % 60 for k in range(100)]) for n in range(1200)]
trainer.step(samples[:2], 1)
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
result = trainer.step(samples, 2)
print(result.applied, len(told), told[0][2] if told else "")
"""


def test_a_real_limit_of_memory(model_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(model_dir), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("True ") and "memory" in done.stdout, done.stdout
