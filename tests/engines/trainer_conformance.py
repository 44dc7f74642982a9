"""An engine beside the trainer: both give the same tokens the same log-probabilities, at each version of a sequence.

A test module imports it as it does `conformance`, and gives the fixture `driver`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from harness import Driver, MemorySource, model_of
from numpy.typing import NDArray

from relax_rt.roles.base.sample import Sample, bare_meta
from relax_rt.roles.rollout.engines.base import Completion, GroupRequest
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.queue.ledger.messages import VersionSpan

TEMPERATURE = 0.8
"""One for all: a trainer has one."""
APART = 0.1
"""What a mistaken version must show by at least in the log-probability of some token."""


def sample_of(request: GroupRequest, member: int, completion: Completion) -> Sample:
    """A completion as a rollout hands it to the trainer."""
    before, after = len(request.prompt), len(completion.tokens)
    length = before + after
    logprobs = np.array([0.0] * before + completion.logprobs, np.float32)
    return Sample(
        meta=bare_meta(request.id, member),
        tokens=np.array([*request.prompt, *completion.tokens], np.int32),
        loss_mask=np.array([0] * before + [1] * after, np.uint8),
        behaviour_logprobs=logprobs,
        versions=[VersionSpan(before + s.start, before + s.end, s.version, s.kv_version) for s in completion.versions],
        advantages=np.zeros(length, np.float32),
    )


def by_trainer(folder: Path, version: int, samples: Sequence[Sample], into: Path) -> list[NDArray[np.float32]]:
    """Log-probabilities of a trainer that holds the weights of a version: publishing, it gives engines these bytes."""
    from relax_rt.roles.training.torch.backend import TorchBackend

    model_of(folder, version).save_pretrained(into)
    trainer = TorchBackend(
        into,
        AlgorithmTable(),
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=1024,
        temperature=TEMPERATURE,
        on_progress=lambda _: None,
    )
    published = bytearray(trainer.layout("float32").nbytes)
    trainer.export(memoryview(published), "float32")
    assert published == MemorySource(folder, version).data
    return trainer.log_probabilities(samples)


def gap(found: NDArray[np.float32], sample: Sample, span: VersionSpan) -> float:
    """How far log-probabilities of a sample are from those that it was sampled with, over a span."""
    return float(np.abs(sample.behaviour_logprobs - found)[span.start : span.end].max())


def worst(samples: Sequence[Sample], trainers: dict[int, list[NDArray[np.float32]]]) -> float:
    """The largest gap between a token's behaviour log-probability and that of the trainer at the token's version."""
    return max(
        gap(trainers[span.version][index], sample, span)
        for index, sample in enumerate(samples)
        for span in sample.versions
    )


def displaced(sample: Sample, by: int) -> Sample:
    """The same with each change of version said to have been so many tokens later."""
    spans = list(sample.versions)
    for at, (one, other) in enumerate(itertools.pairwise(sample.versions)):
        spans[at] = msgspec.structs.replace(spans[at], end=one.end + by)
        spans[at + 1] = msgspec.structs.replace(spans[at + 1], start=other.start + by)
    return msgspec.structs.replace(sample, versions=spans)


async def publish(driver: Driver) -> int:
    """Have the engine swap to a next version."""
    source = driver.source()
    await driver.engine.prepare(source)
    await driver.engine.commit(source.record, "recompute")
    return source.record.version


async def test_engine_and_trainer_agree_at_each_version_of_a_sequence(driver: Driver, tmp_path: Path) -> None:
    asked = [
        driver.request([7, 8, 9], 3, new=240, stop_ids=frozenset(), temperature=TEMPERATURE),
        driver.request(range(20, 60), 2, new=200, stop_ids=frozenset(), temperature=TEMPERATURE),
        driver.request([3], 1, new=300, stop_ids=frozenset(), temperature=TEMPERATURE),
    ]
    versions = [await publish(driver)]
    driver.submit(*asked)
    for _ in range(3):
        await driver.tokens(120)
        versions.append(await publish(driver))
    done = await driver.finished(*asked)
    members = [(request, member) for request in asked for member in range(len(request.seeds))]
    samples = [sample_of(*place, completion) for place, completion in zip(members, done, strict=True)]
    for sample in samples:
        assert [(s.version, s.kv_version) for s in sample.versions] == [(v, v) for v in versions]

    trainers = {v: by_trainer(driver.folder, v, samples, tmp_path / str(v)) for v in versions}
    assert worst(samples, trainers) <= driver.traits.tolerance
    # Not in vain: any span that were said to be of another version would show, and changes of version a token off.
    for index, sample in enumerate(samples):
        for span in sample.versions:
            for other in set(versions) - {span.version}:
                assert gap(trainers[other][index], sample, span) > APART
    for by in (-1, 1):
        assert worst([displaced(sample, by) for sample in samples], trainers) > APART
