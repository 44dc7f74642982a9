"""The model's side of pictures: their features, in the places of their placeholders, before the text's layers.

Features go where a picture was put, and not where a token looks like a placeholder: a policy may sample that token, and
then it is a token like others, for the engine and for the trainer.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relax_rt.roles.data.media.image_processor import (
    FAMILIES,
    TENSORS,
    ImageProcessor,
    ProcessedImage,
    load_image_processor,
)
from relax_rt.roles.data.media.pictures import BatchImage, ImageSpan
from relax_rt.roles.models.forward import CLOSE, PROBE_TOKENS, not_computed
from relax_rt.transport.rpc.errors import Refused

PROBE_SIZE = (48, 40)


class VisionTower:
    """Embeds tokens and pictures.

    Attributes:
        layers: of the text: given embeddings, they need no ids.
    """

    def __init__(self, model: Any, image_processor: ImageProcessor) -> None:
        self._model, self.image_processor = model, image_processor
        self.layers: Any = model.get_decoder()

    def embed(self, ids: torch.Tensor, images: Collection[BatchImage]) -> torch.Tensor:
        """What the layers are given for ids int64 [rows, L] in which pictures stand; [rows, L, hidden]."""
        found: torch.Tensor = self._model.get_input_embeddings()(ids)
        if not images:
            return found
        looked = {image.shown.data: self.image_processor.process(image.shown.data) for image in images}
        features = self._features(looked)
        rows: list[np.ndarray] = []
        columns: list[np.ndarray] = []
        values: list[torch.Tensor] = []
        for row, shown, first, last, offset in images:
            at = shown.start + looked[shown.data].slots
            there = np.flatnonzero((at >= first) & (at < last))
            rows.append(np.full(len(there), row))
            columns.append(at[there] + offset)
            values.append(features[shown.data][torch.from_numpy(there).to(ids.device)])
        places = tuple(torch.from_numpy(np.concatenate(part)).to(ids.device) for part in (rows, columns))
        return found.index_put(places, torch.cat(values).to(found.dtype))

    def freeze(self) -> None:
        """What makes features of pictures is not trained: only the text's layers and its output layer are."""
        trained = {id(one) for part in (self.layers, self._model.get_output_embeddings()) for one in part.parameters()}
        for parameter in self._model.parameters():
            parameter.requires_grad_(id(parameter) in trained)

    def _features(self, looked: dict[bytes, ProcessedImage]) -> dict[bytes, torch.Tensor]:
        """Compute the features of each picture, [slots, hidden]; pictures of one size form one batch."""
        together: dict[Any, list[ProcessedImage]] = {}
        for one in looked.values():
            alone = set(one.inputs) != {TENSORS} or len(one.inputs[TENSORS]) != 1
            together.setdefault(one.digest if alone else one.inputs[TENSORS].shape, []).append(one)
        found: dict[bytes, torch.Tensor] = {}
        for some in together.values():
            inputs = some[0].inputs if len(some) == 1 else {TENSORS: torch.cat([one.inputs[TENSORS] for one in some])}
            made = self._computed(inputs)
            for one, features in zip(some, [torch.cat(made)] if len(some) == 1 else made, strict=True):
                if len(features) != len(one.slots):
                    why = f"{len(one.slots)} places are kept for it, and the model makes {len(features)} of it"
                    raise Refused("a picture", why=why, hint="processor and model must belong together")
                found[one.data] = features
        return found

    def _computed(self, inputs: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """One tensor [n, hidden] for each picture, or part of one."""
        made = self._model.get_image_features(**self.given(inputs), return_dict=True).pooler_output
        return [one.reshape(-1, one.shape[-1]) for one in made]

    def given(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of pictures as the model takes them: where it is, and in its dtype."""
        weight = self._model.get_input_embeddings().weight
        return {
            name: one.to(weight.device, weight.dtype if one.is_floating_point() else one.dtype)
            for name, one in inputs.items()
        }


def load_vision_model(folder: Path, *, dtype: torch.dtype, attention: str) -> tuple[Any, VisionTower]:
    """A model that sees, in evaluation mode, and its eyes.

    Args:
        attention: implementation of the text's layers, by the name that transformers knows it by.

    Raises:
        Refused: it is not computed whole here. RelaxError: its processor cannot be loaded.
    """
    from transformers import AutoModelForImageTextToText

    image_processor = load_image_processor(folder)
    assert image_processor is not None
    # The tower's attention is not causal, and is nobody's but its own.
    chosen = {"": "sdpa", "text_config": attention, "vision_config": "sdpa"}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation=chosen).eval()
    vision_tower = VisionTower(model, image_processor)
    check_vision_model(model, folder, vision_tower)
    return model, vision_tower


def check_vision_model(model: Any, folder: Path, vision_tower: VisionTower) -> None:
    """Refuse a model that gives other logits than its parts do as they are used here.

    Raises:
        Refused: with what would be left out.
    """
    text = model.config.get_text_config()
    if why := not_computed(text):
        raise _refused(folder, why)
    looked = vision_tower.image_processor.process(probe())
    half = PROBE_TOKENS // 2
    words = [token for token in range(PROBE_TOKENS + 1) if token != vision_tower.image_processor.placeholder][
        :PROBE_TOKENS
    ]
    device = next(model.parameters()).device
    ids = torch.tensor([[*words[:half], *looked.tokens, *words[half:]]], device=device)
    image = BatchImage(0, ImageSpan(half, half + len(looked.tokens), looked.data), 0, ids.shape[1], 0)
    with torch.no_grad():
        whole = model(input_ids=ids, **vision_tower.given(looked.inputs), use_cache=False).logits
        positions = torch.arange(ids.shape[1], device=device)[None]
        embedded = vision_tower.embed(ids, [image])
        hidden = vision_tower.layers(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state
        ours = model.get_output_embeddings()(hidden)
    gap, most = float((whole - ours).abs().max()), float(whole.abs().max())
    if not gap <= CLOSE * most:
        raise _refused(folder, f"with a picture its logits differ by {gap:.3g} (of {most:.3g}) from those of its parts")


def probe() -> bytes:
    """A small picture, encoded."""
    from PIL import Image

    width, height = PROBE_SIZE
    pixels = (np.arange(height * width * 3) * 7 % 256).astype(np.uint8).reshape(height, width, 3)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG")
    return held.getvalue()


def _refused(folder: Path, why: str) -> Refused:
    hint = f"use a model of one of the families {', '.join(sorted(FAMILIES))} whose text has full attention"
    return Refused(f"the model in {folder}", why=why, hint=hint)
