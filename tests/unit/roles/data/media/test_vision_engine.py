"""An engine and a trainer of a model that sees: both compute with the images, and agree."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
from harness import Driver, Traits, model_of, torch
from tiny_vision import PLACES, encoded_image
from trainer_conformance import APART, TEMPERATURE, by_trainer, publish, sample_of, worst

from relax_rt.roles.base.sample import Sample
from relax_rt.roles.data.media.image_processor import ImageProcessor, load_image_processor
from relax_rt.roles.data.media.images import ImageSpan
from relax_rt.roles.rollout.engines.base import Completion, GroupRequest, Partial
from relax_rt.roles.rollout.engines.decoder import Decoder
from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine
from relax_rt.roles.rollout.engines.kv_cache import Fill
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.settings import LoraTable
from relax_rt.roles.training.batch.collate import collate
from relax_rt.roles.training.batch.rows import Costs, shared_rows
from relax_rt.roles.training.checkpoints.store import TOKENIZER_FILES
from relax_rt.roles.training.torch.backend import TorchBackend
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused

pytest.importorskip("PIL")
NEVER: frozenset[int] = frozenset()


@pytest.fixture(scope="module")
def image_processor(seeing: Path) -> ImageProcessor:
    found = load_image_processor(seeing)
    assert found is not None
    return found


@pytest_asyncio.fixture
async def driver(seeing: Path) -> AsyncIterator[Driver]:
    traits = Traits()
    engine = EmbeddedEngine(seeing, dtype="float32", max_sequences=traits.members, threads=1)
    yield await Driver(engine, seeing, traits).start()
    await engine.close(10.0)


def prompt_of(image_processor: ImageProcessor, *parts: int | bytes) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Tokens and images, as they are given."""
    tokens: list[int] = []
    media: list[ImageSpan] = []
    for one in parts:
        if isinstance(one, int):
            tokens.append(one)
        else:
            looked = image_processor.process(one)
            media.append(ImageSpan(len(tokens), len(tokens) + len(looked.tokens), one))
            tokens += looked.tokens
    return tokens, tuple(media)


def asked(
    driver: Driver, image_processor: ImageProcessor, *parts: int | bytes, n: int = 2, new: int = 12, **rest: Any
) -> GroupRequest:
    tokens, media = prompt_of(image_processor, *parts)
    values = {"stop_ids": NEVER, "temperature": TEMPERATURE, "media": media, **rest}
    return driver.request(tokens, n, new=new, **values)


def by_transformers(
    driver: Driver,
    image_processor: ImageProcessor,
    request: GroupRequest,
    tokens: Sequence[int],
    images: Sequence[bytes],
) -> np.ndarray:
    """Log-probabilities of a completion by a plain forward pass of the model with these images."""
    ids = torch.tensor([[*request.prompt, *tokens]])
    seen = (
        {"pixel_values": torch.cat([image_processor.process(one).inputs["pixel_values"] for one in images])}
        if images
        else {}
    )
    with torch.no_grad():
        logits = model_of(driver.folder, driver.version)(input_ids=ids, **seen).logits[0, len(request.prompt) - 1 : -1]
    chosen = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    return np.asarray(chosen)


def plain(image_processor: ImageProcessor, done: Sequence[Completion]) -> list[Completion]:
    """Those in which no placeholder was sampled, which transformers takes for an image."""
    found = [one for one in done if image_processor.placeholder not in one.tokens]
    assert len(found) >= len(done) / 2
    return found


async def test_tokens_are_sampled_from_what_the_model_makes_of_the_images(
    driver: Driver, image_processor: ImageProcessor
) -> None:
    await publish(driver)
    images = [encoded_image(n) for n in range(4)]
    requests = [
        asked(driver, image_processor, 7, images[0], 8, 9),
        asked(driver, image_processor, images[1], 20, 21, images[2]),
        asked(driver, image_processor, 7, images[3], 8, 9),
        asked(driver, image_processor, 7, 8, 9),
    ]
    await driver.complete(*requests)
    for request in requests:
        seen = [one.data for one in request.media]
        for one in plain(image_processor, [driver.done[request.id, member] for member in range(2)]):
            assert one.logprobs == pytest.approx(
                by_transformers(driver, image_processor, request, one.tokens, seen), abs=1e-4
            )
            if seen:
                others = by_transformers(
                    driver, image_processor, request, one.tokens, [encoded_image(50), encoded_image(51)][: len(seen)]
                )
                assert np.abs(others - one.logprobs).max() > APART, "the images make no difference"


async def test_prompts_are_shared_as_far_as_tokens_and_images_are_alike(
    driver: Driver, image_processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled: list[int] = []
    whole = Decoder._fill_pass

    def counted(decoder: Decoder, fills: list[Fill]) -> object:
        filled.extend(len(one.tokens) for one in fills)
        return whole(decoder, fills)

    monkeypatch.setattr(Decoder, "_fill_pass", counted)

    async def computed(*parts: int | bytes) -> int:
        """Positions computed for a group with this prompt; its log-probabilities are right."""
        filled.clear()
        request = asked(driver, image_processor, *parts, n=3)
        done = await driver.complete(request)
        seen = [one.data for one in request.media]
        for one in plain(image_processor, done):
            assert one.logprobs == pytest.approx(
                by_transformers(driver, image_processor, request, one.tokens, seen), abs=1e-4
            )
        return sum(filled)

    one, other = encoded_image(1), encoded_image(2)
    assert await computed(5, 6, one, 7) == 3 + PLACES
    assert await computed(5, 6, other, 7) == 1 + PLACES, "the tokens are alike, the images are not"
    assert await computed(5, 6, one, 7, 8) == 1
    assert await computed(5, 6, one, 9, other, 7) == 2 + PLACES
    # A prompt that ends with an image: a part of it is computed again, to sample from.
    assert await computed(5, 6, one) == 1


async def test_engine_and_trainer_agree_at_each_version_of_a_sequence(
    driver: Driver, image_processor: ImageProcessor, tmp_path: Path
) -> None:
    one, other = encoded_image(1), encoded_image(2)
    requests = [
        asked(driver, image_processor, 7, one, 8, n=3, new=120),
        asked(driver, image_processor, 7, other, 8, n=2, new=100),
        asked(driver, image_processor, one, 9, other, one, n=2, new=140),
    ]
    versions = [await publish(driver)]
    driver.submit(*requests)
    for _ in range(2):
        await driver.tokens(80)
        versions.append(await publish(driver))
    await driver.finished(*requests)
    samples = samples_of(driver, requests)
    assert {(s.version, s.kv_version) for sample in samples for s in sample.versions} == {(v, v) for v in versions}
    assert any(image_processor.placeholder in sample.tokens[sample.prompt_length :] for sample in samples), (
        "none was sampled"
    )
    blind = [msgspec.structs.replace(sample, media=changed(sample.media)) for sample in samples]
    trainers, wrong = {}, {}
    for version in versions:
        into = tmp_path / str(version)
        copy_processor(driver.folder, into)
        trainers[version] = by_trainer(driver.folder, version, samples, into)
        wrong[version] = by_trainer(driver.folder, version, blind, into)
    assert worst(samples, trainers) <= driver.traits.tolerance
    assert worst(samples, wrong) > APART, "with other images it would show"


def samples_of(driver: Driver, requests: Sequence[GroupRequest]) -> list[Sample]:
    """Completions as a rollout would hand them to the trainer, images and all."""
    return [
        msgspec.structs.replace(sample_of(request, member, driver.done[request.id, member]), media=list(request.media))
        for request in requests
        for member in range(len(request.seeds))
    ]


def changed(media: Sequence[ImageSpan]) -> list[ImageSpan]:
    return [ImageSpan(one.start, one.end, encoded_image(90 + number)) for number, one in enumerate(media)]


def copy_processor(folder: Path, into: Path) -> None:
    into.mkdir()
    for pattern in TOKENIZER_FILES:
        for path in folder.glob(pattern):
            shutil.copyfile(path, into / path.name)


async def test_a_placeholder_that_was_sampled_is_a_token_like_others(
    driver: Driver, image_processor: ImageProcessor
) -> None:
    tokens = (9, image_processor.placeholder, 10, image_processor.placeholder)
    had = Partial(tokens, (-1.0,) * len(tokens), (VersionSpan(0, len(tokens), 0, 0),))
    request = asked(driver, image_processor, 7, encoded_image(1), 8, n=1, new=16, partials=(had,))
    (done,) = await driver.complete(request)
    (sample,) = samples_of(driver, [request])
    found = trainer(driver.folder).log_probabilities([sample])[0][len(request.prompt) :]
    assert done.tokens[:4] == list(tokens)
    assert found[4:] == pytest.approx(done.logprobs[4:], abs=1e-4)


def trainer(folder: Path, **settings: Any) -> TorchBackend:
    return TorchBackend(
        folder,
        AlgorithmTable(learning_rate=1e-2),
        dtype="float32",
        threads=1,
        tokens_per_micro_batch=256,
        temperature=TEMPERATURE,
        on_progress=lambda _: None,
        **settings,
    )


async def test_members_of_a_group_share_a_row_only_with_the_same_images(
    driver: Driver, image_processor: ImageProcessor
) -> None:
    requests = [asked(driver, image_processor, 7, encoded_image(n), 8) for n in (1, 2)]
    await driver.complete(*requests)
    first, second, third, fourth = samples_of(driver, requests)
    group = [
        msgspec.structs.replace(one, meta=msgspec.structs.replace(one.meta, group=1))
        for one in (first, second, third, fourth)
    ]
    assert (group[0].tokens[:18] == group[2].tokens[:18]).all()
    rows = shared_rows(group, 1 << 20)
    assert [[index for index, _ in row.members] for row in rows] == [[0, 1], [2, 3]]
    assert [(image.row, image.span.data) for image in collate(rows).images] == [
        (0, encoded_image(1)),
        (1, encoded_image(2)),
    ]
    made = trainer(driver.folder)
    assert made.costs is not None
    for costs in (None, Costs(pair=1e6, call=0.0)):  # beside each other, padded; one behind the other
        made.costs = costs
        for sample, values in zip(group, made.log_probabilities(group), strict=True):
            assert values == pytest.approx(sample.behaviour_logprobs, abs=1e-4)
    assert [image.offset for image in collate(rows, costs=Costs(pair=1e6, call=0.0)).images] == [0, rows[0].length]


async def test_a_step_trains_the_text_and_a_checkpoint_sees(
    driver: Driver, image_processor: ImageProcessor, tmp_path: Path
) -> None:
    request = asked(driver, image_processor, 7, encoded_image(1), 8, 9, encoded_image(2), n=4)
    await driver.complete(request)
    samples = samples_of(driver, [request])
    for number, sample in enumerate(samples):
        sample.advantages = np.where(sample.loss_mask, 1.0 if number % 2 else -1.0, 0.0).astype(np.float32)
    backend = trainer(driver.folder)
    before = {piece.name: piece.values.detach().clone() for piece in backend.weights.published}
    result = backend.step(samples, 1)
    assert result.applied and np.isfinite(result.loss)
    moved = {p.name for p in backend.weights.published if not torch.equal(before[p.name], p.values)}
    assert moved and all(name.startswith("model.language_model.") for name in moved), moved
    after = backend.log_probabilities(samples)
    gains = [float((new - s.behaviour_logprobs)[s.loss_mask > 0].sum()) for new, s in zip(after, samples, strict=True)]
    assert gains[1] + gains[3] > gains[0] + gains[2]

    folder = tmp_path / "checkpoint"
    folder.mkdir()
    backend.snapshot()
    backend.write(folder)
    fresh = trainer(folder)
    fresh.restore(folder)
    for one, other in zip(fresh.log_probabilities(samples), after, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


async def test_what_an_engine_cannot_compute_it_refuses(driver: Driver, image_processor: ImageProcessor) -> None:
    request = asked(driver, image_processor, 7, encoded_image(1), 8)
    askew = msgspec.structs.replace(request, media=(ImageSpan(0, PLACES, encoded_image(1)),))
    torn = msgspec.structs.replace(request, media=(ImageSpan(1, 1 + PLACES, b"no image"),))
    for wrong in (askew, torn):
        with pytest.raises(Refused, match="image"):
            driver.engine.submit([wrong])
    await driver.complete(request)


async def test_an_engine_of_a_text_refuses_images_by_name(tmp_path: Path, image_processor: ImageProcessor) -> None:
    from harness import build_model

    engine = EmbeddedEngine(build_model(tmp_path), dtype="float32", max_sequences=2, threads=1)
    driver = await Driver(engine, tmp_path, Traits()).start()
    try:
        with pytest.raises(Refused, match="1 images: this engine takes tokens only"):
            driver.engine.submit([asked(driver, image_processor, 7, encoded_image(1), 8)])
    finally:
        await engine.close(10.0)


@pytest.mark.parametrize("settings", [{"lora": LoraTable()}, {"ranks": SimpleNamespace(rank=0)}])
def test_what_is_not_trained_is_refused_by_name(seeing: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="a model that sees is not trained by"):
        trainer(seeing, **settings)
