"""The embedded engine's decoding: which sequences the next forward pass computes, their KV cache, and sampling.

`Decoder.step` is one step of continuous batching: admit waiting sequences (one prefill), then decode one token for each
active sequence. Rows of the cache are those of `Decoder.active`, in the same order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from relax_rt.roles.data.media.image_processor import has_vision
from relax_rt.roles.data.media.images import BatchImage
from relax_rt.roles.data.media.vision_tower import VisionTower, load_vision_model
from relax_rt.roles.models.forward import cache_keyword, check_forward
from relax_rt.roles.rollout.engines import attention
from relax_rt.roles.rollout.engines.attention import Segment, length_class, segments
from relax_rt.roles.rollout.engines.base import Chunk, GroupRequest, KvPolicy, extend_spans
from relax_rt.roles.rollout.engines.kv_cache import Fill, PrefixStore, SlotCache
from relax_rt.roles.rollout.engines.routing import RoutingShape, RowBuffer, canonical_rows, encode_rows, sparse_layers
from relax_rt.roles.rollout.engines.weights import FlatWeights
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused

PREFILL_TOKENS = 2048
"""Tokens computed in one forward pass besides decoding: bounds its memory and the pause it makes in decoding."""
BLOCK = 256
"""Probabilities are summed in blocks of so many; then only the block that a draw falls into is searched."""
WORK_FLOATS = 1 << 18
"""Logits that sampling works on at a time, so that they stay in a core's cache."""


class Computed(NamedTuple):
    """Result of a pass for one sequence: its last token's hidden state, and routing rows [tokens, layers, k]."""

    hidden: torch.Tensor
    rows: NDArray[np.int16] | None


class CachedPrompt(NamedTuple):
    """A computed prompt: its keys and values [2, layers, kv_heads, length, head_dim], and routing rows."""

    kv: torch.Tensor
    rows: NDArray[np.int16] | None


class Decoder:
    """A model, its KV cache and the sequences in it. Confined to one thread, except `weights.standby` between swaps.

    Prompts are distinguished by their `identity`: two with the same tokens may have different images.

    Args:
        routing: report routing rows.

    Raises:
        Refused: the model has parts that are not computed here, or has no routing rows.
    """

    def __init__(
        self,
        model_dir: Path,
        *,
        dtype: str,
        max_sequences: int,
        prefix_positions: int,
        device: str = "cpu",
        routing: bool = False,
    ) -> None:
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = torch.device(device)
        self.vision_tower: VisionTower | None = None
        if has_vision(model_dir):
            self._model, self.vision_tower = load_vision_model(model_dir, dtype=self.dtype, attention=attention.NAME)
        else:
            self._model = AutoModelForCausalLM.from_pretrained(
                model_dir, dtype=self.dtype, attn_implementation=attention.NAME
            ).eval()
        # Before `check_forward`, whose passes also test what the gates return.
        self._gates = GateHooks(self._model, model_dir) if routing else None
        self.routing = self._gates.shape if self._gates is not None else None
        if self.vision_tower is None:
            check_forward(self._model, model_dir)
        text = self._model.config.get_text_config()
        self.context = int(text.max_position_embeddings)
        self.vocabulary = int(text.vocab_size)
        head_dim = int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
        kv_heads = int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        layers = int(text.num_hidden_layers)
        self._cache = SlotCache(layers, max_sequences, kv_heads, head_dim, self.dtype, self.device)
        self._cache_keyword = cache_keyword(
            self._model.base_model if self.vision_tower is None else self.vision_tower.layers
        )
        self.weights = FlatWeights(self._model, self.dtype, self.device)
        self._model.to(self.device)  # buffers; the parameters are there
        self._prefixes: PrefixStore[CachedPrompt] = PrefixStore(prefix_positions)
        self._sample = Sampler(self.vocabulary, self.device)
        self.slots = max_sequences
        self.active: list[DecodedSequence] = []
        self.waiting: deque[DecodedSequence] = deque()
        self._ended: list[DecodedSequence] = []
        self.version = self.tokens = self.swaps = 0
        self.resolved = 0
        """Requested tokens that were sampled, or will never be."""

    def add(self, sequences: Iterable[DecodedSequence]) -> None:
        """Queue sequences; one that has all its tokens already ends in the next step."""
        for sequence in sequences:
            (self._ended if sequence.finish_reason else self.waiting).append(sequence)

    def abort(self, request: int) -> None:
        """End a request's sequences, tokens kept."""
        for sequence in [s for s in self.waiting if s.request.id == request]:
            self.waiting.remove(sequence)
            sequence.finish_reason = "abort"
            self._ended.append(sequence)
        for sequence in self.active:
            if sequence.request.id == request:
                sequence.finish_reason = sequence.finish_reason or "abort"
        self._retire()

    @property
    def idle(self) -> bool:
        """Whether there is nothing to compute and nothing to report."""
        return not (self.active or self.waiting or self._ended)

    def step(self) -> list[Chunk]:
        """Admit what fits, sample one token for every active sequence, and return the chunks that are due."""
        self._admit()
        self._retire()
        if self.active:
            self._decode()
        return self.report()

    def report(self, *, everything: bool = False) -> list[Chunk]:
        """Return chunks that are due; with `everything` also all unreported tokens of chunked requests."""
        self._retire()
        due = [s for s in self.active if s.is_due or (everything and s.has_unreported)]
        chunks = [s.chunk() for s in (*self._ended, *due)]
        self.resolved += sum(s.request.max_new_tokens - len(s.tokens) for s in self._ended)
        self._ended.clear()
        return chunks

    def swap(self, version: int, kv: KvPolicy) -> int:
        """Sample from the standby weights; return how many positions were recomputed."""
        self.weights.flip()
        self.version = version
        self.swaps += 1
        if kv != "recompute":
            return 0
        # The newest token's keys and values come with the next step. Routing rows stay those of the passes that the
        # tokens were sampled from.
        by_prompt = self._by_prompt(0)
        prompts = [Fill(row, 0, self.active[row].request.prompt) for row, *_ in by_prompt.values()]
        self._share_prompts(by_prompt, dict(zip(by_prompt, self._fill(prompts), strict=True)))
        completions = [
            Fill(row, len(s.request.prompt), s.tokens[:-1]) for row, s in enumerate(self.active) if len(s.tokens) > 1
        ]
        self._fill(completions)
        for sequence in self.active:
            sequence.kv_version = self.version
        return sum(len(f.tokens) for f in (*prompts, *completions))

    def release(self, *, keep_weights: bool = True) -> None:
        """Free the cache and the weights' second buffer, or both weight buffers."""
        self._cache.release()
        self._prefixes.clear()
        self.weights.release(keep=keep_weights)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    # --- prefill

    def _admit(self) -> None:
        """Move waiting sequences into free rows, as many as one prefill takes, and sample their first token."""
        new: list[DecodedSequence] = []
        prompts: set[tuple[int, ...]] = set()
        tokens = 0
        while self.waiting and len(self.active) + len(new) < self.slots:
            first = self.waiting[0]
            prompt = first.identity
            tokens += len(first.tokens) + (len(prompt) if prompt not in prompts else 0)
            if new and tokens > PREFILL_TOKENS:
                break
            prompts.add(prompt)
            new.append(self.waiting.popleft())
        if not new:
            return
        self._cache.reserve(max(len(s.request.prompt) + s.request.max_new_tokens for s in new))
        start = len(self.active)
        # Members of one prompt side by side, so that its KV is copied to all of them at once.
        new.sort(key=lambda s: s.identity)
        self.active += new
        computed = self._prefill(start)
        hidden = torch.stack([one.hidden for one in computed])
        self._append(new, self._head(hidden), [None if one.rows is None else one.rows[-1] for one in computed])
        self._order()

    def _prefill(self, start: int) -> list[Computed]:
        """Compute everything that the rows from `start` on have, each prompt once; return the result for each row."""
        by_prompt = self._by_prompt(start)
        fills: list[Fill] = []
        known_rows: list[NDArray[np.int16] | None] = []
        for row, *_ in by_prompt.values():
            sequence = self.active[row]
            prompt = sequence.request.prompt
            length, cached = self._prefixes.find(self.version, sequence.identity)
            if cached is None:
                fills.append(Fill(row, 0, prompt))
                known_rows.append(None)
            else:
                length = min(length, len(prompt) - 1)  # the last token's hidden state is needed
                self._cache.copy_in(row, cached.kv, length)
                fills.append(Fill(row, length, prompt[length:]))
                known_rows.append(None if cached.rows is None else cached.rows[:length])
        prompts: dict[tuple[int, ...], Computed] = {}
        for prompt, end, known in zip(by_prompt, self._fill(fills), known_rows, strict=True):
            rows = end.rows if known is None or end.rows is None else np.concatenate([known, end.rows])
            prompts[prompt] = Computed(end.hidden, rows)
        self._share_prompts(by_prompt, prompts)
        resumed = [row for row in range(start, len(self.active)) if self.active[row].tokens]
        fills = [Fill(row, len(self.active[row].request.prompt), self.active[row].tokens) for row in resumed]
        completions = dict(zip(resumed, self._fill(fills), strict=True))
        for sequence in self.active[start:]:
            sequence.kv_version = self.version
            sequence.set_prompt_rows(prompts[sequence.identity].rows)
        return [completions.get(row, prompts[self.active[row].identity]) for row in range(start, len(self.active))]

    def _by_prompt(self, start: int) -> dict[tuple[int, ...], list[int]]:
        """Group the rows from `start` on by their prompt."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for row in range(start, len(self.active)):
            rows.setdefault(self.active[row].identity, []).append(row)
        return rows

    def _share_prompts(
        self, by_prompt: dict[tuple[int, ...], list[int]], computed: dict[tuple[int, ...], Computed]
    ) -> None:
        """Copy each prompt from its first row, where it was computed, to its other rows, and into the prefix store."""
        for prompt, (first, *others) in by_prompt.items():
            length = len(prompt)
            if others == list(range(first + 1, first + 1 + len(others))):
                self._cache.share(first, slice(first + 1, first + 1 + len(others)), length)
            else:
                for other in others:
                    self._cache.move(first, other, length)

            def cached(row: int = first, length: int = length, rows: Any = computed[prompt].rows) -> CachedPrompt:
                # A copy of the rows: they are a view of what the whole pass chose.
                return CachedPrompt(self._cache.copy_out(row, length), None if rows is None else rows.copy())

            self._prefixes.put(self.version, prompt, cached)

    def _fill(self, fills: list[Fill]) -> list[Computed]:
        """Compute fills in passes of at most PREFILL_TOKENS padded tokens."""
        made: dict[int, Computed] = {}
        order = sorted(range(len(fills)), key=lambda i: (bool(fills[i].start), len(fills[i].tokens)))
        batch: list[int] = []
        for at, i in enumerate(order):
            batch.append(i)
            following = order[at + 1] if at + 1 < len(order) else None
            if (
                following is None
                or bool(fills[following].start) != bool(fills[i].start)
                or (len(batch) + 1) * len(fills[following].tokens) > PREFILL_TOKENS
            ):
                made.update(zip(batch, self._fill_pass([fills[j] for j in batch]), strict=True))
                batch = []
        return [made[i] for i in range(len(fills))]

    def _fill_pass(self, fills: list[Fill]) -> list[Computed]:
        longest = max(len(f.tokens) for f in fills)
        ids = torch.zeros(len(fills), longest, dtype=torch.long)
        for at, one in enumerate(fills):
            ids[at, : len(one.tokens)] = torch.tensor(one.tokens)
        positions = torch.tensor([f.start for f in fills])[:, None] + torch.arange(longest)
        self._cache.begin_fill(fills)
        mask = None
        # Without anything before them attention is causal, and no real token attends to the padding on the right.
        if any(f.start for f in fills):
            upto = max(f.start + len(f.tokens) for f in fills)
            visible = torch.arange(upto) <= positions[:, :, None]
            mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, float("-inf"))[:, None]
            mask = mask.to(self.device)
        # Padding may be beyond the last position that the model knows.
        positions.clamp_(max=self.context - 1)
        images = [
            BatchImage(at, span, one.start, one.start + len(one.tokens), -one.start)
            for at, one in enumerate(fills)
            for span in self.active[one.row].request.media
            if span.end > one.start and span.start < one.start + len(one.tokens)
        ]
        hidden = self._forward(ids, positions, mask, images)
        rows = self._gates.take(len(fills)) if self._gates is not None else None
        return [
            Computed(hidden[at, len(one.tokens) - 1], None if rows is None else rows[at, : len(one.tokens)])
            for at, one in enumerate(fills)
        ]

    # --- decode

    def _decode(self) -> None:
        """Sample one token for every active sequence."""
        running = self.active
        places = [s.position for s in running]
        positions = torch.tensor(places)
        ids = torch.tensor([[s.tokens[-1]] for s in running])
        masked: list[tuple[Segment, torch.Tensor]] = []
        for segment in segments([p + 1 for p in places]):
            beyond = torch.arange(segment.upto) > positions[segment.start : segment.end, None]
            mask = torch.zeros(beyond.shape, dtype=self.dtype).masked_fill_(beyond, float("-inf"))
            masked.append((segment, mask[:, None, None].to(self.device)))
        self._cache.begin_decode(positions.to(self.device))
        hidden = self._forward(ids, positions[:, None], None, segments=masked)
        rows: Iterable[NDArray[np.int16] | None] = [None] * len(running)
        if self._gates is not None:
            rows = self._gates.take(len(running))[:, 0]
        self._append(running, self._head(hidden[:, 0]), rows)
        if any(length_class(p + 1) != length_class(p + 2) for p in places):
            self._order()

    def _append(
        self, sequences: list[DecodedSequence], logits: torch.Tensor, rows: Iterable[NDArray[np.int16] | None]
    ) -> None:
        """Sample a token for each sequence."""
        temperatures = torch.tensor([s.request.temperature for s in sequences], dtype=torch.float32)
        uniforms = torch.tensor([s.uniform() for s in sequences], dtype=torch.float32)
        tokens, logprobs = self._sample(logits, temperatures.to(self.device), uniforms.to(self.device))
        for sequence, token, logprob, row in zip(sequences, tokens.tolist(), logprobs.tolist(), rows, strict=True):
            sequence.append(token, logprob, self.version, row)
        self.tokens += len(sequences)
        self.resolved += len(sequences)

    def _order(self) -> None:
        """Keep rows ordered by length class, longest first, so that rows of one class are adjacent (`segments`)."""
        classes = [length_class(s.position + 1) for s in self.active]
        for start in range(1, len(self.active)):
            row = start
            while row and classes[row - 1] < classes[row]:
                # Exchange it with the first row of the run before it.
                target = classes.index(classes[row - 1])
                one, other = self.active[row], self.active[target]
                self._cache.exchange(row, target, max(one.position, other.position))
                self.active[row], self.active[target] = other, one
                classes[row], classes[target] = classes[target], classes[row]
                row = target

    def _retire(self) -> None:
        """Remove ended sequences; the last row of each length class moves into the gap of its class."""
        row = 0
        while row < len(self.active):
            sequence = self.active[row]
            if not sequence.finish_reason:
                row += 1
                continue
            self._ended.append(sequence)
            gap = row
            while gap < len(self.active) - 1:
                length = length_class(self.active[gap + 1].position + 1)
                last = gap + 1
                while last + 1 < len(self.active) and length_class(self.active[last + 1].position + 1) == length:
                    last += 1
                self._cache.move(last, gap, self.active[last].position)
                self.active[gap], gap = self.active[last], last
            self.active.pop()

    # --- the model

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        images: Iterable[BatchImage] = (),
        **extra: Any,
    ) -> torch.Tensor:
        ids = ids.to(self.device)
        if self.vision_tower is None:
            layers, inputs = self._model.base_model, {"input_ids": ids}
        else:
            layers, inputs = self.vision_tower.layers, {"inputs_embeds": self.vision_tower.embed(ids, list(images))}
        out = layers(
            position_ids=positions.to(self.device),
            attention_mask=mask,
            use_cache=True,
            **{self._cache_keyword: self._cache},
            **inputs,
            **extra,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        head: Callable[[torch.Tensor], torch.Tensor] = self._model.get_output_embeddings()
        return head(hidden)


class DecodedSequence:
    """Tokens, log-probabilities and versions of one member of a group, and what of it has been reported.

    Attributes:
        identity: of its prompt; see GroupRequest.
        kv_version: the oldest version in its KV cache.
        rows: its routing rows; None if the request did not ask for them.
    """

    __slots__ = (
        "_uniforms",
        "finish_reason",
        "identity",
        "kv_version",
        "logprobs",
        "member",
        "reported",
        "request",
        "rows",
        "spans",
        "tokens",
    )

    def __init__(self, request: GroupRequest, member: int, routing: RoutingShape | None = None) -> None:
        self.request, self.member = request, member
        self.identity = request.identity()
        self._uniforms: NDArray[np.float32] | None = None
        self.kv_version = 0
        partial = request.partial(member)
        self.tokens: list[int] = list(partial.tokens) if partial else []
        self.logprobs: list[float] = list(partial.logprobs) if partial else []
        self.spans: list[VersionSpan] = list(partial.versions) if partial else []
        self.rows: RowBuffer | None = None
        if routing is not None and request.routing:
            self.rows = RowBuffer(routing, partial.routing if partial else b"")
        self.reported = len(self.tokens)
        self.finish_reason = ""
        self._check_finished()

    @property
    def position(self) -> int:
        """Position of the newest token in the whole sequence; the cache holds what is before it."""
        return len(self.request.prompt) + len(self.tokens) - 1

    @property
    def is_due(self) -> bool:
        """Whether a chunk must be reported."""
        every = self.request.chunk_tokens
        return bool(self.finish_reason) or (every > 0 and len(self.tokens) - self.reported >= every)

    @property
    def has_unreported(self) -> bool:
        """Whether some of its tokens could be reported before its end."""
        return self.request.chunk_tokens > 0 and self.reported < len(self.tokens)

    def uniform(self) -> float:
        """Return the draw for its next token."""
        if self._uniforms is None:
            self._uniforms = member_uniforms(self.request.seeds[self.member], self.request.max_new_tokens)
        return float(self._uniforms[len(self.tokens)])

    def set_prompt_rows(self, prompt: NDArray[np.int16] | None) -> None:
        """Set the prompt's routing rows [prompt, layers, k]; the last one comes with the first sampled token."""
        if self.rows is not None and prompt is not None:
            self.rows.set_prompt(encode_rows(prompt[self.request.rows_from : -1]))

    def append(self, token: int, logprob: float, version: int, row: NDArray[np.int16] | None = None) -> None:
        """Append a sampled token, with the routing row [layers, k] of the position that it was sampled at."""
        at = len(self.tokens)
        if self.rows is not None and row is not None:
            self.rows.extend(encode_rows(row))
        self.tokens.append(token)
        self.logprobs.append(logprob)
        extend_spans(self.spans, VersionSpan(at, at + 1, version, self.kv_version))
        self._check_finished()

    def chunk(self) -> Chunk:
        """Return what has not been reported, and count it as reported."""
        start, self.reported = self.reported, len(self.tokens)
        rows = self.rows
        return Chunk(
            self.request.id,
            self.member,
            start,
            self.tokens[start:],
            self.logprobs[start:],
            [VersionSpan(max(s.start, start), s.end, s.version, s.kv_version) for s in self.spans if s.end > start],
            self.finish_reason,
            rows.get(start, self.reported) if rows is not None else b"",
            rows.take_prompt() if rows is not None else b"",
        )

    def _check_finished(self) -> None:
        if self.tokens and self.tokens[-1] in self.request.stop_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.request.max_new_tokens:
            self.finish_reason = "length"


def member_uniforms(seed: int, count: int) -> NDArray[np.float32]:
    """Return a member's draws by position: the first ones do not depend on `count`."""
    return np.random.Generator(np.random.Philox(seed)).random(count, dtype=np.float32)


class Sampler:
    """Samples by inverting the cumulative distribution. Owns its working memory: one thread at a time."""

    def __init__(self, vocabulary: int, device: torch.device | None = None) -> None:
        self._vocabulary = vocabulary
        padded = -(-vocabulary // BLOCK) * BLOCK
        self._rows = max(1, WORK_FLOATS // padded)
        self._work = torch.empty(self._rows, padded, device=device)

    def __call__(
        self, logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sample one token a row.

        Args:
            logits: [rows, vocabulary], any float dtype.
            temperatures, uniforms: float32 [rows]; temperature 0 is greedy.

        Returns:
            tokens int64 [rows] and their log-probability float32 [rows] under log-softmax(logits / temperature), the
            distribution sampled from (greedy: at temperature 1).
        """
        greedy = temperatures == 0
        divisors = torch.where(greedy, torch.ones_like(temperatures), temperatures)[:, None]
        highest, sums = self._block_sums(logits, divisors)
        cumulative = sums.cumsum(-1)
        total = cumulative[:, -1:]
        # Rounding may put the draw at the total itself; the index found must have weight.
        target = (uniforms[:, None] * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
        block = torch.searchsorted(cumulative, target, right=True).clamp_(max=cumulative.shape[1] - 1)
        before = torch.where(block > 0, cumulative.gather(-1, (block - 1).clamp_(min=0)), torch.zeros_like(target))
        drawn = self._within_block(logits, divisors, highest, block, target - before)
        if bool(greedy.any()):
            drawn = torch.where(greedy[:, None], logits.argmax(-1, keepdim=True), drawn)
        chosen = logits.gather(-1, drawn).float() / divisors
        return drawn[:, 0], (chosen - highest - total.log())[:, 0]

    def _block_sums(self, logits: torch.Tensor, divisors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's highest scaled logit, and the sums of exp(scaled - highest) over each block."""
        rows, vocabulary = logits.shape
        highest = torch.empty(rows, 1, device=logits.device)
        sums = torch.empty(rows, self._work.shape[1] // BLOCK, device=logits.device)
        tempered = bool((divisors != 1).any())
        for start in range(0, rows, self._rows):
            part = slice(start, min(start + self._rows, rows))
            work = self._work[: part.stop - part.start]
            work[:, :vocabulary].copy_(logits[part])
            work[:, vocabulary:].fill_(-torch.inf)
            if tempered:
                work.div_(divisors[part])
            torch.amax(work, -1, keepdim=True, out=highest[part])
            work.sub_(highest[part]).exp_()
            torch.sum(work.view(len(work), -1, BLOCK), -1, out=sums[part])
        return highest, sums

    def _within_block(
        self,
        logits: torch.Tensor,
        divisors: torch.Tensor,
        highest: torch.Tensor,
        block: torch.Tensor,
        rest: torch.Tensor,
    ) -> torch.Tensor:
        """Return the index, in each row's block, at which the cumulative weight of the block exceeds `rest`."""
        indices = block * BLOCK + torch.arange(BLOCK, device=logits.device)
        inside = indices < self._vocabulary
        found = logits.gather(-1, indices.clamp(max=self._vocabulary - 1)).float()
        weights = torch.exp(found / divisors - highest).masked_fill_(~inside, 0.0)
        # The block's sum may differ by rounding from the difference of two running sums, so that `rest` exceeds it:
        # clamp to the last index with weight.
        last = BLOCK - 1 - (weights > 0).flip(-1).to(torch.uint8).argmax(-1, keepdim=True)
        at = torch.searchsorted(weights.cumsum(-1), rest.clamp_(min=0.0), right=True).minimum(last)
        return indices.gather(-1, at)


class GateHooks:
    """Hooks on the gates of a mixture of experts, which record the experts that each token is routed to.

    A gate of transformers returns logits, weights and the experts chosen, int64 [tokens, k]; a pass over
    [sequences, length] calls it once for all tokens, in that order. Confined to the thread that computes.

    Raises:
        Refused: the model is dense, or has no gates where they are expected.
    """

    def __init__(self, model: Any, folder: Path) -> None:
        self.shape, sparse = sparse_layers(folder)
        self._dense = [layer for layer, is_sparse in enumerate(sparse) if not is_sparse]
        self._chosen: dict[int, torch.Tensor] = {}
        for layer, block in enumerate(model.base_model.layers):
            if not sparse[layer]:
                continue
            gate = getattr(block.mlp, "gate", None)
            if not isinstance(gate, torch.nn.Module):
                raise Refused(
                    f"routing rows of the model in {folder}",
                    why=f"layer {layer} has no mlp.gate, by which this release of transformers would route",
                    hint="leave roles.rollout.routing out",
                )
            gate.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Any:
        def record(gate: torch.nn.Module, _: Any, output: Any) -> None:
            experts = output[-1] if isinstance(output, tuple) else output
            if experts.is_floating_point() or experts.shape[-1] != self.shape.chosen:
                raise Refused(
                    f"what {type(gate).__name__} of layer {layer} answers",
                    why=f"it ends with {experts.dtype} {list(experts.shape)}, not with {self.shape.chosen} experts",
                    hint="leave roles.rollout.routing out with this release of transformers",
                )
            self._chosen[layer] = experts

        return record

    def take(self, sequences: int) -> NDArray[np.int16]:
        """Return the experts chosen in the last pass, [sequences, length, layers, k], padding included."""
        chosen, self._chosen = self._chosen, {}
        tokens = next(iter(chosen.values())).shape[0]
        found = np.zeros((tokens, self.shape.layers, self.shape.chosen), np.int16)
        layers = list(chosen)
        found[:, layers] = torch.stack([chosen[layer] for layer in layers], dim=1).to(torch.int16).cpu().numpy()
        return canonical_rows(found, self._dense).reshape(sequences, -1, self.shape.layers, self.shape.chosen)
