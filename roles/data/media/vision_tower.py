"""Embeds images: their features replace the placeholders before the text's layers.

Features go to the spans of images, not to all placeholder tokens: a policy may sample that token, and then it is a
token like others, for the engine and for the trainer.
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
from relax_rt.roles.data.media.images import BatchImage, ImageSpan
from relax_rt.roles.models.forward import LOGITS_TOLERANCE, PROBE_TOKENS, unsupported_reason
from relax_rt.transport.rpc.errors import Refused

PROBE_SIZE = (48, 40)


class VisionTower:
    """Embeds tokens and images.

    Attributes:
        layers: the text's layers, which take embeddings instead of ids.
    """

    def __init__(self, model: Any, image_processor: ImageProcessor) -> None:
        self._model, self.image_processor = model, image_processor
        self.layers: Any = model.get_decoder()

    def embed(self, ids: torch.Tensor, images: Collection[BatchImage]) -> torch.Tensor:
        """Return the embeddings [rows, L, hidden] of ids int64 [rows, L] with images."""
        found: torch.Tensor = self._model.get_input_embeddings()(ids)
        if not images:
            return found
        processed = {image.span.data: self.image_processor.process(image.span.data) for image in images}
        features = self._features(processed)
        rows: list[np.ndarray] = []
        columns: list[np.ndarray] = []
        values: list[torch.Tensor] = []
        for row, span, first, last, offset in images:
            at = span.start + processed[span.data].slots
            there = np.flatnonzero((at >= first) & (at < last))
            rows.append(np.full(len(there), row))
            columns.append(at[there] + offset)
            values.append(features[span.data][torch.from_numpy(there).to(ids.device)])
        places = tuple(torch.from_numpy(np.concatenate(part)).to(ids.device) for part in (rows, columns))
        return found.index_put(places, torch.cat(values).to(found.dtype))

    def freeze(self) -> None:
        """Exclude the vision tower from training: only the text's layers and its output layer are trained."""
        trained = {id(one) for part in (self.layers, self._model.get_output_embeddings()) for one in part.parameters()}
        for parameter in self._model.parameters():
            parameter.requires_grad_(id(parameter) in trained)

    def _features(self, processed: dict[bytes, ProcessedImage]) -> dict[bytes, torch.Tensor]:
        """Compute the features of each image, [slots, hidden]; images of one size form one batch."""
        together: dict[Any, list[ProcessedImage]] = {}
        for one in processed.values():
            alone = set(one.inputs) != {TENSORS} or len(one.inputs[TENSORS]) != 1
            together.setdefault(one.digest if alone else one.inputs[TENSORS].shape, []).append(one)
        found: dict[bytes, torch.Tensor] = {}
        for some in together.values():
            inputs = some[0].inputs if len(some) == 1 else {TENSORS: torch.cat([one.inputs[TENSORS] for one in some])}
            # One tensor [n, hidden] for each image, or part of one.
            output = self._model.get_image_features(**self.model_inputs(inputs), return_dict=True).pooler_output
            made = [one.reshape(-1, one.shape[-1]) for one in output]
            for one, features in zip(some, [torch.cat(made)] if len(some) == 1 else made, strict=True):
                if len(features) != len(one.slots):
                    why = f"it has {len(one.slots)} placeholder tokens, and the model computes {len(features)} features"
                    raise Refused("an image", why=why, hint="processor and model must belong together")
                found[one.data] = features
        return found

    def model_inputs(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return input tensors on the model's device and in its dtype."""
        weight = self._model.get_input_embeddings().weight
        return {
            name: one.to(weight.device, weight.dtype if one.is_floating_point() else one.dtype)
            for name, one in inputs.items()
        }


def load_vision_model(folder: Path, *, dtype: torch.dtype, attention: str) -> tuple[Any, VisionTower]:
    """Load a model that takes images, in evaluation mode, and its vision tower.

    Args:
        attention: implementation of the text's layers, as transformers names it.

    Raises:
        Refused: it has parts that are not computed here. RelaxError: its processor cannot be loaded.
    """
    from transformers import AutoModelForImageTextToText

    image_processor = load_image_processor(folder)
    assert image_processor is not None
    # The vision tower's attention is not causal.
    chosen = {"": "sdpa", "text_config": attention, "vision_config": "sdpa"}
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation=chosen).eval()
    vision_tower = VisionTower(model, image_processor)
    check_vision_model(model, folder, vision_tower)
    return model, vision_tower


def check_vision_model(model: Any, folder: Path, vision_tower: VisionTower) -> None:
    """Check that the parts used here give the same logits as the whole model.

    Raises:
        Refused: with what would be left out.
    """
    text = model.config.get_text_config()
    if why := unsupported_reason(text):
        raise _refused(folder, why)
    probe = vision_tower.image_processor.process(probe_image())
    half = PROBE_TOKENS // 2
    words = [token for token in range(PROBE_TOKENS + 1) if token != vision_tower.image_processor.placeholder][
        :PROBE_TOKENS
    ]
    device = next(model.parameters()).device
    ids = torch.tensor([[*words[:half], *probe.tokens, *words[half:]]], device=device)
    image = BatchImage(0, ImageSpan(half, half + len(probe.tokens), probe.data), 0, ids.shape[1], 0)
    with torch.no_grad():
        whole = model(input_ids=ids, **vision_tower.model_inputs(probe.inputs), use_cache=False).logits
        positions = torch.arange(ids.shape[1], device=device)[None]
        embedded = vision_tower.embed(ids, [image])
        hidden = vision_tower.layers(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state
        ours = model.get_output_embeddings()(hidden)
    gap, most = float((whole - ours).abs().max()), float(whole.abs().max())
    if not gap <= LOGITS_TOLERANCE * most:
        raise _refused(folder, f"with an image its logits differ by {gap:.3g} (of {most:.3g}) from those of its parts")


def probe_image() -> bytes:
    """Return a small encoded image."""
    from PIL import Image

    width, height = PROBE_SIZE
    pixels = (np.arange(height * width * 3) * 7 % 256).astype(np.uint8).reshape(height, width, 3)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG")
    return held.getvalue()


def _refused(folder: Path, why: str) -> Refused:
    hint = f"use a model of one of the families {', '.join(sorted(FAMILIES))} whose text has full attention"
    return Refused(f"the model in {folder}", why=why, hint=hint)
