"""A model's own image processor: the tokens of an image, and the tensors that the vision tower takes."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.data.media.images import MAX_IMAGES, ImageSpan, decode_image, image_digest
from relax_rt.roles.models.settings import ModelTable
from relax_rt.transport.rpc.errors import Refused, RelaxError

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig

FAMILIES = frozenset({"llava"})
"""Supported `model_type`s: features replace placeholders, positions are counted as in text, and the text's layers get
nothing else of the image."""
TENSORS = "pixel_values"
CACHE_BYTES = 64 << 20
"""Limit on the processed images that are cached."""


def has_vision(folder: Path) -> bool:
    """Return whether the model in a folder takes images; nothing is loaded."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("model_type") in FAMILIES


def run_has_vision(config: RunConfig) -> bool:
    """Return whether the model of a run takes images; packages do not."""
    model = config.table(ModelTable)
    path = Path(model.path).expanduser()
    return not model.path.startswith("package:") and has_vision(Path(config.config_dir) / path)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """The processor's output for an image.

    Attributes:
        data: encoded.
        tokens: its tokens in a prompt. slots: indices of those that features replace.
        inputs: input tensors of the vision tower.
    """

    data: bytes
    digest: str
    tokens: tuple[int, ...]
    slots: NDArray[np.int64]
    inputs: Mapping[str, Any] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Approximate memory that it takes."""
        return len(self.data) + sum(int(getattr(one, "nbytes", 0)) for one in self.inputs.values())


class ImageProcessor:
    """Processes images as the model was trained on them; thread-safe.

    Args:
        processor: of transformers. folder: of the model.

    Attributes:
        placeholder: the token that a chat template writes for an image, and that features replace.

    Raises:
        Refused: it has no such token.
    """

    def __init__(self, processor: Any, folder: Path) -> None:
        self.folder, self._processor = folder, processor
        self._text = getattr(processor, "image_token", None)
        placeholder = processor.tokenizer.convert_tokens_to_ids(self._text) if self._text else None
        if placeholder is None or processor.tokenizer.encode(self._text, add_special_tokens=False) != [placeholder]:
            why = f"its tokenizer has no token for {self._text!r}, which is to stand for an image"
            raise Refused(f"the processor of {folder}", why=why, hint="put the model's own processor files there")
        self.placeholder = int(placeholder)
        self._lock = threading.Lock()
        self._processing = threading.Lock()
        """Tokenizers cannot be used by two threads at once."""
        self._cache: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._bytes = 0

    def process(self, data: bytes) -> ProcessedImage:
        """Decode and process an image, or return it from the cache. Blocks.

        Raises:
            Refused: it is no image, exceeds a limit, or the processor does not take it.
        """
        digest = image_digest(data)
        if (found := self._cached(digest)) is not None:
            return found
        with self._processing:
            if (found := self._cached(digest)) is not None:
                return found
            found = self._process(data, digest)
            with self._lock:
                self._cache[digest] = found
                self._bytes += found.nbytes
                while self._bytes > CACHE_BYTES and len(self._cache) > 1:
                    self._bytes -= self._cache.popitem(last=False)[1].nbytes
            return found

    def _cached(self, digest: str) -> ProcessedImage | None:
        with self._lock:
            if (found := self._cache.get(digest)) is not None:
                self._cache.move_to_end(digest)
            return found

    def _process(self, data: bytes, digest: str) -> ProcessedImage:
        image = decode_image(data)
        try:
            made = self._processor(text=[self._text], images=[image], add_special_tokens=False, return_tensors="pt")
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            why = f"the model's processor does not take it: {type(error).__name__}: {error}"[:300]
            raise Refused(f"an image of {image.width} x {image.height}", why=why) from error
        tokens = tuple(int(token) for token in made["input_ids"][0])
        slots = np.flatnonzero(np.array(tokens) == self.placeholder).astype(np.int64)
        inputs = {name: made[name] for name in self._processor.image_processor.model_input_names if name in made}
        return ProcessedImage(data, digest, tokens, slots, inputs)

    def check(self, prompt: Sequence[int], media: Sequence[ImageSpan]) -> None:
        """Check that the images of a prompt have the tokens that the processor gives them. Blocks.

        Raises:
            Refused: they do not, or there are too many.
        """
        if len(media) > MAX_IMAGES:
            raise Refused(f"a prompt with {len(media)} images", why=f"at most {MAX_IMAGES} are taken")
        end = 0
        for one in media:
            if not end <= one.start < one.end <= len(prompt):
                why = f"it is at tokens {one.start} to {one.end}, and the prompt has {len(prompt)}"
                raise Refused("an image in a prompt", why=why)
            end = one.end
            if tuple(prompt[one.start : one.end]) != self.process(one.data).tokens:
                raise Refused(
                    f"an image in a prompt at {one.start}",
                    why="its tokens are not those of this model's processor",
                    hint="all roles must have the same model folder and the same transformers",
                )


def load_image_processor(folder: Path) -> ImageProcessor | None:
    """Load the processor of a model folder; None: the model reads text alone.

    Raises:
        RelaxError: it cannot be loaded.
    """
    if not has_vision(folder):
        return None
    from transformers import AutoProcessor

    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        hint = "put the model's processor files there (processor_config.json); Pillow must be installed"
        raise RelaxError(f"the processor of {folder}", why=str(error).strip().splitlines()[0], hint=hint) from error
    if not hasattr(processor, "image_processor"):
        why = "AutoProcessor finds no image processor there"
        raise RelaxError(f"the processor of {folder}", why=why, hint="put processor_config.json of the model there")
    return ImageProcessor(processor, folder)
