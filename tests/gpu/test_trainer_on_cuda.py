"""The torch trainer, critic and reference on a device, beside the same on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gang_harness import samples
from harness import VOCABULARY

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.models.device import CPU, copy_to_host, generator_states, set_generator_states
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.settings import CriticSettings, LoraTable
from relax_rt.roles.training.batch.budget import TokenBudget
from relax_rt.roles.training.critic.model import CriticModel
from relax_rt.roles.training.reference.model import FrozenModel
from relax_rt.roles.training.torch.backend import TorchBackend

CUDA = torch.device("cuda", 0)


def backend(folder: Path, device: torch.device, *, dtype: str = "float32", **options: Any) -> TorchBackend:
    table = AlgorithmTable(learning_rate=1e-3, kl={"name": "k3", "coefficient": 0.1}, entropy="bonus")
    return TorchBackend(
        folder,
        table,
        dtype=dtype,
        threads=1,
        tokens_per_micro_batch=options.pop("budget", 64),
        temperature=0.8,
        on_progress=lambda _: None,
        device=device,
        **options,
    )


def drawn(count: int) -> list[Sample]:
    """Samples whose tokens the conformance model knows."""
    made = samples(count)
    for sample in made:
        sample.tokens %= VOCABULARY
    return made


def exported(trainer: TorchBackend, dtype: str = "float32") -> Any:
    into = bytearray(trainer.layout(dtype).nbytes)
    trainer.export(memoryview(into), dtype)
    return np.frombuffer(into, np.float32 if dtype == "float32" else np.uint8)


@pytest.mark.parametrize("lora", [None, LoraTable(rank=2, alpha=4)], ids=["all weights", "adapters"])
def test_it_does_what_it_does_on_the_cpu(conformance_model: Path, tmp_path: Path, lora: LoraTable | None) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    here, there = (backend(conformance_model, device, lora=lora) for device in (CPU, CUDA))
    batch = drawn(8)
    for wanted, found in zip(here.log_probabilities(batch), there.log_probabilities(batch), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    for number in (1, 2):
        wanted, found = here.step(batch, number), there.step(batch, number)
        assert found.applied and found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-3, abs=1e-5)
    assert all(piece.parameter.device == CUDA for piece in there.weights.trained)
    np.testing.assert_allclose(exported(there), exported(here), atol=2e-3)
    for first, second, name in ((there, here, "one"), (here, there, "two")):
        folder = tmp_path / name
        folder.mkdir()
        first.snapshot()
        first.write(folder)
        second.restore(folder)
        np.testing.assert_allclose(exported(second), exported(first), rtol=1e-6, atol=1e-6)
        assert first.step(batch, 3).grad_norm == pytest.approx(second.step(batch, 3).grad_norm, rel=1e-3)


def test_in_bfloat16_it_is_as_near_to_float32_as_the_cpu(conformance_model: Path) -> None:
    batch = drawn(8)

    def found(device: torch.device, dtype: str) -> Any:
        return np.concatenate(backend(conformance_model, device, dtype=dtype).log_probabilities(batch))

    exact = found(CUDA, "float32")
    gaps = [float(np.abs(found(device, "bfloat16") - exact).max()) for device in (CUDA, CPU)]
    assert 0 < gaps[0] < max(2 * gaps[1], 0.05), gaps


def test_a_micro_batch_without_memory_is_halved_and_the_step_is_the_same(conformance_model: Path) -> None:
    batch = drawn(8)
    wanted = backend(conformance_model, CUDA).step(batch, 1)
    trainer = backend(conformance_model, CUDA, budget=TokenBudget(1 << 20))
    predicted, held, sizes = trainer._predicted, [], []

    def scarce(micro: Any, **options: Any) -> Any:
        sizes.append(micro.ids.numel())
        if sizes[-1] == sizes[0]:
            # A real one: more than the device has.
            held.append(torch.empty(1 << 50, dtype=torch.uint8, device=CUDA))
        return predicted(micro, **options)

    trainer._predicted = scarce  # type: ignore[method-assign]
    found = trainer.step(batch, 1)
    assert found.others["micro_batches_halved"] >= 1 and not held
    assert found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-3)


def test_values_reach_the_host_whole(tmp_path: Path) -> None:
    values = torch.arange(70 << 20, device=CUDA, dtype=torch.int32).to(torch.uint8)
    assert torch.equal(copy_to_host(values), values.cpu())
    odd = torch.randn(3, 5, 7, device=CUDA)
    assert torch.equal(copy_to_host(odd), odd.cpu()) and copy_to_host(odd[:0]).shape == (0, 5, 7)


def test_the_device_s_random_numbers_go_on(conformance_model: Path) -> None:
    states = generator_states(CUDA)
    wanted = torch.rand(4, device=CUDA)
    torch.cuda.manual_seed(9)
    set_generator_states(states, CUDA)
    assert torch.equal(torch.rand(4, device=CUDA), wanted)


def test_critic_and_reference_do_what_they_do_on_the_cpu(conformance_model: Path, tmp_path: Path) -> None:
    batch = drawn(8)
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "budget": 64, "temperature": 0.8}
    here, there = (FrozenModel(conformance_model, device=device, **options) for device in (CPU, CUDA))
    for wanted, found in zip(here.log_probabilities(batch), there.log_probabilities(batch), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)
    returns = [(s.loss_mask * np.float32(s.reward or 0.0)).astype(np.float32) for s in batch]
    table = CriticSettings(dtype="float32", learning_rate=1e-3)
    critics = [CriticModel(conformance_model, table, lambda _: None, device) for device in (CPU, CUDA)]
    for _ in range(2):
        reports = [critic.learn(batch, critic.values(batch), returns) for critic in critics]
        assert reports[1].applied and reports[1].loss == pytest.approx(reports[0].loss, rel=1e-3)
    critics[1].snapshot()
    critics[1].write(tmp_path)
    critics[0].restore(tmp_path)
    for wanted, found in zip(critics[1].values(batch), critics[0].values(batch), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks need two devices: NCCL takes each once")
def test_two_ranks_over_nccl_do_what_one_does(conformance_model: Path, tmp_path: Path) -> None:
    program = Path(__file__).with_name("trainer_far_end.py")
    found = []
    for world in (1, 2):
        folder = tmp_path / str(world)
        folder.mkdir()
        ranks = [
            subprocess.Popen(
                [sys.executable, str(program), str(conformance_model), str(folder), str(rank), str(world)],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        told = [rank.communicate(timeout=300)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0] * world
        found.append(json.loads(told[0].splitlines()[-1]))
    assert found[1]["grad_norm"] == pytest.approx(found[0]["grad_norm"], rel=1e-3)
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-3)
    assert found[1]["weights"] == pytest.approx(found[0]["weights"], rel=1e-3)
