"""A small model in a real engine, whose weights change when a test says so, and everything that it sampled."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from chat_fixtures import llama

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
SUITE = Path(__file__).resolve().parents[4] / "engines"
if str(SUITE) not in sys.path:
    sys.path.insert(0, str(SUITE))
pytest.register_assert_rewrite("harness")

from harness import MemorySource, model_of  # noqa: E402

from relax_rt.roles.agentic.tokens.parsers import Parsed, ToolCall  # noqa: E402
from relax_rt.roles.agentic.tokens.template import ChatTemplate  # noqa: E402
from relax_rt.roles.agentic.tokens.types import Tool  # noqa: E402
from relax_rt.roles.models.chat_template import written_arguments  # noqa: E402
from relax_rt.roles.rollout.engines.base import Assembly, Chunk, Completion, GroupRequest, KvPolicy  # noqa: E402
from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine  # noqa: E402
from relax_rt.roles.rollout.generation import GenerationService  # noqa: E402
from relax_rt.roles.rollout.router.core import (  # noqa: E402
    Deliver,
    GenerationRequest,
    Outcome,
    RequestState,
)
from relax_rt.roles.rollout.router.interface import SequenceRequest  # noqa: E402
from relax_rt.transport.base.versions import VersionRecord  # noqa: E402

CONTEXT = 2048
WEIGHTS = 3
"""Different ones; versions take turns with them."""


class Calling(ChatTemplate):
    """Takes some of what a model without sense says for tool calls."""

    def parse(self, text: str, tools: Sequence[Tool], *, prompt: str) -> Parsed:
        if tools and len(text) % 3 == 0:
            return Parsed("", calls=(ToolCall("add", written_arguments({"note": text, "a": 1})),))
        return super().parse(text, tools, prompt=prompt)


@cache
def chat() -> Calling:
    return Calling(llama())


def build(folder: Path, *, moe: bool = False, vocabulary: int = 0) -> Path:
    """A random Qwen3, or Qwen3-MoE, of a vocabulary, or the tokenizer's, whose distributions are far from even."""
    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": vocabulary or len(llama().raw),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.15,
    }
    transformers.utils.logging.disable_progress_bar()
    if moe:
        experts = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
        config = transformers.Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=False)
        transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    else:
        config = transformers.Qwen3Config(**shape, tie_word_embeddings=True)
        transformers.Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


class Gated(EmbeddedEngine):
    """Remembers what it was asked for, and stands still between two tokens after so many turns (None: never)."""

    def __init__(self, folder: Path, *, routing: bool) -> None:
        super().__init__(folder, dtype="float32", max_sequences=8, threads=1, routing=routing)
        self.left: int | None = None
        self.asked: dict[int, GroupRequest] = {}
        whole = self._decoder.step

        def turn() -> list[Chunk]:
            if self.left == 0:
                time.sleep(0.0005)
                return []
            if self.left is not None:
                self.left -= 1
            return whole()

        self._decoder.step = turn  # type: ignore[method-assign]

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        super().submit(requests)
        self.asked.update((request.id, request) for request in requests)


Asked = tuple[tuple[int, ...], int]
"""Prompt and seed of a sequence."""


@dataclass
class Sampled:
    """A completion as the engine told it itself, and the prompt that it was given."""

    prompt: tuple[int, ...]
    what: Completion


class World:
    """One engine for many conversations, reached as a router reaches it. Use `run` for what awaits."""

    def __init__(self, folder: Path, *, moe: bool = False) -> None:
        self.folder, self.moe = folder, moe
        self._runner = asyncio.Runner()
        self.engine = Gated(folder, routing=moe)
        self.service = GenerationService(1, self.engine, asyncio.Event())
        self.version = 0
        self.sampled: dict[Asked, Sampled] = {}
        """Completions; of a sequence that was taken away, what came of it in the end."""
        self.moved = 0
        self.move = 0
        """Tokens after which the next sequence is taken away and gone on with."""
        self._assembly = Assembly()
        self._last: dict[Asked, int] = {}
        self._ended: dict[int, Completion] = {}
        self._numbers = itertools.count(1)
        self.run(self.engine.start(self._arrive, self._fail))
        self.run(self.swap("keep"))

    def run(self, what: Any) -> Any:
        return self._runner.run(what)

    def close(self) -> None:
        self.run(self.engine.close(10.0))
        self._runner.close()

    def _arrive(self, chunks: list[Chunk]) -> None:
        for chunk in chunks:
            request = self.engine.asked[chunk.request]
            asked = (request.prompt, request.seeds[0])
            if self._assembly.had(request.id, 0) is None:
                self._expect(asked, request)
            done = self._assembly.add(chunk)
            if done is not None:
                self._ended[request.id] = done
            if done is not None and done.finish_reason != "abort":
                self.sampled[asked] = Sampled(request.prompt, done)
        assert self.service.take_chunks(chunks) == []

    def _expect(self, asked: Asked, request: GroupRequest) -> None:
        """What it goes on behind is what was sampled before it was taken away."""
        self._assembly.expect(request)
        if (partial := request.partial(0)) is not None:
            last = self._last[asked]
            had = self._ended.get(last) or self._assembly.had(last, 0)
            assert had is not None
            count = len(partial.tokens)
            assert count and list(partial.tokens) == had.tokens[:count]
            assert list(partial.logprobs) == had.logprobs[:count]
            assert partial.routing == bytes(had.routing[: len(partial.routing)])
        self._last[asked] = request.id

    def _fail(self, error: BaseException) -> None:
        raise error

    def model(self, version: int) -> Any:
        """As transformers has it."""
        return model_of(self.folder, 1 + version % WEIGHTS)

    async def swap(self, kv: KvPolicy) -> None:
        """The next version."""
        self.version += 1
        source = MemorySource(self.folder, 1 + self.version % WEIGHTS)
        source.manifest = msgspec.structs.replace(source.manifest, version=self.version)
        source.record = VersionRecord(self.version, self.version - 1, self.version, source.manifest.digest)
        await self.engine.prepare(source)
        await self.engine.commit(source.record, kv)

    async def until_it_stands(self, tasks: Sequence[asyncio.Task[Any]]) -> None:
        """It has no turn left, or there is nothing to do."""
        async with asyncio.timeout(120):
            while self.engine.left and not all(task.done() for task in tasks):  # noqa: ASYNC110 - a thread's number
                await asyncio.sleep(0.0005)

    async def stream(self, wanted: GenerationRequest) -> AsyncIterator[Deliver]:
        """The same in parts, as they come."""
        life = RequestState(next(self._numbers), wanted, 0.0, 3)
        life.assign(0.0, "rollout/0", 1)
        async with aclosing(self.service.generate(_order(life))) as pieces:
            async for piece in pieces:
                before = len(life.tokens)
                assert life.add(0.0, piece) == "" and not piece.rejected
                if piece.tokens:
                    told = (piece.tokens, piece.logprobs, piece.versions, piece.routing, piece.prompt_routing)
                    yield Deliver(life.number, before, *told)
                if life.outcome is not None:
                    return

    async def generate(self, wanted: GenerationRequest) -> Outcome:
        """What a router does, by its own account of a request's life."""
        life = RequestState(next(self._numbers), wanted, 0.0, 3)
        move, self.move = self.move, 0
        while life.outcome is None:
            life.assign(0.0, "rollout/0", 1)
            async with aclosing(self.service.generate(_order(life))) as stream:
                async for piece in stream:
                    assert life.add(0.0, piece) == "" and not piece.rejected
                    if life.outcome is not None or 0 < move <= len(life.tokens):
                        break
            if life.outcome is None:
                life.unassign("it is taken away")
                move, self.moved = 0, self.moved + 1
        return life.outcome


def _order(life: RequestState) -> SequenceRequest:
    wanted = life.wanted
    return SequenceRequest(
        prompt=list(wanted.prompt),
        seed=wanted.seed,
        temperature=wanted.temperature,
        max_new_tokens=wanted.max_new_tokens,
        stop_ids=sorted(wanted.stop_ids),
        tokens=list(life.tokens),
        logprobs=list(life.logprobs),
        versions=list(life.versions),
        routing=wanted.routing,
        rows_from=wanted.rows_from,
        rows=bytes(life.routing),
        allowed=[1],
        chunk_tokens=2,
        left_s=60.0,
    )
