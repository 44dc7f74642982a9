"""Adapters and narrower weights: the whole version comes of them, bit by bit the same, or an error with a name."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from weight_versions import version_of  # noqa: E402

from relax_rt.transport.rpc.errors import Corrupt, DeadlineExceeded, Refused, RelaxError  # noqa: E402
from relax_rt.transport.weights import payloads  # noqa: E402
from relax_rt.transport.weights.broadcast.source import widen  # noqa: E402
from relax_rt.transport.weights.manifest import Layout, layout_of  # noqa: E402
from relax_rt.transport.weights.payloads import (  # noqa: E402
    Adapter,
    Lora,
    decode_lora,
    decode_wire,
    encode_lora,
    encode_wire,
    merge_lora,
    wire_version,
)
from relax_rt.transport.weights.safetensors_header import encode_header  # noqa: E402

Q, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
SHAPES = {Q: (24, 10), DOWN: (7, 33)}


def model_layout(dtype: str) -> Layout:
    size = getattr(torch, dtype).itemsize
    weights = [(f"{m}.weight", dtype, s, math.prod(s) * size) for m, s in SHAPES.items()]
    return layout_of([*weights, ("model.norm.weight", dtype, (10,), 10 * size)])


def flat_of(layout: Layout, seed: int = 0, spread: float = 1.0) -> bytearray:
    data = bytearray(layout.nbytes)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors_of(layout, data).items():
        del name
        tensor.copy_(torch.randn(tensor.shape, generator=generator) * spread)
    return data


def tensors_of(layout: Layout, data: bytearray) -> dict[str, Any]:
    flat = torch.frombuffer(data, dtype=torch.uint8)
    return {
        e.name: flat[e.offset : e.offset + e.nbytes].view(getattr(torch, e.dtype)).view(e.shape) for e in layout.entries
    }


def lora_of(rank: int = 4, seed: int = 1) -> Lora:
    generator = torch.Generator().manual_seed(seed)

    def one(shape: tuple[int, int]) -> Adapter:
        def draw(*size: int) -> Any:
            return torch.randn(*size, generator=generator)

        return Adapter(draw(rank, shape[1]), draw(shape[0], rank))

    return Lora(rank, 16.0, 3, "ab", {module: one(shape) for module, shape in SHAPES.items()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("block", [1, 50, 1 << 17])
def test_adapters_are_added_to_the_base(dtype: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "_BLOCK_ELEMENTS", block)
    layout, lora = model_layout(dtype), lora_of(rank=5)
    data, before = flat_of(layout), flat_of(layout)
    merge_lora(decode_lora(memoryview(encode_lora(lora))), layout, memoryview(data))
    old, new = tensors_of(layout, before), tensors_of(layout, data)
    for module, (a, b) in lora.adapters.items():
        name = f"{module}.weight"
        exact = old[name].double() + lora.alpha / lora.rank * (b.double() @ a.double())
        # Half a unit in the last place of the result, and what six additions in float32 may cost.
        bound = exact.abs() * (2.0**-8 if dtype == "bfloat16" else 2.0**-23) + 2e-5
        assert bool(((new[name].double() - exact).abs() <= bound).all())
        assert not torch.equal(new[name], old[name])
    assert torch.equal(new["model.norm.weight"], old["model.norm.weight"])


def whole_numbers(values: Any, bits: int) -> tuple[Any, int]:
    power = math.frexp(float(values.abs().max()))[1] - bits
    return np.rint(values.numpy().astype(np.float64) * 2.0**-power).astype(np.int64), power


@pytest.mark.parametrize("rank", [1, 2, 16, 17, 4096])
def test_no_order_of_summation_rounds_anything(rank: int) -> None:
    bits = (53 - math.ceil(math.log2(rank))) // 2
    one = payloads._exact("m", Adapter(torch.full((rank, 2), 1.9), torch.full((3, rank), -1.99)), lora_of(rank))
    assert 2.0 ** (bits - 1) <= float(one.a.abs().max()) <= 2.0**bits and torch.equal(one.a, one.a.round())
    assert rank * float(one.a.abs().max()) * float(one.b.abs().max()) <= 2.0**53


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_merge_has_the_same_bits_however_it_is_cut_and_on_any_number_of_threads(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, lora = model_layout(dtype), lora_of(rank=5)
    lora = lora._replace(adapters={m: Adapter(a * 1e-20, b * 1e-19) for m, (a, b) in lora.adapters.items()})
    for scale, found in ((1.0, lora_of(rank=5)), (1e-38, lora)):
        # By hand, in whole numbers that no computer rounds; denormal numbers as they are.
        data = flat_of(layout, spread=scale)
        for module, (a, b) in found.adapters.items():
            (left, of_b), (right, of_a) = whole_numbers(b, 25), whole_numbers(a, 25)
            total = (left @ right).astype(np.float64) * (found.scale * 2.0 ** (of_a + of_b))
            weight = tensors_of(layout, data)[f"{module}.weight"]
            weight.copy_(torch.from_numpy(weight.float().numpy() + total.astype(np.float32)))
        results, threads = {bytes(data)}, torch.get_num_threads()
        for block, count, workers in ((1, 1, 1), (77, 2, 2), (1 << 17, 2, 3)):
            monkeypatch.setattr(payloads, "_BLOCK_ELEMENTS", block)
            torch.set_num_threads(count)
            data = flat_of(layout, spread=scale)
            torch.set_flush_denormal(count == 1)
            merge_lora(found, layout, memoryview(data), workers=workers)
            results.add(bytes(data))
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)
        assert len(results) == 1


@pytest.mark.parametrize("workers", [1, 3])
def test_a_merge_that_is_not_done_in_time_is_given_up(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payloads, "_BLOCK_ELEMENTS", 1)
    layout, lora = model_layout("float32"), lora_of()
    data = flat_of(layout)
    before = bytes(data)
    with pytest.raises(DeadlineExceeded, match="adapters were not added in time"):
        merge_lora(lora, layout, memoryview(data), workers=workers, until=time.monotonic() - 1)
    assert bytes(data) == before
    merge_lora(lora, layout, memoryview(data), workers=workers, until=time.monotonic() + 60)
    assert bytes(data) != before


def test_adapters_that_do_not_fit_are_named_and_change_nothing() -> None:
    layout = model_layout("float32")
    data = flat_of(layout)
    before = bytes(data)
    for module, adapter, why in (
        ("model.layers.9.mlp.up_proj", Adapter(torch.ones(4, 3), torch.ones(3, 4)), "no such weight"),
        (DOWN, Adapter(torch.ones(4, 3), torch.ones(3, 4)), r"it is for \[3, 3\]"),
        (DOWN, Adapter(torch.full((4, 33), math.inf), torch.ones(7, 4)), "values that are not finite"),
        (DOWN, Adapter(torch.ones(4, 33), torch.full((7, 4), math.nan)), "values that are not finite"),
    ):
        lora = lora_of()
        wrong = lora._replace(adapters={**lora.adapters, module: adapter})
        with pytest.raises(Refused, match=f"adapter of {module}: .*{why}"):
            merge_lora(wrong, layout, memoryview(data))
        assert bytes(data) == before
    with pytest.raises(Refused, match="is not of rank 4"):
        encode_lora(lora_of()._replace(adapters={Q: Adapter(torch.ones(3, 10), torch.ones(24, 4))}))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-30, 1e-3, 1.0, 1e4, 1e30]), st.sampled_from(["float32", "bfloat16"]))
def test_float8_is_within_its_bound(seed: int, spread: float, dtype: str) -> None:
    layout = model_layout(dtype)
    data = flat_of(layout, seed, spread)
    into = bytearray(b"\xff" * layout.nbytes)
    decode_wire(memoryview(encode_wire(layout, memoryview(data), "float8_e4m3fn")), layout, memoryview(into))
    old, new = tensors_of(layout, data), tensors_of(layout, into)
    for name, value in old.items():
        exact, found = value.double(), new[name].double()
        if value.ndim == 1:
            assert torch.equal(value, new[name]), "norms are not rounded"
            continue
        scale = float(exact.abs().max()) / 448
        # 3 bits of mantissa, half a step of the smallest numbers, and the last rounding to the model's dtype.
        last = exact.abs() * (2.0**-8 if dtype == "bfloat16" else 2.0**-22) + 1e-40
        assert bool(((found - exact).abs() <= exact.abs() * 2.0**-4 * 1.01 + scale * 2.0**-10 * 1.01 + last).all())


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-20, 1.0, 1e20]))
def test_bfloat16_is_within_half_a_unit_in_the_last_place(seed: int, spread: float) -> None:
    layout = model_layout("float32")
    data, into = flat_of(layout, seed, spread), bytearray(layout.nbytes)
    blob = encode_wire(layout, memoryview(data), "bfloat16")
    decode_wire(memoryview(blob), layout, memoryview(into))
    assert len(blob) < layout.nbytes * 0.5 + 1000
    new = tensors_of(layout, into)
    for name, value in tensors_of(layout, data).items():
        assert bool(((new[name] - value).abs() <= value.abs() * 2.0**-8).all())
        assert torch.equal(new[name], value.bfloat16().float())


def test_extremes_of_float8() -> None:
    layout = layout_of([("w", "float32", (2, 4), 32), ("zero", "float32", (2, 2), 16), ("none", "float32", (0, 3), 0)])
    data = bytearray(layout.nbytes)
    values = torch.tensor([[3.4e38, -3.4e38, 0.0, 1e30], [-0.0, 2.0, 1e-45, 7.6e35]])
    tensors_of(layout, data)["w"].copy_(values)
    into = bytearray(layout.nbytes)
    decode_wire(memoryview(encode_wire(layout, memoryview(data), "float8_e4m3fn")), layout, memoryview(into))
    found = tensors_of(layout, into)
    assert bool(torch.isfinite(found["w"]).all()) and float(found["w"][0, 0]) > 3.3e38
    assert not found["zero"].any()
    for bad in (math.inf, -math.inf, math.nan):
        tensors_of(layout, data)["w"][1, 1] = bad
        with pytest.raises(Refused, match="tensor w as float8_e4m3fn: it has values that are not finite"):
            encode_wire(layout, memoryview(data), "float8_e4m3fn")


@pytest.mark.parametrize("wire", ["bfloat16", "float8_e4m3fn"])
def test_a_version_on_the_wire_is_what_was_sealed(wire: Any) -> None:
    layout = model_layout("float32")
    data = flat_of(layout)
    original = bytes(data)
    blob = wire_version(layout, memoryview(data), wire)
    assert bytes(data) != original
    _, manifest = version_of(data, layout)
    into = bytearray(b"\x55" * layout.nbytes)
    widen(manifest, memoryview(blob), memoryview(into))
    assert into == data
    damaged = bytearray(blob)
    damaged[-3] ^= 0x10
    with pytest.raises(Corrupt):
        widen(manifest, memoryview(damaged), memoryview(into))


def blob_of(tensors: list[tuple[str, str, tuple[int, ...], int]], facts: dict[str, str]) -> memoryview:
    return memoryview(encode_header(tensors, facts) + bytes(sum(n for *_, n in tensors)))


LORA = {"payload": "lora", "rank": "2", "alpha": "1.0", "base": "1", "base_digest": ""}
A = (f"{Q}.lora_A.weight", "float32", (2, 10), 80)


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (memoryview(b"short"), "5 bytes are no safetensors file"),
        (memoryview(bytes(8)), ""),
        (blob_of([], {"payload": "wire"}), "its kind is 'wire'"),
        (blob_of([], {**LORA, "rank": "0"}), "rank 0"),
        (blob_of([], {**LORA, "rank": "9" * 99}), "rank 9"),
        (blob_of([], {**LORA, "rank": "x"}), "rank: invalid"),
        (blob_of([], {**LORA, "alpha": "nan"}), "alpha nan"),
        (blob_of([A], LORA), "its other half is missing"),
        (blob_of([A, (f"{Q}.lora_B.weight", "float32", (24, 3), 288)], LORA), r"\[24, 3\] is not float32 of rank 2"),
        (blob_of([("x", "float32", (2,), 8)], LORA), "adapter x: its other half"),
    ],
)
def test_what_is_no_payload_of_adapters_is_refused(blob: memoryview, why: str) -> None:
    with pytest.raises(Corrupt, match=why or "header|kind"):
        decode_lora(blob)


WIRE = {"payload": "wire", "dtype": "float8_e4m3fn"}
W_LAYOUT = layout_of([("w", "float32", (2, 2), 16)])


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ([], r"tensor w on the wire: nothing came for \[2, 2\]"),
        ([("w", "bfloat16", (4,), 8)], r"bfloat16 \[4\] came for \[2, 2\]"),
        ([("w", "int32", (2, 2), 16)], "int32 came for float32"),
        ([("w", "float8_e4m3fn", (2, 2), 4)], "its scale is missing"),
        ([("w", "float8_e4m3fn", (2, 2), 4), ("w::scale", "float32", (), 4)], "its scale is 0.0"),
        ([("w", "float32", (2, 2), 16), ("v", "float32", (2, 2), 16)], "tensor v on the wire: the model has no such"),
    ],
)
def test_what_is_no_payload_of_the_model_is_refused(tensors: Any, why: str) -> None:
    with pytest.raises((Refused, Corrupt), match=why):
        decode_wire(blob_of(tensors, WIRE), W_LAYOUT, memoryview(bytearray(64)))


@given(st.binary(max_size=400), st.integers(0, 400))
@settings(max_examples=150, deadline=None)
def test_any_bytes_are_understood_or_refused(noise: bytes, at: int) -> None:
    good = bytearray(encode_lora(lora_of()))
    good[at : at + len(noise)] = noise
    for blob in (noise, bytes(good)):
        for read in (
            lambda b: decode_lora(memoryview(b)),
            lambda b: decode_wire(memoryview(b), W_LAYOUT, memoryview(bytearray(64))),
        ):
            try:
                read(blob)
            except RelaxError:
                pass
