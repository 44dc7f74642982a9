"""A model's weights, or this rank's rows of them, by Hugging Face name; LoRA adapters, merged into them or apart."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from relax_rt.roles.models.device import copy_to_host
from relax_rt.roles.training.backend.channel import WeightChannel
from relax_rt.roles.training.backend.settings import LoraTable
from relax_rt.roles.training.torch.sharding import TensorShard, TorchRanks, send_to_rank_0, shard_of, shard_rows
from relax_rt.transport.base.versions import ROOT
from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.weights import payloads
from relax_rt.transport.weights.manifest import Layout, layout_of
from relax_rt.transport.weights.payloads import Lora

ADAPTER = "default"
"""Under which name peft keeps the adapters that are trained."""
MEASURED_ELEMENTS = 1 << 14
"""Elements of each adapted weight, at least, that `changes_kept` is measured on."""


class LoraAdapter(NamedTuple):
    """The low-rank change of one weight: W + scale * B A.

    Attributes:
        a: [rank, in]. b: [out, rank]; a rank of the gang holds the same rows of it as of W.
    """

    a: TensorShard
    b: TensorShard
    alpha: float

    @property
    def scale(self) -> float:
        """What the product is multiplied by."""
        return self.alpha / self.a.shape[0]


class ModelWeights:
    """A model's parameters.

    Args:
        model: a transformers model, with peft's layers in it where it has adapters, sharded if there are `ranks`.

    Attributes:
        published: the model's own tensors, in its own order. adapters: by the name of the weight that each changes.
        trained: what the optimizer updates.
        changes_kept: fraction of the elements changed by adapters that differ from the base weights in the dtype of the
            last export or, with `lora`, of the base; the rest is lost to rounding. None: no change yet.
    """

    def __init__(self, model: Any, ranks: TorchRanks | None) -> None:
        self.ranks = ranks
        self.changes_kept: float | None = None
        self._published_in = ""
        self.published: list[TensorShard] = []
        parts: dict[str, dict[str, TensorShard]] = {}
        for name, parameter in model.named_parameters():
            piece = shard_of(plain_name(name), parameter, ranks)
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
        self.adapters = {name: LoraAdapter(two["A"], two["B"], alphas[name]) for name, two in parts.items()}
        self.trained = [piece for piece in self if piece.parameter.requires_grad]

    def __iter__(self) -> Iterator[TensorShard]:
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
        ranks give None. Tensor by tensor: besides the buffer nothing large is held. Nothing may change them meanwhile,
        and all ranks do this at the same time as all else."""
        channel = WeightChannel(self.ranks.control) if self.ranks is not None else None
        self._published_in = dtype
        with torch.no_grad():
            if merged:
                self._measure_kept({name: self.whole(one.a) for name, one in self.adapters.items()})
            for place, row_bytes, piece in self._places(into, dtype):
                values = self.merged(piece) if merged else piece.values.detach()
                mine = values.to(getattr(torch, dtype)).reshape(-1).view(torch.uint8)
                if place is not None:
                    copy_to_host(mine, place[: len(mine)])
                if channel is not None:
                    send_to_rank_0(piece, mine, place, row_bytes, channel)

    def publish(self, into: memoryview | None, dtype: str, copied: Callable[[], None]) -> None:
        """`export` beside the next step: the weights of all ranks, adapters merged, as they are until `copied` is
        called. The other ranks hold their rows in that dtype meanwhile; rank 0 puts its own into the buffer at once."""
        assert self.ranks is not None, "one process has its weights at hand"
        channel = self.ranks.publication
        factors = {name: self._whole_beside(one.a, channel) for name, one in self.adapters.items()}
        places = list(self._places(into, dtype))
        sizes = [row_bytes * piece.rows for _, row_bytes, piece in places]
        kept: Sequence[torch.Tensor] = ()
        self._published_in = dtype
        with channel.copying(copied), torch.no_grad():
            self._measure_kept(factors)
            if channel.rank != 0:
                kept = torch.split(channel.memory(sum(sizes)), sizes)
            for number, (place, _, piece) in enumerate(places):
                values = self.merged(piece, factors.get(piece.name)).to(getattr(torch, dtype))
                target = kept[number] if place is None else place[: sizes[number]]
                copy_to_host(values.reshape(-1).view(torch.uint8), target)
        for number, (place, row_bytes, piece) in enumerate(places):
            send_to_rank_0(piece, kept[number] if place is None else place, place, row_bytes, channel)

    def _places(self, into: memoryview | None, dtype: str) -> Iterator[tuple[torch.Tensor | None, int, TensorShard]]:
        """For each published tensor its bytes of the buffer, on rank 0, and the bytes of a row."""
        flat = torch.frombuffer(into, dtype=torch.uint8) if into is not None else None
        for entry, piece in zip(self.layout(dtype).entries, self.published, strict=True):
            place = flat[entry.offset : entry.offset + entry.nbytes] if flat is not None else None
            yield place, entry.nbytes // max(piece.shape[0] if piece.shape else 1, 1), piece

    def lora(self) -> Lora:
        """A copy of all adapters, whole on every rank; all ask at the same time.

        Raises:
            Refused: there are none.
        """
        if not self.adapters:
            raise Refused("the adapters of the trainer", why="it trains all weights", hint="set roles.trainer.lora")
        copies = {
            name.removesuffix(".weight"): payloads.Adapter(
                self.whole(one.a).to("cpu", copy=True), self.whole(one.b).to("cpu", copy=True)
            )
            for name, one in self.adapters.items()
        }
        if self._published_in:
            with torch.no_grad():
                self._measure_kept({name: copies[name.removesuffix(".weight")].a for name in self.adapters})
        one = next(iter(self.adapters.values()))
        return Lora(one.a.shape[0], one.alpha, ROOT, "", copies)

    def merged(self, piece: TensorShard, a: torch.Tensor | None = None) -> torch.Tensor:
        """The rows of a weight as published.

        W + (alpha / r) B A, Hu et al. 2021 (arXiv 2106.09685), section 4.1.

        Args:
            a: all of A; unless given, all ranks ask for the same weight.
        """
        adapter = self.adapters.get(piece.name)
        if adapter is None:
            return piece.values.detach()
        a = self.whole(adapter.a) if a is None else a
        return torch.addmm(piece.values.detach(), adapter.b.values.detach(), a, alpha=adapter.scale)

    def _measure_kept(self, factors: Mapping[str, torch.Tensor]) -> None:
        """Set `changes_kept`, from some of this rank's rows of each adapted weight.

        Args:
            factors: all of A, by the name of the weight.
        """
        if not self.adapters:
            return
        dtype = getattr(torch, self._published_in)
        counts = []
        for piece in self.published:
            if (adapter := self.adapters.get(piece.name)) is None or not piece.rows:
                continue
            every = max(1, piece.values.numel() // MEASURED_ELEMENTS)
            base, b = piece.values.detach()[::every], adapter.b.values.detach()[::every]
            a = factors[piece.name].to(base.device)
            merged = torch.addmm(base, b, a, alpha=adapter.scale)
            counts.append(torch.stack([(merged != base).sum(), (merged.to(dtype) != base.to(dtype)).sum()]))
        changed, kept = torch.stack(counts).sum(0).tolist() if counts else (0, 0)
        self.changes_kept = kept / changed if changed else None

    def whole(self, piece: TensorShard) -> torch.Tensor:
        """A small tensor of all ranks' rows, on each of them; all ask for the same one."""
        if self.ranks is None:
            return piece.values.detach()
        sharded: Any = piece.parameter
        with torch.no_grad():
            found: torch.Tensor = sharded.full_tensor()
        return found

    @staticmethod
    def _whole_beside(piece: TensorShard, channel: WeightChannel) -> torch.Tensor:
        """`whole` without the groups that training uses."""
        rows = piece.shape[0]
        found = channel.whole(piece.values.detach(), shard_rows(rows, 0, channel.world)[1])[:rows]
        return found.to(piece.values.device)


def plain_name(name: str) -> str:
    """The name of a parameter as the model had it without adapters; of an adapter's, as it is in a checkpoint."""
    return name.replace(".base_layer.", ".").replace(f".{ADAPTER}.", ".")


ADAPTER_FOLDER = "adapter"
"""In a checkpoint: beside the merged model, where transformers does not take it for a part of that."""
ADAPTER_FILE, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."
"""Before every name in peft's files."""


def add_adapters(model: Any, table: LoraTable, *, seed: int) -> None:
    """Put adapters into the model, which is changed by nothing yet (B is 0); only they are trained from now on.

    Args:
        seed: of A's first values, which all ranks of a gang and every new beginning must draw alike.

    Raises:
        Refused: peft is not installed, or no linear layer has such a name.
    """
    try:
        import peft
    except ImportError as error:
        raise Refused("roles.trainer.lora", why="peft is not installed", hint="pip install 'relax-rt[lora]'") from error
    config = peft.LoraConfig(
        r=table.rank, lora_alpha=table.alpha, target_modules=table.targets, lora_dropout=0.0, bias="none"
    )
    for name in () if isinstance(table.targets, str) else sorted(tied_modules(model)):
        if any(f".{name}".endswith(f".{target}") for target in table.targets):
            why = "its weight is the embedding's as well, so that the change could not be merged"
            raise Refused(f"roles.trainer.lora.targets: {name}", why=why, hint="leave it out")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(config, model, adapter_name=ADAPTER)
        except ValueError as error:
            raise Refused(f"roles.trainer.lora.targets = {table.targets}", why=str(error).splitlines()[0]) from error
    for name, module in model.named_modules():
        if hasattr(module, "lora_A") and not isinstance(module, peft.tuners.lora.Linear):
            raise Refused(f"roles.trainer.lora.targets: {name}", why="it is no linear layer")


def tied_modules(model: Any) -> frozenset[str]:
    """Names of modules whose weight another one has as well."""
    seen: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        seen.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return frozenset(name for names in seen.values() if len(names) > 1 for name in names)


def write_adapter_config(folder: Path, table: LoraTable, base: Path) -> None:
    """peft's description of the adapters, so that `PeftModel.from_pretrained` reads them over the base model."""
    targets = table.targets if isinstance(table.targets, str) else sorted(table.targets)
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": table.rank,
        "lora_alpha": table.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": targets,
        "inference_mode": True,
    }
    (folder / ADAPTER_CONFIG).write_text(json.dumps(described, indent=2))
