"""A small model that sees: random weights, a processor of its own, images for it. Made without any download."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{{ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
SIDE, PATCH = 32, 8
PLACES = (SIDE // PATCH) ** 2
"""Tokens of an image."""
CONTEXT = 1024


def tokenizer() -> Any:
    """That of the tiny model, with a token for images."""
    from relax_rt.roles.models.tiny import character_tokenizer

    raw = character_tokenizer()
    raw.add_special_tokens({"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>", "<image>"]})
    raw.chat_template = TEMPLATE
    raw.model_max_length = CONTEXT
    return raw


def build_seeing_model(folder: Path, seed: int = 0) -> Path:
    """A random LLaVA: CLIP's tower before the text of a Qwen3, whose distributions are far from even and depend on what
    is seen."""
    import torch
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    transformers.utils.logging.disable_progress_bar()
    raw = tokenizer()
    text = transformers.Qwen3Config(
        vocab_size=len(raw),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    tower = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=PATCH,
        projection_dim=32,
    )
    config = transformers.LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_index=raw.convert_tokens_to_ids("<image>"),
        image_seq_length=PLACES,
        vision_feature_layer=-1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.LlavaForConditionalGeneration(config)
        with torch.no_grad():
            for parameter in model.model.multi_modal_projector.parameters():
                parameter.normal_(0.0, 0.5)
    ends = {"pad_token_id": raw.pad_token_id, "eos_token_id": raw.eos_token_id}
    model.generation_config = transformers.GenerationConfig(**ends)
    model.save_pretrained(folder)
    looks = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor = transformers.LlavaProcessor(
        looks,
        raw,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return folder


def encoded_image(number: int, size: tuple[int, int] = (24, 20), form: str = "PNG") -> bytes:
    """One of many images, encoded."""
    from PIL import Image

    width, height = size
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, form)
    return held.getvalue()


def part(data: bytes) -> dict[str, Any]:
    """A part of a message of Chat Completions."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": url}}
