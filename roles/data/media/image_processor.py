"""A model's own processor: what tokens stand for a picture, and what the model computes of it."""

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

from relax_rt.roles.data.media.pictures import MAX_PICTURES, ImageSpan, digest_of, opened
from relax_rt.roles.models.settings import ModelTable
from relax_rt.transport.rpc.errors import Refused, RelaxError

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig

FAMILIES = frozenset({"llava"})
"""`model_type` of models whose pictures are computed here: features take the places of placeholders, positions are
counted as in a text, and the text's layers see nothing else of the picture."""
TENSORS = "pixel_values"
KEPT_BYTES = 64 << 20
"""Of tensors that are kept for pictures that are looked at again."""


def has_vision(folder: Path) -> bool:
    """Whether the model in a folder is one whose pictures are computed; nothing is loaded."""
    try:
        values = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("model_type") in FAMILIES


def run_has_vision(config: RunConfig) -> bool:
    """Whether the model of a run does. Packages are texts' alone."""
    model = config.table(ModelTable)
    path = Path(model.path).expanduser()
    return not model.path.startswith("package:") and has_vision(Path(config.config_dir) / path)


@dataclass(frozen=True, slots=True, eq=False)
class ProcessedImage:
    """A picture that the processor has looked at.

    Attributes:
        data: encoded. digest: names it.
        tokens: what stands for it in a prompt. slots: which of them features take the place of.
        inputs: tensors that the model makes the features of.
    """

    data: bytes
    digest: str
    tokens: tuple[int, ...]
    slots: NDArray[np.int64]
    inputs: Mapping[str, Any] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """About, of all that is held."""
        return len(self.data) + sum(int(getattr(one, "nbytes", 0)) for one in self.inputs.values())


class ImageProcessor:
    """Looks at pictures as the model is used to. Any thread may ask.

    Args:
        processor: of transformers. folder: where it is from.

    Attributes:
        placeholder: the token that a chat template writes for a picture, and whose places features take.

    Raises:
        Refused: it has no such token.
    """

    def __init__(self, processor: Any, folder: Path) -> None:
        self.folder, self._processor = folder, processor
        self._text = getattr(processor, "image_token", None)
        placeholder = processor.tokenizer.convert_tokens_to_ids(self._text) if self._text else None
        if placeholder is None or processor.tokenizer.encode(self._text, add_special_tokens=False) != [placeholder]:
            why = f"its tokenizer has no token for {self._text!r}, which is to stand for a picture"
            raise Refused(f"the processor of {folder}", why=why, hint="put the model's own processor files there")
        self.placeholder = int(placeholder)
        self._lock = threading.Lock()
        self._at_work = threading.Lock()
        """Tokenizers cannot be used by two threads at once."""
        self._kept: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._bytes = 0

    def process(self, data: bytes) -> ProcessedImage:
        """Decode a picture and process it, or find that it was looked at lately. Blocks.

        Raises:
            Refused: it is none, beyond a bound, or the processor does not take it.
        """
        digest = digest_of(data)
        if (found := self._looked_at(digest)) is not None:
            return found
        with self._at_work:
            if (found := self._looked_at(digest)) is not None:
                return found
            found = self._process(data, digest)
            with self._lock:
                self._kept[digest] = found
                self._bytes += found.nbytes
                while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                    self._bytes -= self._kept.popitem(last=False)[1].nbytes
            return found

    def _looked_at(self, digest: str) -> ProcessedImage | None:
        with self._lock:
            if (found := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
            return found

    def _process(self, data: bytes, digest: str) -> ProcessedImage:
        picture = opened(data)
        try:
            made = self._processor(text=[self._text], images=[picture], add_special_tokens=False, return_tensors="pt")
        except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError) as error:
            why = f"the model's processor does not take it: {type(error).__name__}: {error}"[:300]
            raise Refused(f"a picture of {picture.width} x {picture.height}", why=why) from error
        tokens = tuple(int(token) for token in made["input_ids"][0])
        slots = np.flatnonzero(np.array(tokens) == self.placeholder).astype(np.int64)
        inputs = {name: made[name] for name in self._processor.image_processor.model_input_names if name in made}
        return ProcessedImage(data, digest, tokens, slots, inputs)

    def check(self, prompt: Sequence[int], media: Sequence[ImageSpan]) -> None:
        """Whether pictures stand in a prompt as the processor would have put them there. Blocks while it looks.

        Raises:
            Refused: they do not, or there are too many.
        """
        if len(media) > MAX_PICTURES:
            raise Refused(f"a prompt with {len(media)} pictures", why=f"at most {MAX_PICTURES} are taken")
        end = 0
        for one in media:
            if not end <= one.start < one.end <= len(prompt):
                why = f"it is said to stand at {one.start} to {one.end}, of {len(prompt)} tokens"
                raise Refused("a picture in a prompt", why=why)
            end = one.end
            if tuple(prompt[one.start : one.end]) != self.process(one.data).tokens:
                raise Refused(
                    f"a picture in a prompt at {one.start}",
                    why="other tokens stand for it than this model's processor makes of it",
                    hint="all roles must have the same model folder and the same transformers",
                )


def load_image_processor(folder: Path) -> ImageProcessor | None:
    """The processor of a model folder; None: the model reads text alone.

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
