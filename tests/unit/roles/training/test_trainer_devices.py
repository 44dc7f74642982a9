"""Models of trainer, critic and reference on a device: nothing stays behind on the CPU, and nothing else changes."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_backend import torch_backend

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packing_samples import SAMPLES  # noqa: E402
from stand_in import DEVICE, Accelerator, There  # noqa: E402
from torch.utils._python_dispatch import _disable_current_modes  # noqa: E402

from relax_rt.roles.config.sections import RLConfig  # noqa: E402
from relax_rt.roles.models import device as module  # noqa: E402
from relax_rt.roles.models.device import CPU, choose_device  # noqa: E402
from relax_rt.roles.planning.division import divisible  # noqa: E402
from relax_rt.roles.training.backend.settings import (  # noqa: E402
    CriticSettings,
    LoraTable,
    TrainerSettings,
)
from relax_rt.roles.training.batch.collate import collate  # noqa: E402
from relax_rt.roles.training.batch.rows import shared_rows  # noqa: E402
from relax_rt.roles.training.critic.model import CriticModel  # noqa: E402
from relax_rt.roles.training.reference.model import FrozenModel  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.rpc.errors import Refused  # noqa: E402


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """A device that is not the CPU."""
    optimizer = importlib.import_module("torch.optim.optimizer")
    fused = optimizer._get_fused_kernels_supported_devices()
    monkeypatch.setattr(optimizer, "_get_fused_kernels_supported_devices", lambda: [*fused, DEVICE.type])
    load = transformers.AutoModelForCausalLM.from_pretrained

    def loaded(*arguments: Any, **options: Any) -> Any:
        # transformers has uses of its own for the name "meta".
        with _disable_current_modes():
            return load(*arguments, **options)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loaded)
    with Accelerator() as mode:
        yield mode


@pytest.fixture
def untied(model_dir: Path, tmp_path: Path) -> Path:
    """A model whose output layer has weights of its own: torch unties them on its way to an unknown device."""
    config = transformers.AutoConfig.from_pretrained(model_dir, tie_word_embeddings=False)
    torch.manual_seed(1)
    transformers.Qwen3ForCausalLM(config).save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


def backend(folder: Path, device: Any = CPU, **options: Any) -> TorchBackend:
    table = {"learning_rate": 1e-2, "kl": {"name": "k3", "coefficient": 0.1}, "entropy": "bonus", "max_grad_norm": 1.0}
    return torch_backend(folder, budget=16, temperature=0.8, device=device, **table, **options)


def exported(trainer: TorchBackend) -> Any:
    into = bytearray(trainer.layout("float32").nbytes)
    trainer.export(memoryview(into), "float32")
    return np.frombuffer(into, np.float32)


@pytest.mark.parametrize("lora", [None, LoraTable(rank=2, alpha=4)], ids=["all weights", "adapters"])
def test_a_trainer_on_a_device_does_what_one_on_the_cpu_does(
    untied: Path, accelerator: Accelerator, tmp_path: Path, lora: LoraTable | None
) -> None:
    if lora is not None:
        pytest.importorskip("peft")
    here, there = backend(untied, lora=lora), backend(untied, DEVICE, lora=lora)
    for wanted, found in zip(here.log_probabilities(SAMPLES), there.log_probabilities(SAMPLES), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    for number in (1, 2):
        wanted, found = here.step(SAMPLES, number), there.step(SAMPLES, number)
        assert found.applied and found.grad_norm == pytest.approx(wanted.grad_norm, rel=1e-4)
        assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    np.testing.assert_allclose(exported(there), exported(here), atol=2e-4)
    assert all(isinstance(p, There) and isinstance(p.grad, There) for p in trained(there))
    assert any("fused_adamw" in name for name in accelerator.seen) and any("mm" in name for name in accelerator.seen)
    # A checkpoint goes from one to the other, and back.
    for first, second, name in ((there, here, "one"), (here, there, "two")):
        folder = tmp_path / name
        folder.mkdir()
        first.snapshot()
        first.write(folder)
        second.restore(folder)
        np.testing.assert_allclose(exported(second), exported(first), rtol=1e-6, atol=1e-7)
        a, b = first.step(SAMPLES, 3), second.step(SAMPLES, 3)
        assert a.grad_norm == pytest.approx(b.grad_norm, rel=1e-4)
        np.testing.assert_allclose(exported(second), exported(first), atol=2e-4)
    moments = [value for state in there._optimizer.state.values() for value in state.values()]
    assert moments and all(isinstance(value, There) for value in moments)


def trained(trainer: TorchBackend) -> list[Any]:
    return [piece.parameter for piece in trainer.weights.trained]


def test_the_stand_in_finds_what_is_left_behind(accelerator: Accelerator) -> None:
    batch = collate(shared_rows(SAMPLES, 64), DEVICE)
    assert isinstance(batch.mask, There) and isinstance(batch.reference, There)
    with pytest.raises(AssertionError, match="tensors of both devices"):
        batch.behaviour + torch.ones(len(batch.behaviour))


def test_critic_and_reference_do_so_too(untied: Path, accelerator: Accelerator, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dtype": "float32", "threads": 1, "budget": 16, "temperature": 0.8}
    here, there = FrozenModel(untied, **options), FrozenModel(untied, device=DEVICE, **options)
    for wanted, found in zip(here.log_probabilities(SAMPLES), there.log_probabilities(SAMPLES), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    returns = [(s.loss_mask * np.float32(0.5 + s.meta.group)).astype(np.float32) for s in SAMPLES]
    table = CriticSettings(dtype="float32", learning_rate=1e-3)
    critics = [CriticModel(untied, table, lambda _: None, device) for device in (CPU, DEVICE)]
    for _ in range(2):
        reports = [critic.learn(SAMPLES, critic.values(SAMPLES), returns) for critic in critics]
        assert reports[1].applied and reports[1].loss == pytest.approx(reports[0].loss, rel=1e-4)
    critics[1].snapshot()
    critics[1].write(tmp_path)
    critics[1].restore(tmp_path)
    critics[0].restore(tmp_path)
    for critic in critics:
        critic.learn(SAMPLES, critic.values(SAMPLES), returns)
    for wanted, found in zip(critics[0].values(SAMPLES), critics[1].values(SAMPLES), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_what_runs_out_of_memory_gives_back_what_it_holds(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, freed = backend(model_dir), []
    predicted, left = trainer._predicted, [1]

    def scarce(*arguments: Any, **options: Any) -> Any:
        if left:
            left.pop()
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return predicted(*arguments, **options)

    monkeypatch.setattr(trainer, "_predicted", scarce)
    monkeypatch.setattr("relax_rt.roles.training.batch.budget.empty_cache", freed.append)
    assert trainer.step(SAMPLES, 1).others["micro_batches_halved"] == 1
    assert freed == [CPU]
    calls: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append(1))
    module.empty_cache(CPU)
    assert not calls
    module.empty_cache(torch.device("cuda", 0))
    assert calls


def test_a_user_s_random_numbers_go_on_behind_a_checkpoint(model_dir: Path, tmp_path: Path) -> None:
    trainer = backend(model_dir)
    trainer.step(SAMPLES, 1)
    trainer.snapshot()
    wanted = torch.rand(4)
    trainer.write(tmp_path)
    torch.manual_seed(12345)
    backend(model_dir).restore(tmp_path)
    assert torch.equal(torch.rand(4), wanted)


def test_a_slot_without_a_gpu_touches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", 0) == CPU == choose_device("cpu", 1) and not chosen
    assert choose_device("auto", 0.5) == choose_device("cuda", 1) == torch.device("cuda", 0)
    assert chosen == [0, 0]


def test_without_a_gpu_only_a_wish_for_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 1) == CPU
    with pytest.raises(Refused, match=r'device = "cuda".*(sees no GPU|without CUDA)'):
        choose_device("cuda", 1)


def test_values_leave_a_gpu_bucket_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def record(self) -> None:
            self.number = sum(line.startswith("record") for line in log)
            log.append(f"record {self.number}")

        def synchronize(self) -> None:
            log.append(f"wait {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    source, target = torch.arange(23, dtype=torch.uint8), torch.zeros(23, dtype=torch.uint8)
    buffers = torch.empty(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8)
    module.copy_through(source, target, buffers)
    assert torch.equal(target, source)
    # One is on its way while the one before is put into its place.
    assert log == ["record 0", "record 1", "wait 0", "record 2", "wait 1", "wait 2"]


@pytest.mark.parametrize(
    ("trainer", "key", "message"),
    [
        ({"device": "cuda"}, "device", "gpus gives its slots none"),
        ({"device": "cpu", "gpus": 1}, "device", "leaves the GPU unused"),
        ({"device": "cuda", "gpus": 1, "backend": "megatron"}, "device", "megatron takes a GPU"),
        ({"gpus": 0.5, "count": 2}, "gpus", "NCCL wants one for each"),
        ({"device": "cuda", "gpus": 1, "count": 2}, "", ""),
    ],
)
def test_a_device_that_does_not_go_with_the_gpus_is_refused(trainer: dict[str, Any], key: str, message: str) -> None:
    config = RLConfig.model_validate(
        {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"task": "t"}, "reward": {"function": "f:g"}}
    )
    config = config.model_copy(update={"roles": {"trainer": TrainerSettings(**trainer)}})
    found = list(divisible(config))
    if not key:
        assert found == []
        return
    (problem,) = found
    assert problem.path == ("roles", "trainer", key) and message in problem.message
