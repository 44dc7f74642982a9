"""The server's tensors: their composition, checksums and hashes, and the private copy of a version."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from relax_rt.roles.rollout.engines.sglang.options import Device
from relax_rt.roles.rollout.engines.sglang.weights import (
    POSITION,
    ROTATED,
    SEEDS,
    TILE_WORDS,
    PrivateCopy,
    Recipe,
    by_expert,
    check_layout,
    checksums,
    compare,
    content_hash,
    published_tensors,
    recipes,
)
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, Gone, OutOfSpace, Refused
from relax_rt.transport.weights.manifest import Layout, Manifest, layout_of

TENSORS = {
    "model.embed_tokens.weight": (70, 4),  # padded to 128 rows; 1,120 bytes leave a gap
    "model.layers.0.self_attn.q_proj.weight": (4, 4),
    "model.layers.0.self_attn.k_proj.weight": (2, 4),
    "model.layers.0.self_attn.v_proj.weight": (2, 4),
    "model.layers.0.mlp.gate_proj.weight": (3, 4),
    "model.layers.0.mlp.up_proj.weight": (3, 4),
    "model.layers.0.mlp.down_proj.weight": (4, 3),
    "model.layers.0.mlp.experts.0.gate_proj.weight": (2, 4),
    "model.layers.0.mlp.experts.0.up_proj.weight": (2, 4),
    "model.layers.0.mlp.experts.0.down_proj.weight": (4, 2),
    "model.layers.0.mlp.experts.1.gate_proj.weight": (2, 4),
    "model.layers.0.mlp.experts.1.up_proj.weight": (2, 4),
    "model.layers.0.mlp.experts.1.down_proj.weight": (4, 2),
    "model.norm.weight": (4,),
}
SERVER = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.qkv_proj.weight",
    "model.layers.0.mlp.gate_up_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.0.mlp.experts.w13_weight",
    "model.layers.0.mlp.experts.w2_weight",
    "model.norm.weight",
)


def laid_out(tensors: dict[str, tuple[int, ...]] = TENSORS) -> Layout:
    return layout_of((name, "float32", shape, 4 * int(np.prod(shape))) for name, shape in tensors.items())


def filled(layout: Layout) -> tuple[bytearray, dict[str, np.ndarray]]:
    rng, data, arrays = np.random.default_rng(0), bytearray(layout.nbytes), {}
    for entry in layout.entries:
        arrays[entry.name] = rng.normal(size=entry.shape).astype(np.float32)
        data[entry.offset : entry.offset + entry.nbytes] = arrays[entry.name].tobytes()
    return data, arrays


class Source:
    """A source of bytes that may fail half-way."""

    def __init__(self, version: int, data: bytes, error: Exception | None = None, base: int = 0) -> None:
        self.manifest = Manifest(version, 1, "", laid_out(), (), "")
        if base:
            self.manifest = msgspec.structs.replace(self.manifest, payload="delta", base=base)
        self.record = VersionRecord(version, 0, 0)
        self._data, self._error = data, error

    def copy_into(self, into: memoryview) -> None:
        half = len(into) // 2
        into[:half] = self._data[:half]
        if self._error is not None:
            raise self._error
        into[half:] = self._data[half:]

    def mapped(self) -> None:
        raise NotImplementedError


def test_the_copy_is_a_safetensors_file(tmp_path: Path) -> None:
    data, arrays = filled(laid_out())
    copy = PrivateCopy(tmp_path / "weights")
    with copy.fill(Source(3, data)) as view:
        assert bytes(view) == bytes(data)
        with pytest.raises(TypeError):
            view[0] = 1
    assert copy.version == 3
    (path,) = copy.folder.iterdir()
    read = load_file(path)
    assert all(np.array_equal(read[name], array) for name, array in arrays.items())
    assert all(name.startswith("_gap_") for name in read.keys() - arrays.keys())
    assert path.stat().st_mode & 0o777 == 0o600
    copy.close()


def test_a_fetch_that_fails_leaves_no_version(tmp_path: Path) -> None:
    data, _ = filled(laid_out())
    copy = PrivateCopy(tmp_path)
    copy.fill(Source(3, data)).release()
    with pytest.raises(Gone):
        copy.fill(Source(4, bytes(len(data)), Gone("version 4")))
    assert copy.version == 0
    with pytest.raises(Refused, match="version 3, and version 0 lies here"):
        copy.fill(Source(4, data, base=3))
    copy.fill(Source(5, data)).release()
    copy.fill(Source(6, data, base=5)).release()
    assert copy.version == 6
    held = copy.view
    copy.close()
    held.release()
    assert not tmp_path.exists()


def test_no_room_for_the_copy_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OutOfSpace, match="enlarge /dev/shm"):
        PrivateCopy(tmp_path).fill(Source(1, b""))
    assert not [*tmp_path.iterdir()]


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def test_joined_tensors_are_their_consecutive_parts() -> None:
    layout = laid_out()
    data, a = filled(layout)
    # Recipes are made of names and shapes: before the first publication sizes in bytes are not known.
    made = recipes(SERVER, layout_of((e.name, e.dtype, e.shape, 0) for e in layout.entries))
    found = checksums(made, layout, memoryview(data))
    layer = "model.layers.0."
    qkv = [a[f"{layer}self_attn.{name}_proj.weight"] for name in "qkv"]
    experts = [[a[f"{layer}mlp.experts.{e}.{n}_proj.weight"] for n in ("gate", "up", "down")] for e in (0, 1)]
    embedding = np.concatenate([a["model.embed_tokens.weight"], np.zeros((58, 4), np.float32)])
    assert found == {
        "model.embed_tokens.weight": digest(embedding),
        f"{layer}self_attn.qkv_proj.weight": digest(np.concatenate(qkv)),
        f"{layer}mlp.gate_up_proj.weight": digest(a[f"{layer}mlp.gate_proj.weight"], a[f"{layer}mlp.up_proj.weight"]),
        f"{layer}mlp.down_proj.weight": digest(a[f"{layer}mlp.down_proj.weight"]),
        f"{layer}mlp.experts.w13_weight": digest(np.stack([np.concatenate([g, u]) for g, u, _ in experts])),
        f"{layer}mlp.experts.w2_weight": digest(np.stack([d for _, _, d in experts])),
        "model.norm.weight": digest(a["model.norm.weight"]),
    }


def test_stacked_experts_equal_single_ones() -> None:
    stacked = laid_out({"a": (3,), "l.0.mlp.experts.gate_up_proj": (2, 6, 4), "l.0.mlp.experts.down_proj": (2, 4, 3)})
    data, arrays = filled(stacked)
    entries = by_expert(stacked).entries
    names = [f"l.0.mlp.experts.{e}.{n}_proj.weight" for e in (0, 1) for n in ("gate", "up")]
    assert [e.name for e in entries] == ["a", *names, *(f"l.0.mlp.experts.{e}.down_proj.weight" for e in (0, 1))]
    found = {e.name: np.frombuffer(data, np.float32, e.nbytes // 4, e.offset).reshape(e.shape) for e in entries}
    both, down = arrays["l.0.mlp.experts.gate_up_proj"], arrays["l.0.mlp.experts.down_proj"]
    for e in (0, 1):
        assert np.array_equal(found[f"l.0.mlp.experts.{e}.gate_proj.weight"], both[e, :3])
        assert np.array_equal(found[f"l.0.mlp.experts.{e}.up_proj.weight"], both[e, 3:])
        assert np.array_equal(found[f"l.0.mlp.experts.{e}.down_proj.weight"], down[e])
    assert by_expert(laid_out()) == laid_out()


def test_unverifiable_tensors_are_refused() -> None:
    with pytest.raises(Refused, match=r"the server's tensor model.layers.0.mlp.odd and 1 more"):
        recipes([*SERVER, "model.layers.0.mlp.odd", "model.odder"], laid_out())
    with pytest.raises(Refused, match=r"published tensor model.norm.weight"):
        recipes(SERVER[:-1], laid_out())
    tied = laid_out(TENSORS | {"lm_head.weight": (70, 4)})
    assert recipes(SERVER, tied)["model.norm.weight"] == Recipe(("model.norm.weight",))


@pytest.mark.parametrize("reported", [{"a": "1", "b": "9"}, {"a": "1"}, {"a": "1", "b": "2", "c": "3"}, {}], ids=str)
def test_other_weights_on_the_server_are_detected(reported: dict[str, str]) -> None:
    expected = {"a": "1", "b": "2"}
    compare(expected, dict(expected), 4)
    with pytest.raises(Corrupt, match="policy version 4 on the SGLang server"):
        compare(expected, reported, 4)


def test_another_model_is_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    arrays = {name: np.zeros(shape, np.float16) for name, shape in TENSORS.items()}
    save_file(arrays, tmp_path / "model.safetensors")
    model = published_tensors(tmp_path, "float32")
    check_layout(laid_out(), model)
    for wrong in (
        {name: shape for name, shape in TENSORS.items() if name != "model.norm.weight"},
        TENSORS | {"model.norm.weight": (5,)},
        TENSORS | {"model.norm.bias": (4,)},
    ):
        with pytest.raises(Refused, match="do not fit this engine"):
            check_layout(laid_out(wrong), model)
    headed = published_tensors(tmp_path, "float32") | {"lm_head.weight": ("float32", (70, 4))}
    check_layout(laid_out(), headed)  # tied: a publication need not repeat it
    with pytest.raises(Refused, match=r"lm_head\.weight is missing"):
        check_layout(laid_out(), headed, {"lm_head.weight", "model.norm.weight"})
    with pytest.raises(Refused, match="bfloat16"):
        check_layout(laid_out(), published_tensors(tmp_path, "bfloat16"))


LOW = 0xFFFFFFFF


def mixed(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x85EBCA6B & LOW
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & LOW
    return x ^ (x >> 16)


def word_by_word(data: bytes) -> str:
    """The CUDA function as its kernel goes: a word at a time, in Python's integers."""
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[at : at + 4], "little") for at in range(0, len(data), 4)]
    total = 0
    for tile in range(0, len(words), TILE_WORDS):
        sums = [0, 0]
        for i in range(tile, min(tile + TILE_WORDS, len(words))):
            for k in (0, 1):
                rotated = (i << ROTATED[k] | i >> (32 - ROTATED[k])) & LOW
                sums[k] += mixed(words[i] ^ ((i * POSITION[k] + SEEDS[k]) & LOW) ^ rotated)
        high, low = (mixed((one & LOW) ^ (len(words) * 4 & LOW)) for one in sums)
        total += high << 32 | low
    total &= (1 << 64) - 1
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        total = (total ^ (total >> shift)) * factor & (1 << 64) - 1
    return f"{total ^ (total >> 31):016x}"


@pytest.mark.parametrize("size", [1, 4, 7, 4 * TILE_WORDS, 4 * TILE_WORDS + 2, 9 * TILE_WORDS + 40])
def test_hash_functions_match_the_reference(size: int) -> None:
    data = np.random.default_rng(size).bytes(size)
    assert content_hash([memoryview(data)], 0, "cpu") == hashlib.sha256(data).hexdigest()[:16]
    assert content_hash([memoryview(data)], 0, "cuda") == word_by_word(data)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_parts_and_padding_are_hashed_consecutively(device: Device) -> None:
    data = np.random.default_rng(1).bytes(5 * TILE_WORDS)
    view = memoryview(data + bytes(12))
    whole = content_hash([view], 0, device)
    assert content_hash([view[:1001], view[1001:-12]], 12, device) == whole
    for at in (0, 4 * TILE_WORDS, len(data) - 1):
        other = bytearray(view)
        other[at] ^= 1
        assert content_hash([memoryview(other)], 0, device) != whole
    swapped = bytes(view[4:8]) + bytes(view[:4]) + bytes(view[8:])
    assert content_hash([memoryview(swapped)], 0, device) != whole


def test_many_tiles_are_hashed_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    data = memoryview(np.random.default_rng(2).bytes(4 * TILE_WORDS * 5 + 8))
    whole = content_hash([data], 0, "cuda")
    monkeypatch.setattr("relax_rt.roles.rollout.engines.sglang.weights.TILES_AT_A_TIME", 2)
    assert content_hash([data], 0, "cuda") == whole
