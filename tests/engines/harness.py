"""What the conformance suite runs an engine with: a small model, weights of many versions, and a reference."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from relax_rt.roles.data.media.image_processor import has_vision  # noqa: E402
from relax_rt.roles.rollout.engines.base import Assembly, Chunk, Completion, Engine, GroupRequest  # noqa: E402
from relax_rt.roles.rollout.engines.weights import model_layout  # noqa: E402
from relax_rt.transport.base.versions import VersionRecord  # noqa: E402
from relax_rt.transport.rpc.errors import Corrupt, Gone, RelaxError  # noqa: E402
from relax_rt.transport.weights.manifest import (  # noqa: E402
    Layout,
    Manifest,
    bucket_digest,
    bucket_slices,
    layout_of,
    total_digest,
)

VOCABULARY = 128
CONTEXT = 512
STOPS = frozenset([5, 6])
DEADLINE_S = 120.0


def build_model(folder: Path) -> Path:
    """A random Qwen3 whose distributions are far from even, so that a wrong log-probability shows."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        initializer_range=0.15,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def build_moe_model(folder: Path, dense: Sequence[int] = ()) -> Path:
    """A random Qwen3-MoE. Its head is its own: SGLang overlooks a tied one.

    Args:
        dense: layers without experts, which SGLang has none of.
    """
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        mlp_only_layers=list(dense),
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    transformers.utils.logging.disable_progress_bar()
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def routed(folder: Path, version: int, ids: Sequence[int]) -> Any:
    """Experts of each token but the last, int16 [tokens - 1, layers, k] in ascending order, -1 where a layer has none:
    by the router's logits of one plain forward pass of transformers."""
    model = model_of(folder, version)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    sparse = [layer for layer in range(model.config.num_hidden_layers) if layer not in model.config.mlp_only_layers]
    rows = torch.full((len(ids), model.config.num_hidden_layers, model.config.num_experts_per_tok), -1)
    for layer, of_layer in zip(sparse, logits, strict=True):
        rows[:, layer] = of_layer.topk(model.config.num_experts_per_tok, dim=-1).indices.sort(dim=-1).values
    return rows[:-1].to(torch.int16).numpy()


def replayed(model: Any, ids: Sequence[int], rows: Any, temperature: float) -> Any:
    """Log-probabilities of each token but the first, in one pass in which each position goes to the experts that its
    row says, whatever the gates would have chosen. The last one, which has no row, goes where it likes.

    Args:
        rows: int16 [tokens - 1, layers, k].
    """

    def goes_to(layer: int) -> Any:
        def hook(gate: Any, given: Any, chosen: Any) -> Any:
            logits, weights, experts = chosen
            experts = experts.clone()
            experts[: len(rows)] = torch.from_numpy(rows[:, layer].astype("int64"))
            weights = torch.softmax(logits.float(), -1).gather(-1, experts)
            if gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            return logits, weights.to(logits.dtype), experts

        return hook

    without = model.config.mlp_only_layers
    gates = [(n, layer.mlp.gate) for n, layer in enumerate(model.base_model.layers) if n not in without]
    hooks = [gate.register_forward_hook(goes_to(number)) for number, gate in gates]
    try:
        with torch.no_grad():
            logits = model(torch.tensor([list(ids)])).logits[0, :-1].float() / temperature
    finally:
        for hook in hooks:
            hook.remove()
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(list(ids[1:]))[:, None])[:, 0]


@cache
def model_of(folder: Path, version: int) -> Any:
    """The model as it is at a version: that of the folder, with noise of its own for each version above 0."""
    kind = transformers.AutoModelForImageTextToText if has_vision(folder) else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    noise = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            if version:
                parameter.add_(torch.randn(parameter.shape, generator=noise) * 0.3 * parameter.std(correction=0))
    return model


def reference(folder: Path, version: int, prompt: Sequence[int], tokens: Sequence[int], temperature: float) -> Any:
    """Log-probabilities of tokens behind a prompt, by one plain forward pass of transformers."""
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model_of(folder, version)(ids).logits[0, len(prompt) - 1 : -1] / (temperature or 1.0)
    return torch.log_softmax(logits, -1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]


class MemorySource:
    """A WeightSource over bytes of this process. `before` runs at the start of a copy, on the copying thread."""

    def __init__(self, folder: Path, version: int, before: Callable[[], None] = lambda: None) -> None:
        model = model_of(folder, version)
        layout = model_layout(model, torch.float32)
        self.data = bytearray(layout.nbytes)
        for entry, parameter in zip(layout.entries, model.parameters(), strict=True):
            raw = parameter.detach().contiguous().numpy().tobytes()
            self.data[entry.offset : entry.offset + entry.nbytes] = raw
        view = memoryview(self.data)
        buckets = tuple(bucket_digest(view[part]) for part in bucket_slices(layout.nbytes))
        self.manifest = Manifest(version, 1, "", layout, buckets, total_digest(buckets))
        self.record = VersionRecord(version, version - 1, version, self.manifest.digest)
        self._before = before

    def copy_into(self, into: memoryview) -> None:
        with self.mapped() as view:
            into[: len(view)] = view

    @contextmanager
    def mapped(self) -> Iterator[memoryview]:
        self._before()
        view = memoryview(self.data).toreadonly()
        for part, expected in zip(bucket_slices(len(view)), self.manifest.buckets, strict=True):
            if bucket_digest(view[part]) != expected:
                raise Corrupt(f"policy version {self.record.version}", why="a bucket has another digest")
        yield view


def damaged(folder: Path, version: int) -> MemorySource:
    """One bit differs from what was committed."""
    source = MemorySource(folder, version)
    source.data[len(source.data) // 2] ^= 1
    return source


def gone(folder: Path, version: int) -> MemorySource:
    """A newer version took its place."""

    def refuse() -> None:
        raise Gone(f"weights of policy version {version}", why="retired")

    return MemorySource(folder, version, refuse)


def of_another_shape(folder: Path, version: int) -> MemorySource:
    """A tensor has its axes exchanged."""
    source = MemorySource(folder, version)
    entries = source.manifest.layout.entries
    odd = next(e for e in entries if len(set(e.shape)) > 1)
    return _with_layout(source, [(e.name, e.dtype, e.shape[::-1] if e is odd else e.shape, e.nbytes) for e in entries])


def of_another_dtype(folder: Path, version: int) -> MemorySource:
    """A tensor is of half the precision."""
    source = MemorySource(folder, version)
    entries = source.manifest.layout.entries
    odd, halved = entries[len(entries) // 2], "bfloat16"
    return _with_layout(
        source,
        [
            (e.name, halved, e.shape, e.nbytes // 2) if e is odd else (e.name, e.dtype, e.shape, e.nbytes)
            for e in entries
        ],
    )


def renamed(folder: Path, version: int) -> MemorySource:
    """A tensor has another name."""
    source = MemorySource(folder, version)
    first, *rest = source.manifest.layout.entries
    return _with_layout(
        source, [(e.name + ("x" if e is first else ""), e.dtype, e.shape, e.nbytes) for e in (first, *rest)]
    )


def lacking(folder: Path, version: int) -> MemorySource:
    """A tensor is missing."""
    source = MemorySource(folder, version)
    return _with_layout(source, [(e.name, e.dtype, e.shape, e.nbytes) for e in source.manifest.layout.entries[:-1]])


def _with_layout(source: MemorySource, tensors: list[tuple[str, str, tuple[int, ...], int]]) -> MemorySource:
    layout: Layout = layout_of(tensors)
    del source.data[layout.nbytes :]
    view = memoryview(source.data)
    buckets = tuple(bucket_digest(view[part]) for part in bucket_slices(layout.nbytes))
    source.manifest = msgspec.structs.replace(
        source.manifest, layout=layout, buckets=buckets, digest=total_digest(buckets)
    )
    source.record = msgspec.structs.replace(source.record, digest=source.manifest.digest)
    return source


@dataclass
class Traits:
    """What an engine promises beyond the interface.

    Attributes:
        tolerance: of log-probabilities against a plain forward pass in float32.
        seeded: tokens depend on seed, position and weights alone.
        members: sequences it decodes at the same time; others wait.
    """

    tolerance: float = 1e-4
    seeded: bool = True
    members: int = 12


class Driver:
    """A started engine, its chunks put together, its versions counted. May serve several tests one after the other."""

    def __init__(self, engine: Engine, folder: Path, traits: Traits) -> None:
        self.engine, self.folder, self.traits = engine, folder, traits
        self.assembly = Assembly()
        self.chunks: list[Chunk] = []
        self.done: dict[tuple[int, int], Completion] = {}
        self.failure: BaseException | None = None
        self._numbers = itertools.count(1)
        self._versions = itertools.count(1)
        self._changed = asyncio.Event()
        self.loop_thread = threading.get_ident()

    async def start(self) -> Driver:
        await self.engine.start(self._arrive, self._fail)
        return self

    @property
    def version(self) -> int:
        """What the engine samples from."""
        return self.engine.load().version

    def request(self, prompt: Sequence[int], n: int = 1, new: int = 12, **rest: Any) -> GroupRequest:
        """A request with a number of its own."""
        number = next(self._numbers)
        values: dict[str, Any] = {
            "temperature": 1.0,
            "stop_ids": STOPS,
            "seeds": tuple(1000 * number + i for i in range(n)),
        }
        return GroupRequest(id=number, prompt=tuple(prompt), max_new_tokens=new, **(values | rest))

    def submit(self, *requests: GroupRequest) -> None:
        self.engine.submit(requests)
        for request in requests:
            self.assembly.expect(request)

    async def complete(self, *requests: GroupRequest) -> list[Completion]:
        """Submit these and wait for all members, in order."""
        self.submit(*requests)
        return await self.finished(*requests)

    async def finished(self, *requests: GroupRequest) -> list[Completion]:
        keys = [(r.id, m) for r in requests for m in range(len(r.seeds))]
        await self.until(lambda: all(key in self.done for key in keys))
        return [self.done[key] for key in keys]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for what chunks or tokens bring about; raises what ended the engine."""

        async def watch() -> None:
            while not condition():
                if self.failure is not None:
                    raise self.failure
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.005)
                except TimeoutError:
                    pass

        await asyncio.wait_for(watch(), DEADLINE_S)

    async def tokens(self, more: int) -> None:
        """Wait until so many tokens more have been generated."""
        wanted = self.engine.load().tokens_generated + more
        await self.until(lambda: self.engine.load().tokens_generated >= wanted)

    def source(self, make: Callable[[Path, int], MemorySource] = MemorySource) -> MemorySource:
        """Weights of the next version."""
        number = next(self._versions)
        while number <= self.version:
            number = next(self._versions)
        return make(self.folder, number)

    def check(self, request: GroupRequest, completion: Completion) -> float:
        """A completion is whole, and each token has the log-probability that its version gives it; the worst gap.

        Tokens that were sampled on a cache of older weights are left out: no single version reproduces theirs.
        """
        spans, tokens = completion.versions, completion.tokens
        assert len(completion.logprobs) == len(tokens) <= request.max_new_tokens
        assert [s.start for s in spans] == [0, *(s.end for s in spans)][: len(spans)]
        assert (spans[-1].end if spans else 0) == len(tokens)
        worst = 0.0
        for span in spans:
            assert span.kv_version <= span.version
            if span.kv_version == span.version:
                wanted = reference(self.folder, span.version, request.prompt, tokens, request.temperature)
                got = torch.tensor(completion.logprobs)
                worst = max(worst, float((got - wanted)[span.start : span.end].abs().max()))
        assert worst <= self.traits.tolerance, f"log-probabilities differ by {worst:.2e}"
        return worst

    def _arrive(self, chunks: list[Chunk]) -> None:
        assert threading.get_ident() == self.loop_thread, "chunks are delivered on the event loop"
        for chunk in chunks:
            self.chunks.append(chunk)
            completion = self.assembly.add(chunk)
            if completion is not None:
                key = (completion.request, completion.member)
                assert key not in self.done, f"{key} ended twice"
                self.done[key] = completion
        self._changed.set()

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._changed.set()


async def raises(kind: type[RelaxError], call: Awaitable[Any]) -> None:
    """The call raises an error of this kind that says why."""
    with pytest.raises(kind) as caught:
        await call
    assert caught.value.what
