"""The work of the embedded engine's thread: which sequences the next forward pass computes, and what comes out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from relax_rt.roles.data.media.image_processor import has_vision
from relax_rt.roles.data.media.images import BatchImage
from relax_rt.roles.data.media.vision_tower import VisionTower, load_vision_model
from relax_rt.roles.models.forward import cache_keyword, check_plain
from relax_rt.roles.rollout.engines import attention
from relax_rt.roles.rollout.engines.attention import Segment, length_class, segments
from relax_rt.roles.rollout.engines.base import Chunk, KvPolicy
from relax_rt.roles.rollout.engines.gates import Gates
from relax_rt.roles.rollout.engines.kv_cache import Fill, PrefixStore, SlotCache
from relax_rt.roles.rollout.engines.sampling import Sampler
from relax_rt.roles.rollout.engines.sequences import Sequence
from relax_rt.roles.rollout.engines.weights import FlatWeights

PREFILL_TOKENS = 2048
"""Tokens computed in one forward pass besides decoding: bounds its memory and the pause it makes in decoding."""


class Computed(NamedTuple):
    """What a pass made of a sequence's tokens: the last one's hidden state, and routing rows [tokens, layers, k]."""

    hidden: torch.Tensor
    rows: NDArray[np.int16] | None


class Prefix(NamedTuple):
    """A prompt that was computed: its keys and values [2, layers, kv_heads, length, head_dim], and routing rows."""

    kv: torch.Tensor
    rows: NDArray[np.int16] | None


class Decoder:
    """A model, its cache and the sequences in it. Rows of the cache are those of `active`, in the same order.

    Confined to one thread, but for `weights.standby` between swaps. `turn` is one step: admit, then decode. Prompts are
    told apart by their `identity`: two with equal tokens may have other images.

    Args:
        routing: tell routing rows.

    Raises:
        Refused: the model is not computed whole here, or has no routing rows.
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
        # Before the check, whose passes show that the gates answer as they should.
        self._gates = Gates(self._model, model_dir) if routing else None
        self.routing = self._gates.shape if self._gates is not None else None
        if self.vision_tower is None:
            check_plain(self._model, model_dir)
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
        self._prefixes: PrefixStore[Prefix] = PrefixStore(prefix_positions)
        self._sample = Sampler(self.vocabulary, self.device)
        self.slots = max_sequences
        self.active: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self._ended: list[Sequence] = []
        self.version = self.tokens = self.swaps = 0
        self.settled = 0
        """Tokens that were asked for and sampled, or will not be."""

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Sequences that are to be generated; what has all its tokens already ends in the next turn."""
        for sequence in sequences:
            (self._ended if sequence.finish_reason else self.waiting).append(sequence)

    def abort(self, request: int) -> None:
        """End a request's sequences where they are."""
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
        """There is nothing to compute and nothing to report."""
        return not (self.active or self.waiting or self._ended)

    def turn(self) -> list[Chunk]:
        """Admit what fits, give every active sequence one token more, and tell what is to be told."""
        self._admit()
        self._retire()
        if self.active:
            self._decode()
        return self.report()

    def report(self, *, everything: bool = False) -> list[Chunk]:
        """Chunks that are due; with `everything` also what chunked requests have got since the last one."""
        self._retire()
        due = [s for s in self.active if s.due or (everything and s.untold)]
        chunks = [s.chunk() for s in (*self._ended, *due)]
        self.settled += sum(s.request.max_new_tokens - len(s.tokens) for s in self._ended)
        self._ended.clear()
        return chunks

    def swap(self, version: int, kv: KvPolicy) -> int:
        """Sample from the standby weights; returns how many positions were computed again."""
        self.weights.flip()
        self.version = version
        self.swaps += 1
        return self._recompute() if kv == "recompute" else 0

    def release(self, *, keep_weights: bool = True) -> None:
        """Let go of the cache and of the weights' second buffer, or of both their buffers."""
        self._cache.release()
        self._prefixes.clear()
        self.weights.release(keep=keep_weights)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _admit(self) -> None:
        """Move waiting sequences into free rows, as many as one prefill takes."""
        new: list[Sequence] = []
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
        computed = self._compute(start)
        hidden = torch.stack([one.hidden for one in computed])
        self._extend(new, self._head(hidden), [None if one.rows is None else one.rows[-1] for one in computed])
        self._order()

    def _compute(self, start: int) -> list[Computed]:
        """Keys and values of all that the rows from `start` on have, each prompt once; what came last of each."""
        rows = range(start, len(self.active))
        shared = self._by_prompt(start)
        begun = [self._from_prefix(members[0]) for members in shared.values()]
        ends = self._fill([fill for fill, _ in begun])
        whole = [Computed(end.hidden, _behind(before, end.rows)) for (_, before), end in zip(begun, ends, strict=True)]
        of_prompt = dict(zip(shared, whole, strict=True))
        self._hand_out(shared, of_prompt)
        resumed = [row for row in rows if self.active[row].tokens]
        fills = [Fill(row, len(self.active[row].request.prompt), self.active[row].tokens) for row in resumed]
        of_row = dict(zip(resumed, self._fill(fills), strict=True))
        for row in rows:
            sequence = self.active[row]
            sequence.kv_version = self.version
            sequence.begin(of_prompt[sequence.identity].rows)
        return [of_row.get(row, of_prompt[self.active[row].identity]) for row in rows]

    def _by_prompt(self, start: int) -> dict[tuple[int, ...], list[int]]:
        """The rows from `start` on, by their prompt."""
        rows: dict[tuple[int, ...], list[int]] = {}
        for row in range(start, len(self.active)):
            rows.setdefault(self.active[row].identity, []).append(row)
        return rows

    def _from_prefix(self, row: int) -> tuple[Fill, NDArray[np.int16] | None]:
        """What of its prompt is to be computed into a row, after what is known of its beginning has been put there, and
        the routing rows of that."""
        sequence = self.active[row]
        prompt = sequence.request.prompt
        length, held = self._prefixes.find(self.version, sequence.identity)
        if held is None:
            return Fill(row, 0, prompt), None
        length = min(length, len(prompt) - 1)  # the last token's hidden state is wanted
        self._cache.copy_in(row, held.kv, length)
        return Fill(row, length, prompt[length:]), None if held.rows is None else held.rows[:length]

    def _hand_out(self, shared: dict[tuple[int, ...], list[int]], computed: dict[tuple[int, ...], Computed]) -> None:
        """Copy each prompt from the first of its rows, into which it was computed, to the others, and keep it."""
        for prompt, (first, *others) in shared.items():
            if others == list(range(first + 1, first + 1 + len(others))):
                self._cache.share(first, slice(first + 1, first + 1 + len(others)), len(prompt))
            else:
                for other in others:
                    self._cache.move(first, other, len(prompt))
            self._prefixes.put(self.version, prompt, partial(self._kept, first, len(prompt), computed[prompt].rows))

    def _kept(self, row: int, length: int, rows: NDArray[np.int16] | None) -> Prefix:
        # A copy: they lie in what a whole pass has chosen.
        return Prefix(self._cache.copy_out(row, length), None if rows is None else rows.copy())

    def _fill(self, fills: list[Fill]) -> list[Computed]:
        """Compute them in passes of at most PREFILL_TOKENS padded tokens."""
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
                made.update(zip(batch, self._pass([fills[j] for j in batch]), strict=True))
                batch = []
        return [made[i] for i in range(len(fills))]

    def _pass(self, fills: list[Fill]) -> list[Computed]:
        longest = max(len(f.tokens) for f in fills)
        ids = torch.zeros(len(fills), longest, dtype=torch.long)
        for at, one in enumerate(fills):
            ids[at, : len(one.tokens)] = torch.tensor(one.tokens)
        starts = torch.tensor([f.start for f in fills])
        positions = starts[:, None] + torch.arange(longest)
        self._cache.begin_fill(fills)
        mask = None
        # Without anything before them attention is causal, and no real token sees the padding on the right.
        if any(f.start for f in fills):
            upto = max(f.start + len(f.tokens) for f in fills)
            visible = torch.arange(upto) <= positions[:, :, None]
            mask = torch.zeros(visible.shape, dtype=self.dtype).masked_fill_(~visible, float("-inf"))[:, None]
        # Padding may stand beyond the last position that the model knows.
        positions.clamp_(max=self.context - 1)
        hidden = self._forward(ids, positions, mask, images=self._glances(fills))
        rows = self._gates.take(len(fills)) if self._gates is not None else None
        return [
            Computed(hidden[at, len(one.tokens) - 1], None if rows is None else rows[at, : len(one.tokens)])
            for at, one in enumerate(fills)
        ]

    def _glances(self, fills: list[Fill]) -> list[BatchImage]:
        """The images, or parts of them, among the tokens of a pass."""
        return [
            BatchImage(at, span, one.start, one.start + len(one.tokens), -one.start)
            for at, one in enumerate(fills)
            for span in self.active[one.row].request.media
            if span.end > one.start and span.start < one.start + len(one.tokens)
        ]

    def _recompute(self) -> int:
        """Keys and values of all sequences under the present weights; the newest token's come with its step. Routing
        rows stay those of the passes that tokens were sampled from."""
        shared = self._by_prompt(0)
        prompts = [Fill(row, 0, self.active[row].request.prompt) for row, *_ in shared.values()]
        self._hand_out(shared, dict(zip(shared, self._fill(prompts), strict=True)))
        had = [
            Fill(row, len(s.request.prompt), s.tokens[:-1]) for row, s in enumerate(self.active) if len(s.tokens) > 1
        ]
        self._fill(had)
        for sequence in self.active:
            sequence.kv_version = self.version
        return sum(len(f.tokens) for f in (*prompts, *had))

    def _decode(self) -> None:
        """One token for every active sequence."""
        running = self.active
        places = [s.position for s in running]
        positions = torch.tensor(places)
        ids = torch.tensor([[s.tokens[-1]] for s in running])
        cut = segments([p + 1 for p in places])
        masked = [(s, self._mask(s, positions)) for s in cut]
        self._cache.begin_decode(positions.to(self.device))
        hidden = self._forward(ids, positions[:, None], None, segments=masked)
        rows: Iterable[NDArray[np.int16] | None] = [None] * len(running)
        if self._gates is not None:
            rows = self._gates.take(len(running))[:, 0]
        self._extend(running, self._head(hidden[:, 0]), rows)
        if any(length_class(p + 1) != length_class(p + 2) for p in places):
            self._order()

    def _mask(self, segment: Segment, positions: torch.Tensor) -> torch.Tensor:
        hidden = torch.arange(segment.upto) > positions[segment.start : segment.end, None]
        mask = torch.zeros(hidden.shape, dtype=self.dtype).masked_fill_(hidden, float("-inf"))
        return mask[:, None, None].to(self.device)

    def _extend(
        self, sequences: list[Sequence], logits: torch.Tensor, rows: Iterable[NDArray[np.int16] | None]
    ) -> None:
        temperatures = torch.tensor([s.request.temperature for s in sequences], dtype=torch.float32)
        uniforms = torch.tensor([s.uniform() for s in sequences], dtype=torch.float32)
        tokens, logprobs = self._sample(logits, temperatures.to(self.device), uniforms.to(self.device))
        for sequence, token, logprob, row in zip(sequences, tokens.tolist(), logprobs.tolist(), rows, strict=True):
            sequence.append(token, logprob, self.version, row)
        self.tokens += len(sequences)
        self.settled += len(sequences)

    def _order(self) -> None:
        """Keep rows ordered by class of length, longest first: then rows of one class lie together (`segments`)."""
        classes = [length_class(s.position + 1) for s in self.active]
        for start in range(1, len(self.active)):
            row = start
            while row and classes[row - 1] < classes[row]:
                # It changes places with the first of the run before it.
                target = classes.index(classes[row - 1])
                one, other = self.active[row], self.active[target]
                self._cache.exchange(row, target, max(one.position, other.position))
                self.active[row], self.active[target] = other, one
                classes[row], classes[target] = classes[target], classes[row]
                row = target

    def _retire(self) -> None:
        """Take out what has ended; the last row of each class of length moves into the gap of its class."""
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

    def _forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        *,
        images: Collection[BatchImage] = (),
        **rest: Any,
    ) -> torch.Tensor:
        ids = ids.to(self.device)
        if self.vision_tower is None:
            layers, rest = self._model.base_model, {**rest, "input_ids": ids}
        else:
            layers, rest = self.vision_tower.layers, {**rest, "inputs_embeds": self.vision_tower.embed(ids, images)}
        out = layers(
            position_ids=positions.to(self.device),
            attention_mask=None if mask is None else mask.to(self.device),
            use_cache=True,
            **{self._cache_keyword: self._cache},
            **rest,
        )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        head: Callable[[torch.Tensor], torch.Tensor] = self._model.get_output_embeddings()
        return head(hidden)


def _behind(before: NDArray[np.int16] | None, rows: NDArray[np.int16] | None) -> NDArray[np.int16] | None:
    """Rows of a prompt: those that are known of its beginning, then those of what was computed now."""
    return rows if before is None or rows is None else np.concatenate([before, rows])
