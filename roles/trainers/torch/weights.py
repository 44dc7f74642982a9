"""A model's weights, or this rank's part of them, by Hugging Face name, adapters merged where there are any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from relax_rt.roles.trainers.torch.pieces import Piece, piece_of, to_rank_0
from relax_rt.roles.trainers.torch.ranks import TorchRanks
from relax_rt.transport.errors import Refused
from relax_rt.transport.versions import ROOT
from relax_rt.transport.weights import payloads
from relax_rt.transport.weights.manifest import Layout, layout_of
from relax_rt.transport.weights.payloads import Lora

ADAPTER = "default"
"""Under which name peft keeps the adapters that are trained."""


class Adapter(NamedTuple):
    """The low-rank change of one weight: W + scale * B A.

    Attributes:
        a: [rank, in]. b: [out, rank]; a rank of the gang holds the same rows of it as of W.
    """

    a: Piece
    b: Piece
    alpha: float

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.a.shape[0]


class Weights:
    """A model's parameters.

    Args:
        model: a transformers model, with peft's layers in it where it has adapters, sharded if there are `ranks`.

    Attributes:
        published: the model's own tensors, in its own order. adapters: by the name of the weight that each changes.
        trained: what the optimizer updates.
    """

    def __init__(self, model: Any, ranks: TorchRanks | None) -> None:
        self.ranks = ranks
        self.published: list[Piece] = []
        parts: dict[str, dict[str, Piece]] = {}
        for name, parameter in model.named_parameters():
            piece = piece_of(plain_name(name), parameter, ranks)
            layer, part, _ = piece.name.rpartition(".lora_")
            if part:
                parts.setdefault(f"{layer}.weight", {})[piece.name[-len("A.weight")]] = piece
            else:
                self.published.append(piece)
        alphas = {
            plain_name(f"{name}.weight"): float(module.lora_alpha[ADAPTER])
            for name, module in model.named_modules()
            if hasattr(module, "lora_A")
        }
        self.adapters = {name: Adapter(two["A"], two["B"], alphas[name]) for name, two in parts.items()}
        self.trained = [piece for piece in self if piece.parameter.requires_grad]

    def __iter__(self) -> Iterator[Piece]:
        yield from self.published
        for adapter in self.adapters.values():
            yield adapter.a
            yield adapter.b

    def layout(self, dtype: str) -> Layout:
        """Where `export` puts each tensor: as an engine has them that loads the model."""
        width = getattr(torch, dtype).itemsize
        return layout_of([(p.name, dtype, p.shape, torch.Size(p.shape).numel() * width) for p in self.published])

    def export(self, into: memoryview | None, dtype: str, *, merged: bool = True) -> None:
        """All weights, adapters merged or left out, cast to dtype, into rank 0's buffer of the layout's size; other
        ranks give None. Tensor by tensor: besides the buffer nothing large is held."""
        target: torch.dtype = getattr(torch, dtype)
        flat = torch.frombuffer(into, dtype=torch.uint8) if into is not None else None
        with torch.no_grad():
            for entry, piece in zip(self.layout(dtype).entries, self.published, strict=True):
                place = flat[entry.offset : entry.offset + entry.nbytes] if flat is not None else None
                values = self.merged(piece) if merged else piece.values.detach()
                to_rank_0(values.to(target), piece.shape, place, self.ranks)

    def low_rank(self) -> Lora:
        """A copy of all adapters, whole on every rank; all ask at the same time.

        Raises:
            Refused: there are none.
        """
        if not self.adapters:
            raise Refused("the adapters of the trainer", why="it trains all weights", hint="set roles.trainer.lora")
        copies = {
            name.removesuffix(".weight"): payloads.Adapter(_copied(self.whole(one.a)), _copied(self.whole(one.b)))
            for name, one in self.adapters.items()
        }
        one = next(iter(self.adapters.values()))
        return Lora(one.a.shape[0], one.alpha, ROOT, "", copies)

    def merged(self, piece: Piece) -> torch.Tensor:
        """The rows of a weight as published; all ranks ask for the same one.

        W + (alpha / r) B A, Hu et al. 2021 (arXiv 2106.09685), section 4.1.
        """
        adapter = self.adapters.get(piece.name)
        if adapter is None:
            return piece.values.detach()
        return torch.addmm(piece.values.detach(), adapter.b.values.detach(), self.whole(adapter.a), alpha=adapter.scale)

    def whole(self, piece: Piece) -> torch.Tensor:
        """A small tensor of all ranks' rows, on each of them; all ask for the same one."""
        if self.ranks is None:
            return piece.values.detach()
        sharded: Any = piece.parameter
        with torch.no_grad():
            found: torch.Tensor = sharded.full_tensor()
        return found


def _copied(values: torch.Tensor) -> torch.Tensor:
    return values.to("cpu", copy=True)


def plain_name(name: str) -> str:
    """The name of a parameter as the model had it without adapters; of an adapter's, as it is in a checkpoint."""
    return name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")
