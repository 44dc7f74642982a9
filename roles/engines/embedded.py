"""An engine inside the rollout process: continuous batching over a transformers causal language model."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from relax_rt.roles.engines.base import Completion, EngineLoad, GroupRequest, OnCompletion
from relax_rt.roles.engines.kv_cache import SlotCache
from relax_rt.roles.engines.weights import FlatWeights
from relax_rt.roles.numerics import denormals_flushed
from relax_rt.transport.errors import Refused
from relax_rt.transport.queue.api import VersionSpan

MAX_WAITING = 4096
"""Requests that may wait in the engine; callers bound themselves far below."""
PREFILL_TOKENS = 2048
"""Prompt tokens computed in one forward pass: bounds the memory of a prefill and the pause it makes in decoding."""
IDLE_WAIT_S = 0.5


def _grouped_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention without repeating keys and values for the heads that share them.

    In decode the query heads of one key head become query positions of one attention over that head, which reads the
    cache once instead of heads/kv_heads times. Shapes: query [b, heads, q, d], key and value [b, kv_heads, k, d].
    """
    batch, heads, length, dim = query.shape
    groups = heads // key.shape[1]
    if length == 1:
        grouped = query.reshape(batch, key.shape[1], groups, dim)
        out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
        return out.reshape(batch, 1, heads, dim), None
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("relax_rt_gqa", _grouped_query_attention)


@dataclass(slots=True)
class _Sequence:
    """One member of a group while it is generated."""

    request: GroupRequest
    member: int
    uniforms: np.ndarray
    kv_version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: str = ""

    @property
    def position(self) -> int:
        """Where the newest token stands in the whole sequence."""
        return len(self.request.prompt) + len(self.tokens) - 1

    def append(self, token: int, logprob: float, version: int) -> None:
        at = len(self.tokens)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.version, last.kv_version) == (version, self.kv_version):
            self.spans[-1] = VersionSpan(last.start, at + 1, version, self.kv_version)
        else:
            self.spans.append(VersionSpan(at, at + 1, version, self.kv_version))
        if token in self.request.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.request.max_new_tokens:
            self.finish_reason = "length"

    def completion(self) -> Completion:
        return Completion(
            self.request.id, self.member, self.tokens, self.logprobs, self.spans, self.finish_reason or "abort"
        )


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row by inverting the cumulative distribution at `uniforms`.

    Args:
        logits: [rows, vocabulary], any float dtype. temperatures, uniforms: float32 [rows]; temperature 0 is greedy.

    Returns:
        tokens int64 [rows] and their log-probability float32 [rows] under log-softmax(logits / temperature), the
        distribution drawn from (greedy: at temperature 1).
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
    logprobs = torch.log_softmax(scaled, -1)
    cumulative = logprobs.exp().cumsum(-1)
    # Rounding leaves the last entry slightly off 1; scaling the draw to it keeps every index in range.
    drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)
    if bool(greedy.any()):
        drawn = torch.where(greedy, scaled.argmax(-1), drawn)
    return drawn, logprobs.gather(-1, drawn[:, None])[:, 0]


class EmbeddedEngine:
    """Samples from a model held in this process, on its own thread.

    A group's prompt is computed once for all its members. Weights are swapped between two forward passes: sequences in
    flight keep their tokens and their KV cache, and later tokens carry the new version with the cache's older one.
    """

    def __init__(self, model_dir: Path, *, dtype: str, max_sequences: int, threads: int) -> None:
        torch.set_num_threads(threads)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._model = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=self._dtype, attn_implementation="relax_rt_gqa"
        ).eval()
        text = self._model.config.get_text_config()
        self.context = int(text.max_position_embeddings)
        self.vocabulary = int(text.vocab_size)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        self._cache = SlotCache(int(text.num_hidden_layers), max_sequences, kv_heads, head_dim, self._dtype)
        self.weights = FlatWeights(self._model, self._dtype)
        self._slots = max_sequences
        self._active: list[_Sequence] = []
        self._waiting: deque[GroupRequest] = deque()
        self._unstarted: list[GroupRequest] = []
        self._inbox: queue.Queue[Callable[[], None]] = queue.Queue(maxsize=MAX_WAITING)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._version = 0
        self._tokens = self._swaps = 0

    def start(self, on_completion: OnCompletion, on_failure: Callable[[BaseException], None]) -> None:
        self._thread = threading.Thread(
            target=self._loop, args=(on_completion, on_failure), name="relax-engine", daemon=True
        )
        self._thread.start()

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        for request in requests:
            need = len(request.prompt) + request.max_new_tokens
            if need > self.context:
                raise Refused(
                    f"request {request.id}: {len(request.prompt)} prompt + {request.max_new_tokens} new tokens",
                    why=f"the model's context is {self.context} tokens",
                    hint="lower sampling.max_new_tokens or data.max_prompt_tokens",
                )
            if len(request.seeds) > self._slots:
                raise Refused(
                    f"request {request.id}: a group of {len(request.seeds)}",
                    why=f"the engine decodes {self._slots} sequences at a time",
                    hint="raise roles.rollout.max_sequences",
                )
        self._call(lambda: self._waiting.extend(requests))

    def abort(self, request: int) -> None:
        self._call(lambda: self._abort(request))

    def swap(self, version: int, done: Callable[[], object]) -> None:
        """Make the weights in the standby buffer the ones sampled from, at the next token boundary; then call done."""

        def apply() -> None:
            self.weights.flip()
            self._version = version
            self._swaps += 1
            done()

        self._call(apply)

    def load(self) -> EngineLoad:
        return EngineLoad(self._version, len(self._active), len(self._waiting), self._tokens, self._swaps)

    def close(self, timeout_s: float) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _call(self, action: Callable[[], None]) -> None:
        try:
            self._inbox.put_nowait(action)
        except queue.Full:
            raise Refused(f"the engine's inbox holds {MAX_WAITING} requests", hint="submit fewer at a time") from None

    def _loop(self, on_completion: OnCompletion, on_failure: Callable[[BaseException], None]) -> None:
        try:
            with torch.inference_mode(), denormals_flushed():
                while not self._closing.is_set():
                    self._take_calls(block=not self._active and not self._waiting)
                    self._admit()
                    if self._active:
                        self._decode()
                    self._retire(on_completion)
        except BaseException as error:  # noqa: BLE001 - the thread's only way to tell its owner
            on_failure(error)

    def _take_calls(self, *, block: bool) -> None:
        try:
            self._inbox.get(block=block, timeout=IDLE_WAIT_S)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            return

    def _abort(self, request: int) -> None:
        for waiting in [r for r in self._waiting if r.id == request]:
            self._waiting.remove(waiting)
            self._unstarted.append(waiting)
        for sequence in self._active:
            if sequence.request.id == request:
                sequence.finish_reason = sequence.finish_reason or "abort"

    def _admit(self) -> None:
        """Move waiting groups into free slots, as many as one prefill takes."""
        groups: list[GroupRequest] = []
        free, tokens = self._slots - len(self._active), 0
        while self._waiting and len(self._waiting[0].seeds) <= free:
            tokens += len(self._waiting[0].prompt)
            if groups and tokens > PREFILL_TOKENS:
                break
            groups.append(self._waiting.popleft())
            free -= len(groups[-1].seeds)
        if groups:
            self._prefill(groups)

    def _prefill(self, groups: list[GroupRequest]) -> None:
        longest = max(len(g.prompt) for g in groups)
        ids = torch.zeros(len(groups), longest, dtype=torch.long)
        for row, group in enumerate(groups):
            ids[row, : len(group.prompt)] = torch.tensor(group.prompt)
        positions = torch.arange(longest)[None].expand(len(groups), -1)
        self._cache.reserve(max(len(g.prompt) + g.max_new_tokens for g in groups))
        self._cache.begin_prefill()
        # Prompts are padded on the right and attention is causal, so no real token sees the padding.
        hidden = self._forward(ids, positions, None)
        ends = torch.tensor([len(g.prompt) - 1 for g in groups])
        logits = self._head(hidden[torch.arange(len(groups)), ends])
        new: list[_Sequence] = []
        for row, group in enumerate(groups):
            first = len(self._active) + len(new)
            self._cache.adopt(row, len(group.prompt), slice(first, first + len(group.seeds)))
            for member, seed in enumerate(group.seeds):
                uniforms = np.random.Generator(np.random.Philox(seed)).random(group.max_new_tokens, dtype=np.float32)
                new.append(_Sequence(group, member, uniforms, self._version))
        self._cache.end_prefill()
        rows = torch.tensor([row for row, g in enumerate(groups) for _ in g.seeds])
        self._active += new
        self._extend(new, logits[rows])

    def _decode(self) -> None:
        running = [s for s in self._active if not s.finish_reason]
        if len(running) < len(self._active):
            return  # finished rows leave first
        positions = torch.tensor([s.position for s in running])
        ids = torch.tensor([[s.tokens[-1]] for s in running])
        self._cache.begin_decode(positions)
        upto = int(positions.max()) + 1
        visible = torch.arange(upto)[None] <= positions[:, None]
        mask = torch.zeros(len(running), 1, 1, upto, dtype=self._dtype).masked_fill_(
            ~visible[:, None, None], float("-inf")
        )
        hidden = self._forward(ids, positions[:, None], mask)
        self._extend(running, self._head(hidden[:, 0]))

    def _extend(self, sequences: list[_Sequence], logits: torch.Tensor) -> None:
        temperatures = torch.tensor([s.request.temperature for s in sequences], dtype=torch.float32)
        uniforms = torch.tensor([float(s.uniforms[len(s.tokens)]) for s in sequences], dtype=torch.float32)
        tokens, logprobs = sample(logits, temperatures, uniforms)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            sequence.append(token, logprob, self._version)
        self._tokens += len(sequences)

    def _retire(self, on_completion: OnCompletion) -> None:
        """Report finished rows; the last active row moves into each gap."""
        for request in self._unstarted:
            for member in range(len(request.seeds)):
                on_completion(_Sequence(request, member, np.empty(0), self._version).completion())
        self._unstarted.clear()
        row = 0
        while row < len(self._active):
            sequence = self._active[row]
            if not sequence.finish_reason:
                row += 1
                continue
            last = self._active.pop()
            if last is not sequence:
                self._active[row] = last
                self._cache.move(len(self._active), row, last.position)
            on_completion(sequence.completion())

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        out = self._model.base_model(
            input_ids=ids, position_ids=positions, attention_mask=mask, past_key_values=self._cache, use_cache=True
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model.get_output_embeddings()(hidden)
        return logits
