"""Compact payloads of a version: LoRA adapters, and weights rounded to a smaller dtype for the wire.

A payload is the bytes of a safetensors file. Applied to the base, or decoded, it gives the whole version, bit by bit
the same on every machine: arithmetic is by element, in float32, or exact. So the version's digests hold for the result.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Refused
from relax_rt.transport.weights.manifest import Layout, TensorEntry
from relax_rt.transport.weights.safetensors_header import (
    LENGTH,
    FileTensor,
    Header,
    decode_header,
    encode_header,
    header_bytes,
)

if TYPE_CHECKING:
    import torch

WireDtype = Literal["bfloat16", "float8_e4m3fn"]
MAX_RANK = 4096
E4M3_MAX = 448.0
SCALE = "::scale"
"""Suffix of a tensor's name: the float32 by which its float8 values are multiplied."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_BLOCK_ELEMENTS = 1 << 16
"""Elements of a matrix that are merged at a time: in float64 they fit into a core's L2 cache."""
_FLOATS = ("float32", "bfloat16", "float16")


class Adapter(NamedTuple):
    """LoRA of one linear layer: scale * (b @ a) is added to its weight [out, in], with a [r, in] and b [out, r]."""

    a: torch.Tensor
    b: torch.Tensor


class Lora(NamedTuple):
    """Adapters by the name of their module, as ``model.layers.0.self_attn.q_proj``.

    Attributes:
        base, base_digest: the version that they are merged into.
    """

    rank: int
    alpha: float
    base: int
    base_digest: str
    adapters: Mapping[str, Adapter]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def encode_lora(lora: Lora) -> bytes:
    """Encode adapters as a payload, in float32.

    Raises:
        Refused: an adapter does not have the rank; it is named.
    """
    import torch

    tensors: list[tuple[str, torch.Tensor]] = []
    for module, (a, b) in sorted(lora.adapters.items()):
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != lora.rank or b.shape[1] != lora.rank:
            raise Refused(f"adapter of {module}", why=f"{list(b.shape)} x {list(a.shape)} is not of rank {lora.rank}")
        tensors += [(module + _A, a), (module + _B, b)]
    facts = {"payload": "lora", "rank": str(lora.rank), "alpha": repr(lora.alpha)}
    facts |= {"base": str(lora.base), "base_digest": lora.base_digest}
    return _file([(name, t.detach().to(torch.float32).contiguous()) for name, t in tensors], facts)


def decode_lora(blob: memoryview) -> Lora:
    """Decode a payload of adapters; the tensors are views of it.

    Raises:
        Corrupt: it is not such a payload.
    """
    header, data = _opened(blob, "adapters")
    facts = _facts(header, "lora", "adapters")
    rank = _number(facts, "rank", int)
    alpha, base = _number(facts, "alpha", float), _number(facts, "base", int)
    if not 1 <= rank <= MAX_RANK or not math.isfinite(alpha) or base < 0:
        raise Corrupt("adapters", why=f"rank {rank} and alpha {alpha} for version {base}")
    found = {tensor.name: tensor for tensor in header.tensors}
    adapters: dict[str, Adapter] = {}
    for name, tensor in found.items():
        module = name.removesuffix(_A).removesuffix(_B)
        if module + _A not in found or module + _B not in found or module == name:
            raise Corrupt(f"adapter {name}", why="its other half is missing")
        if tensor.dtype != "float32" or len(tensor.shape) != 2 or tensor.shape[name.endswith(_B)] != rank:
            raise Corrupt(f"adapter {name}", why=f"{tensor.dtype} {list(tensor.shape)} is not float32 of rank {rank}")
        if name.endswith(_A):
            adapters[module] = Adapter(_view(tensor, data), _view(found[module + _B], data))
    return Lora(rank, alpha, base, facts.get("base_digest", ""), adapters)


def merge_lora(lora: Lora, layout: Layout, into: memoryview, *, workers: int = 0, until: float = math.inf) -> None:
    """Merge adapters into the base that `into` holds. The same input gives the same bits everywhere.

    W + (alpha / rank) B A, Hu et al. 2021 (arXiv 2106.09685), section 4.1. A and B are rounded to whole numbers of so
    many bits, times a power of two, that every product and sum of theirs is a whole number below 2^53: no order of
    summation rounds anything (Ozaki et al. 2012, Numerical Algorithms 59, section 2, with one slice). They keep 24 bits
    behind their largest value with rank 16, and 20 with the highest rank.

    Args:
        workers: threads that share the work; 0: one for every four cores, four at most.
        until: deadline by time.monotonic(), checked between blocks of a matrix.

    Raises:
        Refused: an adapter has no weight in the layout, or one of another shape, or values that are not finite; it is
            named and nothing is changed.
        DeadlineExceeded: it was not done in time; `into` holds part of the sums.
    """
    import torch

    # Set per thread: a thread that flushes denormals would compute other bits.
    torch.set_flush_denormal(False)
    entries = {entry.name: entry for entry in layout.entries}
    targets = [(_target(module, one, entries), _exact(module, one, lora)) for module, one in lora.adapters.items()]
    workers = workers or min(4, max(1, len(os.sched_getaffinity(0)) // 4))
    flat = torch.frombuffer(into, dtype=torch.uint8)
    blocks = (
        _Block(_tensor(flat, entry).view(entry.shape[0], -1)[at : at + rows], exact._replace(b=exact.b[at : at + rows]))
        for entry, exact in targets
        for rows in (max(1, _BLOCK_ELEMENTS // max(1, exact.a.shape[1])),)
        for at in range(0, exact.b.shape[0], rows)
    )
    late = threading.Event()
    timed = _in_time(blocks, until, late)
    if workers == 1:
        _add_products(timed)
    else:
        shared = _taken_in_turn(timed)
        with ThreadPoolExecutor(workers, thread_name_prefix="relax-merge") as pool:
            for done in [pool.submit(_add_products, shared) for _ in range(workers)]:
                done.result()
    if late.is_set():
        raise DeadlineExceeded("adapters were not added in time", why="their deadline has passed")


class _Exact(NamedTuple):
    """factor * (b @ a), with whole numbers in float64."""

    a: torch.Tensor
    b: torch.Tensor
    factor: float


class _Block(NamedTuple):
    """Rows of a weight, and what is added to them."""

    weight: torch.Tensor
    added: _Exact


def _exact(module: str, adapter: Adapter, lora: Lora) -> _Exact:
    bits = (53 - (lora.rank - 1).bit_length()) // 2
    (a, of_a), (b, of_b) = (_whole_numbers(module, values, bits) for values in adapter)
    return _Exact(a, b, math.ldexp(lora.scale, of_a + of_b))


def _whole_numbers(module: str, values: torch.Tensor, bits: int) -> tuple[torch.Tensor, int]:
    """Round to whole numbers up to 2^bits, in float64; return them and the power of two that they are multiplied by."""
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        raise Refused(f"adapter of {module}", why="it has values that are not finite")
    power = math.frexp(largest)[1] - bits
    return values.double().mul_(math.ldexp(1.0, -power)).round_(), power


def _in_time(blocks: Iterator[_Block], until: float, late: threading.Event) -> Iterator[_Block]:
    """Yield blocks until the deadline; set `late` if it came first."""
    for block in blocks:
        if time.monotonic() > until:
            late.set()
            return
        yield block


def _taken_in_turn(blocks: Iterator[_Block]) -> Iterator[_Block]:
    """Wrap a generator so that several threads may take from it."""
    lock = threading.Lock()

    def take() -> _Block | None:
        with lock:
            return next(blocks, None)

    return iter(take, None)


def _add_products(blocks: Iterable[_Block]) -> None:
    """Add its product to each block."""
    import torch

    torch.set_flush_denormal(False)
    wide, narrow = torch.empty(0, dtype=torch.float64), torch.empty(0)
    for weight, (a, b, factor) in blocks:
        size = weight.numel()
        if size > len(wide):
            wide, narrow = torch.empty(size, dtype=torch.float64), torch.empty(size)
        product, total = wide[:size].view(weight.shape), narrow[:size].view(weight.shape)
        total.copy_(torch.mm(b, a, out=product).mul_(factor))
        weight.copy_(total.add_(weight))


def encode_wire(layout: Layout, data: memoryview, wire: WireDtype) -> bytes:
    """Encode a flat buffer in the wire dtype.

    float8_e4m3fn: matrices are divided by a scale of their own and rounded; vectors are sent unchanged. bfloat16: all
    float32 is rounded. Tensors of a smaller dtype are sent unchanged.

    Raises:
        Refused: a value that is to be rounded to float8 is not finite; its tensor is named.
    """
    flat = _frombuffer(data)
    tensors: list[tuple[str, torch.Tensor]] = []
    for entry in layout.entries:
        tensors += _rounded(entry, _tensor(flat, entry), wire)
    return _file(tensors, {"payload": "wire", "dtype": wire})


def decode_wire(blob: memoryview, layout: Layout, into: memoryview) -> None:
    """Fill a flat buffer of the layout from a payload. The same input gives the same bits everywhere.

    Raises:
        Corrupt: it is not such a payload. Refused: a tensor is missing, misshapen or unknown; it is named.
    """
    import torch

    header, data = _opened(blob, "weights on the wire")
    _facts(header, "wire", "weights on the wire")
    found = {tensor.name: tensor for tensor in header.tensors}
    flat = torch.frombuffer(into, dtype=torch.uint8)
    flat[: layout.nbytes].zero_()
    for entry in layout.entries:
        tensor = found.pop(entry.name, None)
        if tensor is None or tensor.shape != entry.shape:
            have = "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
            raise Refused(f"tensor {entry.name} on the wire", why=f"{have} came for {list(entry.shape)}")
        values = _view(tensor, data)
        if tensor.dtype == "float8_e4m3fn" and entry.dtype != tensor.dtype:
            values = values.to(torch.float32).mul_(_scale(found.pop(entry.name + SCALE, None), entry.name, data))
        elif tensor.dtype != entry.dtype and (tensor.dtype not in _FLOATS or entry.dtype not in _FLOATS):
            raise Refused(f"tensor {entry.name} on the wire", why=f"{tensor.dtype} came for {entry.dtype}")
        _tensor(flat, entry).copy_(values)
    if found:
        raise Refused(f"tensor {next(iter(found))} on the wire", why="the model has no such tensor")


def wire_version(layout: Layout, data: memoryview, wire: WireDtype) -> bytes:
    """Round a flat buffer in place to what its receivers will decode, and return the payload.

    Call it before the version is sealed, so that the digests are those of what arrives."""
    blob = encode_wire(layout, data, wire)
    decode_wire(memoryview(blob), layout, data)
    return blob


def _target(module: str, adapter: Adapter, entries: Mapping[str, TensorEntry]) -> TensorEntry:
    entry = entries.get(f"{module}.weight")
    if entry is None:
        raise Refused(f"adapter of {module}", why="the model has no such weight")
    want = (adapter.b.shape[0], adapter.a.shape[1])
    if entry.shape != want or entry.dtype not in _FLOATS:
        raise Refused(f"adapter of {module}", why=f"it is for {list(want)}, the weight is {entry.dtype} {entry.shape}")
    return entry


def _rounded(entry: TensorEntry, values: torch.Tensor, wire: WireDtype) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    if wire == "bfloat16" or entry.dtype not in _FLOATS or values.ndim < 2:
        narrower = wire == "bfloat16" and entry.dtype == "float32"
        yield entry.name, values.to(torch.bfloat16) if narrower else values
        return
    values = values.to(torch.float32)
    largest = float(values.abs().max()) if values.numel() else 0.0
    if not math.isfinite(largest):
        raise Refused(f"tensor {entry.name} as {wire}", why="it has values that are not finite")
    scale = torch.tensor(largest / E4M3_MAX, dtype=torch.float32)
    if not float(scale):
        # All zero, or the largest value is so small that its scale underflows float32.
        scale.fill_(1.0)
    # The scale was rounded: the largest value may lie just above E4M3_MAX.
    yield entry.name, values.div(scale).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    yield entry.name + SCALE, scale


def _scale(tensor: FileTensor | None, name: str, data: memoryview) -> torch.Tensor:
    if tensor is None or (tensor.dtype, tensor.shape) != ("float32", ()):
        raise Refused(f"tensor {name} on the wire", why="its scale is missing, or is no float32")
    found = _view(tensor, data)
    if not math.isfinite(float(found)) or float(found) <= 0:
        raise Corrupt(f"tensor {name} on the wire", why=f"its scale is {float(found)}")
    return found


def _file(tensors: list[tuple[str, torch.Tensor]], facts: Mapping[str, str]) -> bytes:
    import torch

    parts = [(name, t.contiguous().reshape(-1).view(torch.uint8).numpy(), t) for name, t in tensors]
    head = encode_header(
        [(n, str(t.dtype).removeprefix("torch."), tuple(t.shape), len(raw)) for n, raw, t in parts], facts
    )
    return b"".join([head, *(raw.data for _, raw, _ in parts)])


def _opened(blob: memoryview, what: str) -> tuple[Header, memoryview]:
    length = header_bytes(bytes(blob[: LENGTH.size]), len(blob), what)
    behind = LENGTH.size + length
    return decode_header(blob[LENGTH.size : behind], len(blob) - behind, what), blob[behind:]


def _facts(header: Header, payload: str, what: str) -> dict[str, str]:
    if header.metadata.get("payload") != payload:
        raise Corrupt(what, why=f"its kind is {header.metadata.get('payload', 'nothing')[:32]!r}")
    return header.metadata


def _number(facts: Mapping[str, str], key: str, kind: type[Any]) -> Any:
    try:
        return kind(facts.get(key, "")[:64])
    except ValueError as error:
        raise Corrupt("adapters", why=f"{key}: {error}") from error


def _frombuffer(data: memoryview) -> torch.Tensor:
    import numpy as np
    import torch

    # Through numpy, because torch warns of read-only memory; nothing is written here.
    array = np.frombuffer(data, np.uint8)
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _view(tensor: FileTensor, data: memoryview) -> torch.Tensor:
    import torch

    raw = _frombuffer(data[tensor.start : tensor.stop])
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    if raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype).view(tensor.shape) if raw.numel() else torch.empty(tensor.shape, dtype=dtype)


def _tensor(flat: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    import torch

    dtype: torch.dtype = getattr(torch, entry.dtype)
    return flat[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)
