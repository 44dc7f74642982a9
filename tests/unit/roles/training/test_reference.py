"""The reference role: log-probabilities of a model that is not trained, by the trainer's numerics."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from packing_samples import SAMPLES  # noqa: E402

from relax_rt.roles.base.sample import Sample, SampleMeta  # noqa: E402
from relax_rt.roles.config.sections import RLConfig  # noqa: E402
from relax_rt.roles.training.algorithms.settings import AlgorithmTable  # noqa: E402
from relax_rt.roles.training.backend.settings import ReferenceSettings  # noqa: E402
from relax_rt.roles.training.reference.model import FrozenModel  # noqa: E402
from relax_rt.roles.training.reference.role import FAILURES_IN_A_ROW, ReferenceRole  # noqa: E402
from relax_rt.roles.training.torch.backend import TorchBackend  # noqa: E402
from relax_rt.transport.queue.ledger.messages import SampleKey  # noqa: E402
from relax_rt.transport.rpc.errors import RelaxError  # noqa: E402

TEMPERATURE = 0.8


def frozen(model_dir: Path, budget: int = 4096, dtype: str = "float32") -> FrozenModel:
    return FrozenModel(model_dir, dtype=dtype, threads=1, budget=budget, temperature=TEMPERATURE)


@pytest.mark.parametrize("budget", [4096, 7])
def test_log_probabilities_are_those_of_each_sequence_alone(model_dir: Path, budget: int) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    told: list[int] = []
    found = frozen(model_dir, budget).log_probabilities(SAMPLES, told.append)
    for sample, values in zip(SAMPLES, found, strict=True):
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            every = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)
        alone = np.concatenate([[0.0], every.gather(-1, ids[1:, None])[:, 0].numpy()]) * sample.loss_mask
        assert values.dtype == np.float32 and values.shape == sample.tokens.shape
        np.testing.assert_allclose(values, alone, atol=2e-6)
        assert not values[sample.loss_mask == 0].any()
    assert (len(told) > 3) == (budget == 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_policy_that_has_not_moved_has_no_distance(model_dir: Path, dtype: str) -> None:
    trainer = TorchBackend(
        model_dir,
        AlgorithmTable(learning_rate=1e-2),
        dtype=dtype,
        threads=1,
        tokens_per_micro_batch=64,
        temperature=TEMPERATURE,
        on_progress=lambda _: None,
    )
    reference = frozen(model_dir, 64, dtype).log_probabilities(SAMPLES)
    for ours, theirs in zip(trainer.log_probabilities(SAMPLES), reference, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    trainer.step(SAMPLES, 1)
    moved = trainer.log_probabilities(SAMPLES)
    assert max(np.abs(a - b).max() for a, b in zip(moved, reference, strict=True)) > 1e-3


class Leased(dict[str, Any]):
    """A sample on lease."""

    def __init__(self, key: SampleKey, sample: Sample) -> None:
        columns = ("tokens", "loss_mask", "behaviour_logprobs")
        super().__init__({name: getattr(sample, name) for name in columns})
        self.key, self.meta, self.versions, self.masked = key, sample.meta, sample.versions, list[tuple[int, int]]()

    def decode(self, name: str, type_: Any) -> Any:
        assert (name, type_) == ("meta", SampleMeta)
        return self.meta


class Leases(list[Leased]):
    """A batch."""

    waiting_on = "no sample is ready"

    @property
    def samples(self) -> list[Leased]:
        return self


@dataclasses.dataclass
class Queue:
    """Gives out batches, then asks the role to stop."""

    batches: list[Leases]
    stopping: asyncio.Event
    completed: list[tuple[dict[SampleKey, Any], list[Any]]] = dataclasses.field(default_factory=list)

    async def __aenter__(self) -> Queue:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def lease(self, task: str, *, samples: int, groups: int, wait_s: float) -> Leases:
        assert task == "reference"
        if not self.batches:
            self.stopping.set()
            await asyncio.sleep(wait_s)
        return self.batches.pop(0)

    async def complete(self, batch: Leases, columns: Any, failures: Any) -> None:
        self.completed.append((columns, failures))


async def judged(model: FrozenModel, *batches: list[Sample]) -> tuple[Queue, list[dict[str, Any]]]:
    """What the role completes, and its metrics."""
    tables = {"run": {"name": "r"}, "model": {"path": "m"}, "data": {"task": "t"}, "reward": {"function": "f:f"}}
    metrics: list[dict[str, Any]] = []

    async def ready() -> None:
        return None

    ctx = SimpleNamespace(
        config=RLConfig.model_validate(tables),
        settings=ReferenceSettings(),
        who=SimpleNamespace(slot="reference/0"),
        stopping=asyncio.Event(),
        progress=SimpleNamespace(advance=lambda *_: None, waiting=lambda _: None),
        log=SimpleNamespace(warning=lambda *_, **__: None),
        event=lambda *_, **__: None,
        metrics=metrics.append,
        ready=ready,
    )
    role = ReferenceRole(ctx)  # type: ignore[arg-type]
    leases = [Leases(Leased(SampleKey(n, i), s) for i, s in enumerate(batch)) for n, batch in enumerate(batches)]
    role.model, role.queue = model, (queue := Queue(leases, ctx.stopping))  # type: ignore[assignment]
    async with asyncio.timeout(120):
        await role.run()
    return queue, metrics


async def test_the_role_puts_the_column_and_fails_what_it_cannot_judge(model_dir: Path) -> None:
    model = frozen(model_dir)
    foreign = copy.deepcopy(SAMPLES[2])
    foreign.tokens[5] = model.vocabulary
    queue, metrics = await judged(model, [SAMPLES[0], foreign, SAMPLES[5]], [])
    ((columns, failures),) = queue.completed
    wanted = model.log_probabilities([SAMPLES[0], SAMPLES[5]])
    assert list(columns) == [SampleKey(0, 0), SampleKey(0, 2)]
    for values, column in zip(wanted, columns.values(), strict=True):
        np.testing.assert_allclose(column["reference_logprobs"], values, atol=1e-6)
    assert [failure.key for failure in failures] == [SampleKey(0, 1)]
    assert "token 64 is not in the reference's vocabulary of 64" in failures[0].reason
    (record,) = metrics
    trained = int(sum(s.loss_mask.sum() for s in (SAMPLES[0], SAMPLES[5])))
    assert (record["samples"], record["failed"], record["tokens"]) == (2, 1, trained)
    assert record["mean_logprob"] == pytest.approx(sum(float(v.sum()) for v in wanted) / trained, abs=1e-5)


async def test_a_broken_model_ends_the_role_after_its_samples_failed(model_dir: Path) -> None:
    model = frozen(model_dir)
    with torch.no_grad():
        model._model.get_input_embeddings().weight[:] = float("nan")
    batches = [[SAMPLES[0]] * 16 for _ in range(FAILURES_IN_A_ROW // 16 + 1)]
    with pytest.raises(RelaxError, match=f"could not judge {FAILURES_IN_A_ROW} samples in a row.*not finite"):
        await judged(model, *batches)
