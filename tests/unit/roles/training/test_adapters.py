"""Adapters in the torch backend: what is trained, what is published, and what a checkpoint holds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_backend import torch_backend

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from packing_samples import SAMPLES  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

from relax_rt.config.loader import load_config  # noqa: E402
from relax_rt.config.problems import ConfigErrors  # noqa: E402
from relax_rt.roles.config.sections import RLConfig  # noqa: E402
from relax_rt.roles.models.shape import read_shape  # noqa: E402
from relax_rt.roles.planning.memory import adapter_elements  # noqa: E402
from relax_rt.roles.rollout.engines.weights import FlatWeights  # noqa: E402
from relax_rt.roles.training.algorithms.settings import AlgorithmTable  # noqa: E402
from relax_rt.roles.training.backend.settings import LoraTable, TrainerSettings  # noqa: E402
from relax_rt.roles.training.checks import check_adapters  # noqa: E402
from relax_rt.roles.training.publication.adapters import AdapterVersions  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.base.versions import VersionRecord  # noqa: E402
from relax_rt.transport.rpc.errors import Refused, RelaxError  # noqa: E402
from relax_rt.transport.weights.manifest import bucket_digest, bucket_slices, total_digest  # noqa: E402
from relax_rt.transport.weights.source import add_adapters, base_of  # noqa: E402
from relax_rt.transport.weights.stage import WeightStage, adapters_view, read_manifest, verify  # noqa: E402

LORA = LoraTable(rank=4, alpha=8.0)


def backend(model_dir: Path, lora: LoraTable | None = LORA, seed: int = 0) -> TorchBackend:
    return torch_backend(model_dir, learning_rate=1e-2, max_grad_norm=1.0, lora=lora, seed=seed)


def published(trainer: TorchBackend) -> dict[str, torch.Tensor]:
    layout = trainer.layout("float32")
    data = bytearray(layout.nbytes)
    trainer.export(memoryview(data), "float32")
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return {e.name: flat[e.offset : e.offset + e.nbytes].view(torch.float32).view(e.shape) for e in layout.entries}


def saved(trainer: TorchBackend, folder: Path) -> Path:
    folder.mkdir()
    trainer.snapshot()
    trainer.write(folder)
    return folder


def test_only_adapters_are_trained_and_have_moments(model_dir: Path) -> None:
    trainer, whole = backend(model_dir), backend(model_dir, None)
    before = {name: value.clone() for name, value in published(trainer).items()}
    assert all(torch.equal(value, published(whole)[name]) for name, value in before.items())
    assert trainer.layout("bfloat16") == whole.layout("bfloat16")
    assert trainer.step(SAMPLES, 1).applied and trainer.step(SAMPLES, 2).applied
    names = {piece.name for piece in trainer.weights.trained}
    assert len(names) == 2 * 7 * 2 and all(".lora_" in name for name in names)
    assert len(trainer._optimizer.state) == len(names)
    after = published(trainer)
    moved = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert moved == {name for name in before if name.endswith("_proj.weight")}


def test_the_plan_counts_the_adapters_elements(model_dir: Path) -> None:
    for table in (LORA, LoraTable(rank=2, targets=["q_proj", "down_proj"])):
        trained = backend(model_dir, table).weights.trained
        assert adapter_elements(read_shape(model_dir), table) == sum(piece.values.numel() for piece in trained)


# peft asks for it; transformers 5.20 and later have another name.
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")
def test_what_is_published_computes_what_is_trained(model_dir: Path, tmp_path: Path) -> None:
    trainer = backend(model_dir)
    for number in (1, 2, 3):
        trainer.step(SAMPLES, number)
    ours = trainer.log_probabilities(SAMPLES)
    # As any engine, or user, loads it; and as peft puts the adapter over the model that it was trained on.
    folder = saved(trainer, tmp_path / "step")
    merged = backend(folder, None).log_probabilities(SAMPLES)
    base = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, folder / "adapter").eval()
    for sample, mine, theirs in zip(SAMPLES, ours, merged, strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-5)
        ids = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        with torch.no_grad():
            every = torch.log_softmax(adapted(ids).logits[0, :-1], -1).gather(-1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(mine[1:], every * sample.loss_mask[1:], atol=2e-5)


def bits(trainer: TorchBackend, dtype: str) -> torch.Tensor:
    data = bytearray(trainer.layout(dtype).nbytes)
    trainer.export(memoryview(data), dtype)
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).float()


@pytest.mark.parametrize(("rate", "low", "high"), [(1e-6, 0.0, 0.1), (1e-1, 0.8, 1.0)])
def test_the_changes_that_rounding_leaves_are_measured(model_dir: Path, rate: float, low: float, high: float) -> None:
    trainer = backend(model_dir)
    before, whole = bits(trainer, "bfloat16"), bits(trainer, "float32")
    assert trainer.changes_kept is None, "nothing is changed yet"
    trainer._algorithm = AlgorithmTable(learning_rate=rate)
    for number in (1, 2, 3):
        assert trainer.step(SAMPLES, number).applied
    changed = int((bits(trainer, "float32") != whole).sum())
    assert trainer.changes_kept == 1.0, "in float32 nothing is lost"
    # Adapted weights of so small a model are looked at whole.
    kept = int((bits(trainer, "bfloat16") != before).sum()) / changed
    assert trainer.changes_kept == pytest.approx(kept, abs=1e-4)
    assert low < kept < high
    # And where adapters travel alone.
    trainer.weights.changes_kept = None
    trainer.export_base(memoryview(bytearray(trainer.layout("bfloat16").nbytes)), "bfloat16")
    trainer.adapters()
    assert trainer.changes_kept == pytest.approx(kept, abs=1e-4)


def test_without_adapters_there_is_nothing_to_measure(model_dir: Path) -> None:
    trainer = backend(model_dir, None)
    assert trainer.step(SAMPLES, 1).applied
    bits(trainer, "bfloat16")
    assert trainer.changes_kept is None


def test_a_resumed_training_takes_the_same_steps(model_dir: Path, tmp_path: Path) -> None:
    straight, resumed = backend(model_dir), backend(model_dir, seed=9)
    straight.step(SAMPLES, 1)
    folder = saved(straight, tmp_path / "step")
    straight.step(SAMPLES, 2)
    resumed.step(SAMPLES[:2], 1)
    resumed.restore(folder)
    resumed.step(SAMPLES, 2)
    wanted = published(straight)
    assert all(torch.equal(value, wanted[name]) for name, value in published(resumed).items())
    state = load_file(folder / "optimizer-00001-of-00001.safetensors")
    tensors = {key.split("|")[0] for key in state if "generator_" not in key}
    assert tensors == {piece.name for piece in straight.weights.trained}


def test_checkpoints_of_another_training_are_refused_and_change_nothing(model_dir: Path, tmp_path: Path) -> None:
    whole, adapted = backend(model_dir, None), backend(model_dir)
    for trainer in (whole, adapted):
        trainer.step(SAMPLES, 1)
    folders = {"whole": saved(whole, tmp_path / "whole"), "adapted": saved(adapted, tmp_path / "adapted")}
    before = {name: value.clone() for name, value in published(adapted).items()}
    with pytest.raises(RelaxError, match="a training of all weights"):
        adapted.restore(folders["whole"])
    with pytest.raises(RelaxError, match="of a training of adapters"):
        whole.restore(folders["adapted"])
    with pytest.raises(RelaxError, match=r"lora_A.weight has the shape \[4, 32\], not \[2, 32\]"):
        backend(model_dir, LoraTable(rank=2)).restore(folders["adapted"])
    shutil.rmtree(folders["adapted"] / "adapter")
    with pytest.raises(RelaxError, match="of all weights"):
        adapted.restore(folders["adapted"])
    assert all(torch.equal(value, before[name]) for name, value in published(adapted).items())


@pytest.mark.parametrize(("targets", "why"), [(["lm_head"], "the embedding's as well"), (["nowhere"], "not found")])
def test_layers_that_cannot_have_adapters_are_refused(model_dir: Path, targets: list[str], why: str) -> None:
    with pytest.raises(Refused, match=why):
        backend(model_dir, LoraTable(targets=targets))


def config(**lora: Any) -> RLConfig:
    table = TrainerSettings(lora=LoraTable(**lora))
    return RLConfig.model_construct(roles={"trainer": table})


def test_unknown_targets_are_refused_before_anything_starts(model_dir: Path) -> None:
    assert not list(check_adapters(config(targets=["q_proj", "mlp.down_proj"]), model_dir))
    assert not list(check_adapters(config(), model_dir))
    (problem,) = check_adapters(config(targets=["q_prj"]), model_dir)
    assert "no linear layer 'q_prj'" in problem.message and problem.hint == "did you mean 'q_proj'?"
    (problem,) = check_adapters(config(targets=[]), model_dir)
    assert "nothing would be trained" in problem.message


def test_a_misspelt_target_or_key_has_its_place(tmp_path: Path) -> None:
    from relax_rt.cli.starter import write_starter

    write_starter(tmp_path)
    with pytest.raises(ConfigErrors) as caught:
        load_config(tmp_path / "roles.toml", ('roles.trainer.lora={ rnk = 8, targets = "all-linea" }',))
    paths = {problem.path for problem in caught.value.problems}
    assert ("roles", "trainer", "lora", "rnk") in paths


def version(trainer: TorchBackend, folder: Path, number: int, dtype: str, epoch: int = 1) -> tuple[VersionRecord, str]:
    """The trainer's weights staged as adapters; with the digest of what they are added to."""
    stage = WeightStage(folder, epoch)
    try:
        adapted, layout = AdapterVersions(trainer, stage, dtype), trainer.layout(dtype)
        base = adapted.base(layout)
        taken = adapted.take(base)
        with stage.writing(layout, number - 1) as (file, view):
            adapted.make(taken, view)
            manifest = stage.seal(number, layout, file, view, b"", taken.blob, base.digest)
        return VersionRecord(number, number - 1, number, manifest.digest), base.digest
    finally:
        stage.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_receivers_make_of_the_adapters_what_the_trainer_publishes(dtype: str, model_dir: Path, tmp_path: Path) -> None:
    trainer, stage = backend(model_dir), tmp_path / "stage"
    for number in (1, 2):
        trainer.step(SAMPLES, number)
    record, base = version(trainer, stage, 1, dtype)
    into = bytearray(trainer.layout(dtype).nbytes)
    manifest = read_manifest(stage, record.version)
    with adapters_view(stage, manifest) as blob:
        add_adapters(blob, stage, base_of(stage, manifest), memoryview(into))
    verify(manifest, memoryview(into))
    flat = torch.frombuffer(into, dtype=torch.uint8)
    for entry in trainer.layout(dtype).entries:
        made = flat[entry.offset : entry.offset + entry.nbytes].view(getattr(torch, dtype)).view(entry.shape)
        rounding = {"atol": 1e-6, "rtol": 1e-5} if dtype == "float32" else {"atol": 1e-4, "rtol": 2**-7}
        torch.testing.assert_close(made.float(), published(trainer)[entry.name], **rounding)
    # The base is the model as any engine has it that loads the folder.
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=getattr(torch, dtype))
    weights = FlatWeights(model, getattr(torch, dtype), torch.device("cpu"))
    assert weights.layout == trainer.layout(dtype)
    mine = weights.standby(base=True)
    assert base == total_digest(bucket_digest(mine[part]) for part in bucket_slices(weights.layout.nbytes))


def test_a_resumed_training_publishes_the_same_bits_over_the_same_base(model_dir: Path, tmp_path: Path) -> None:
    straight, stage = backend(model_dir), tmp_path / "stage"
    straight.step(SAMPLES, 1)
    folder = saved(straight, tmp_path / "step")
    before = version(straight, stage, 1, "bfloat16")
    resumed = backend(model_dir, seed=9)
    resumed.restore(folder)
    after = version(resumed, stage, 2, "bfloat16", epoch=2)
    assert (after[0].digest, after[1]) == (before[0].digest, before[1])
    elsewhere = version(resumed, tmp_path / "new node", 3, "bfloat16")
    assert elsewhere[1] == before[1] and elsewhere[0].digest == before[0].digest
    resumed.step(SAMPLES, 2)
    assert version(resumed, stage, 4, "bfloat16", epoch=2)[0].digest != before[0].digest


def test_a_trainer_of_all_weights_has_no_adapters_to_publish(model_dir: Path) -> None:
    with pytest.raises(Refused, match="it trains all weights"):
        backend(model_dir, None).adapters()
