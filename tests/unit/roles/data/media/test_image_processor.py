"""A model's own processor, and models that are computed otherwise than here."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_vision import PLACES, SIDE, encoded_image, tokenizer

pytest.importorskip("torch")
pytest.importorskip("PIL")


from relax_rt.config.loader import load_config
from relax_rt.roles.config.model_checks import check_images
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.media.image_processor import ImageProcessor, has_vision, load_image_processor
from relax_rt.roles.data.media.images import ImageSpan
from relax_rt.roles.training.backend.settings import CriticSettings, LoraTable, ReferenceSettings
from relax_rt.transport.rpc.errors import Refused, RelaxError


@pytest.fixture(scope="module")
def image_processor(seeing: Path) -> ImageProcessor:
    found = load_image_processor(seeing)
    assert found is not None
    return found


def test_a_image_becomes_the_processors_tokens_and_tensors(image_processor: ImageProcessor) -> None:
    looked = image_processor.process(encoded_image(1))
    place = tokenizer().convert_tokens_to_ids("<image>")
    assert (
        image_processor.placeholder == place
        and looked.tokens == (place,) * PLACES
        and looked.slots.tolist() == [*range(PLACES)]
    )
    assert {name: tuple(one.shape) for name, one in looked.inputs.items()} == {"pixel_values": (1, 3, SIDE, SIDE)}
    assert (
        image_processor.process(encoded_image(1)) is looked
        and image_processor.process(encoded_image(2)).digest != looked.digest
    )


def test_what_is_kept_of_images_is_bounded(image_processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    first = image_processor.process(encoded_image(100))
    monkeypatch.setattr("relax_rt.roles.data.media.image_processor.CACHE_BYTES", 3 * first.nbytes + 1000)
    for number in range(101, 110):
        image_processor.process(encoded_image(number))
    assert (
        sum(one.nbytes for one in image_processor._cache.values()) == image_processor._bytes <= 3 * first.nbytes + 1000
    )
    again = image_processor.process(encoded_image(100))
    assert again is not first and (again.inputs["pixel_values"] == first.inputs["pixel_values"]).all()


def test_images_must_stand_where_they_are_said_to(image_processor: ImageProcessor) -> None:
    data, place = encoded_image(1), image_processor.placeholder
    prompt = [5, *[place] * PLACES, 6]
    image_processor.check(prompt, [ImageSpan(1, 1 + PLACES, data)])
    for start, end in ((0, PLACES), (2, 2 + PLACES), (1, PLACES), (5, 5), (9, 4), (1, 90)):
        with pytest.raises(Refused, match="image in a prompt"):
            image_processor.check(prompt, [ImageSpan(start, end, data)])
    with pytest.raises(Refused, match="at most 64"):
        image_processor.check(prompt, [ImageSpan(1, 1 + PLACES, data)] * 65)
    with pytest.raises(Refused, match="cannot be read"):
        image_processor.check(prompt, [ImageSpan(1, 1 + PLACES, b"no image")])


def test_models_that_read_text_alone_have_no_sight(tmp_path: Path) -> None:
    assert not has_vision(tmp_path) and load_image_processor(tmp_path) is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert not has_vision(tmp_path)


def test_a_folder_without_its_processor_is_told(seeing: Path, tmp_path: Path) -> None:
    shutil.copyfile(seeing / "config.json", tmp_path / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(seeing / name, tmp_path / name)
    with pytest.raises(RelaxError, match="the processor of"):
        load_image_processor(tmp_path)


def test_a_model_that_gives_other_logits_with_images_is_refused(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from relax_rt.roles.data.media.vision_tower import VisionTower, load_vision_model

    load_vision_model(seeing, dtype=torch.float32, attention="sdpa")
    embed = VisionTower.embed

    def askew(vision_tower: VisionTower, ids: torch.Tensor, images: object) -> torch.Tensor:
        return embed(vision_tower, ids, [image._replace(first=image.first + PLACES) for image in images])  # type: ignore[attr-defined]

    monkeypatch.setattr(VisionTower, "embed", askew)
    with pytest.raises(Refused, match="with an image its logits differ"):
        load_vision_model(seeing, dtype=torch.float32, attention="sdpa")


RUN = """
[run]
name = "x"
[model]
path = "model"
[roles.env]
environment = "game.py:Game"
tasks = 10
max_tokens = 64
media_kib = 4
[sampling]
max_new_tokens = 4
[algorithm]
group_size = 2
prompts_per_step = 1
steps = 1
max_staleness = 0
[checkpoint]
every_steps = 1
[queue]
capacity_mib = 16
slab_mib = 2
"""


@pytest.mark.parametrize(
    ("role", "changes", "why"),
    [
        ("rollout", {"engine": "sglang"}, "not handed on to SGLang"),
        ("trainer", {"backend": "megatron"}, "compute texts alone"),
        ("trainer", {"count": 2}, "trained in one process"),
        ("trainer", {"lora": LoraTable(rank=4)}, "adapters to such a model"),
        ("reference", {}, "without the images"),
        ("critic", {}, "without the images"),
        ("env", {"media_kib": 16_384}, "capacity_mib"),
    ],
)
def test_what_does_not_go_with_images_is_refused_by_name(
    seeing: Path, tmp_path: Path, role: str, changes: dict[str, Any], why: str
) -> None:
    (tmp_path / "roles.toml").write_text(RUN)
    config = load_config(tmp_path / "roles.toml")
    assert isinstance(config, RLConfig) and list(check_images(config, seeing)) == []
    table = config.roles.get(role) or {"reference": ReferenceSettings, "critic": CriticSettings}[role]()
    config.roles[role] = table.model_copy(update=changes)
    (problem,) = check_images(config, seeing)
    assert why in problem.message and problem.path[1] == role
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    assert list(check_images(config, tmp_path)) == [], "a model of texts may"
