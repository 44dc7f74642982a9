"""What each rank of a Megatron-Core gang holds, and which rows of which Hugging Face tensors that is. No tensors here.

Every tensor is a matrix of rows and columns: a vector has one column, a stack of matrices has them below each other.
A local tensor is a list of runs of rows, each from one Hugging Face tensor, over one range of columns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import msgspec

from relax_rt.roles.models.parallel import ParallelSizes
from relax_rt.roles.models.shape import ModelShape
from relax_rt.transport.rpc.errors import Refused

_GROUPED = re.compile(r"\.mlp\.experts\.linear_fc[12]\.(weight|bias)\d+$")
_STACKED = re.compile(r"\.mlp\.experts\.weight[12]$")


class Naming(msgspec.Struct, frozen=True):
    """How a Megatron-Core layer specification names its parameters.

    Attributes:
        fused_norms: norms belong to the linear layer behind them, as with TransformerEngine; else they stand alone.
        grouped_experts: one module has the experts' weights by number (``weight7``); else each expert is a module.
    """

    fused_norms: bool = False
    grouped_experts: bool = False


def naming_of(names: Collection[str]) -> Naming:
    """The naming that a rank's parameters follow.

    Raises:
        Refused: experts are stacked into one transposed tensor, which Megatron-Core has given up.
    """
    if stacked := next((name for name in names if _STACKED.search(name)), ""):
        raise Refused(
            f"parameter {stacked}",
            why="experts stacked into one tensor are not resharded",
            hint="use the grouped experts of TransformerEngine, or moe_grouped_gemm = False",
        )
    return Naming(
        fused_norms=any(name.endswith("linear_qkv.layer_norm_weight") for name in names),
        grouped_experts=any(_GROUPED.search(name) for name in names),
    )


class ModelDivision(msgspec.Struct, frozen=True, kw_only=True):
    """How a model lies on the ranks of a gang.

    Attributes:
        virtual: model chunks of each pipeline stage (interleaved schedule).
        first_layers, last_layers: layers of the first and last stage where they differ from the others; 0: they don't.
        padded_vocabulary: rows of the embedding as Megatron padded it, over all ranks; 0: not padded.
    """

    sizes: ParallelSizes
    naming: Naming = Naming()
    virtual: int = 1
    first_layers: int = 0
    last_layers: int = 0
    padded_vocabulary: int = 0

    def layers(self, total: int, stage: int, chunk: int) -> range:
        """The layers, by their numbers in the whole model, of a stage's chunk."""
        stages = self.sizes.pipeline
        if self.virtual > 1:
            each = total // (stages * self.virtual)
            start = chunk * (total // self.virtual) + stage * each
            return range(start, start + each)
        sizes = self._stage_sizes(total)
        return range(sum(sizes[:stage]), sum(sizes[: stage + 1]))

    def _stage_sizes(self, total: int) -> list[int]:
        stages = self.sizes.pipeline
        ends = [self.first_layers, self.last_layers] if stages > 1 else [0, 0]
        even = stages - sum(1 for end in ends if end)
        each = (total - sum(ends)) // even if even else 0
        sizes = [each] * stages
        if ends[0]:
            sizes[0] = ends[0]
        if ends[1]:
            sizes[-1] = ends[1]
        return sizes

    def check(self, shape: ModelShape) -> None:
        """Raises:
        Refused: the model cannot lie on ranks in this way.
        """
        sizes = self.sizes
        vocabulary = self.padded_vocabulary or shape.vocabulary
        qkv = shape.query + 2 * shape.key
        for what, total, name, parts in (
            ("rows of query, key and value", qkv, "tensor", sizes.tensor),
            ("columns of the output projection", shape.query, "tensor", sizes.tensor),
            ("rows of the padded vocabulary", vocabulary, "tensor", sizes.tensor),
            ("inner width of the MLP", 0 if all(shape.sparse) else shape.ffn, "tensor", sizes.tensor),
            ("experts", shape.experts, "expert", sizes.expert),
            ("inner width of an expert", shape.expert_ffn, "expert_tensor", sizes.expert_tensor),
            ("ranks", sizes.world, "dense model", sizes.model_ranks),
            ("ranks", sizes.world, "expert", sizes.expert_ranks if shape.experts else 1),
        ):
            if total % parts:
                raise Refused(f"{total} {what} over {name} = {parts}", why="they do not divide evenly")
        if vocabulary < shape.vocabulary:
            raise Refused(f"padded_vocabulary = {vocabulary}", why=f"the model has {shape.vocabulary} tokens")
        if shape.value_head:
            raise Refused("weights of a critic", why="a value head is not published to engines")
        stages, layers = self.sizes.pipeline, shape.layers
        if self.virtual > 1 and (self.first_layers or self.last_layers):
            raise Refused("first_layers or last_layers with virtual stages", why="they are not resharded together")
        if self.virtual > 1 and layers % (stages * self.virtual):
            raise Refused(f"{layers} layers over {stages} stages of {self.virtual} chunks", why="they do not divide")
        if self.virtual == 1 and (sum(self._stage_sizes(layers)) != layers or min(self._stage_sizes(layers)) < 1):
            raise Refused(f"{layers} layers over {stages} stages", why="they do not divide evenly")


class HfTensor(NamedTuple):
    """A tensor of the Hugging Face model."""

    name: str
    shape: tuple[int, ...]

    @property
    def rows(self) -> int:
        """As a matrix."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    @property
    def columns(self) -> int:
        """As a matrix."""
        return self.shape[-1] if len(self.shape) > 1 else 1


def hf_tensors(shape: ModelShape, *, stacked_experts: bool = False) -> Iterator[HfTensor]:
    """The model's tensors in the order of transformers' parameters; a tied embedding once.

    stacked_experts: experts as one tensor a layer, as transformers has them in memory; else as in checkpoints.
    """
    yield HfTensor("model.embed_tokens.weight", (shape.vocabulary, shape.hidden))
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, size in _layer_targets(shape, shape.sparse[layer], stacked_experts):
            yield HfTensor(prefix + name, size)
    yield HfTensor("model.norm.weight", (shape.hidden,))
    if not shape.tied:
        yield HfTensor("lm_head.weight", (shape.vocabulary, shape.hidden))


def _layer_targets(shape: ModelShape, sparse: bool, stacked: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, head = shape.hidden, (shape.head_dim,)
    for name, rows in (("q_proj", shape.query), ("k_proj", shape.key), ("v_proj", shape.key)):
        yield f"self_attn.{name}.weight", (rows, hidden)
        if shape.qkv_bias:
            yield f"self_attn.{name}.bias", (rows,)
    yield "self_attn.o_proj.weight", (hidden, shape.query)
    if shape.out_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if shape.qk_norm:
        yield "self_attn.q_norm.weight", head
        yield "self_attn.k_norm.weight", head
    if sparse:
        yield from _expert_targets(shape, stacked)
    else:
        for name, rows, columns in (
            ("gate_proj", shape.ffn, hidden),
            ("up_proj", shape.ffn, hidden),
            ("down_proj", hidden, shape.ffn),
        ):
            yield f"mlp.{name}.weight", (rows, columns)
            if shape.mlp_bias:
                yield f"mlp.{name}.bias", (rows,)
    yield "input_layernorm.weight", (hidden,)
    yield "post_attention_layernorm.weight", (hidden,)


def _expert_targets(shape: ModelShape, stacked: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn = shape.hidden, shape.expert_ffn
    if stacked:
        yield "mlp.experts.gate_up_proj", (shape.experts, 2 * ffn, hidden)
        yield "mlp.experts.down_proj", (shape.experts, hidden, ffn)
    else:
        for expert in range(shape.experts):
            yield f"mlp.experts.{expert}.gate_proj.weight", (ffn, hidden)
            yield f"mlp.experts.{expert}.up_proj.weight", (ffn, hidden)
            yield f"mlp.experts.{expert}.down_proj.weight", (hidden, ffn)
    yield "mlp.gate.weight", (shape.experts, hidden)


class RowRun(NamedTuple):
    """`rows` rows of a local tensor from `local` on are those of tensor `name` from `row` on."""

    local: int
    name: str
    row: int
    rows: int


class LocalParameter(NamedTuple):
    """A parameter that a rank holds.

    Attributes:
        chunk: of which of the rank's model chunks it is a parameter.
        shape: of the parameter itself.
        column: which column of the Hugging Face tensor its first one is.
        runs: where its rows belong; rows of padding belong nowhere.
        whole: every rank of the stage (or of the experts' part) holds the same.
    """

    chunk: int
    name: str
    shape: tuple[int, ...]
    column: int
    runs: tuple[RowRun, ...]
    whole: bool = False

    @property
    def columns(self) -> int:
        """As a matrix."""
        return self.shape[1] if len(self.shape) > 1 else 1


class ShardPosition(NamedTuple):
    """Which part of a stage a rank holds: its place along the kinds that cut the model."""

    stage: int
    tensor: int = 0
    expert: int = 0
    expert_tensor: int = 0


class RankParameters:
    """The parameters of a rank, by the model's shape and its division over ranks."""

    def __init__(self, shape: ModelShape, division: ModelDivision, *, stacked_experts: bool = False) -> None:
        division.check(shape)
        self._shape, self._division, self._stacked = shape, division, stacked_experts

    def dense(self, at: ShardPosition) -> Iterator[LocalParameter]:
        """All but experts; depends on the stage and the place along `tensor`."""
        for chunk in range(self._division.virtual):
            layers = self._division.layers(self._shape.layers, at.stage, chunk)
            if at.stage == 0 and chunk == 0:
                yield self._vocabulary(chunk, "embedding.word_embeddings.weight", "model.embed_tokens.weight", at)
            for local, layer in enumerate(layers):
                yield from self._attention(chunk, f"decoder.layers.{local}.", f"model.layers.{layer}.", at)
                yield from self._mlp(chunk, f"decoder.layers.{local}.", f"model.layers.{layer}.", layer, at)
            if at.stage == self._division.sizes.pipeline - 1 and chunk == self._division.virtual - 1:
                yield self._vector(chunk, "decoder.final_layernorm.weight", "model.norm.weight", self._shape.hidden)
                if not self._shape.tied:
                    yield self._vocabulary(chunk, "output_layer.weight", "lm_head.weight", at)

    def experts(self, at: ShardPosition) -> Iterator[LocalParameter]:
        """Experts; depends on the stage and the places along `expert` and `expert_tensor`."""
        for chunk in range(self._division.virtual):
            for local, layer in enumerate(self._division.layers(self._shape.layers, at.stage, chunk)):
                if self._shape.sparse[layer]:
                    here = f"decoder.layers.{local}.mlp.experts."
                    yield from self._experts(chunk, here, f"model.layers.{layer}.mlp.experts.", at)

    @property
    def unused(self) -> frozenset[str]:
        """Parameters that may be there and are not published: the last stage's copy of a tied embedding."""
        return frozenset(("output_layer.weight",)) if self._shape.tied else frozenset()

    def _vector(self, chunk: int, name: str, target: str, rows: int) -> LocalParameter:
        return LocalParameter(chunk, name, (rows,), 0, (RowRun(0, target, 0, rows),), whole=True)

    def _vocabulary(self, chunk: int, name: str, target: str, at: ShardPosition) -> LocalParameter:
        shape = self._shape
        rows = (self._division.padded_vocabulary or shape.vocabulary) // self._division.sizes.tensor
        first = at.tensor * rows
        real = max(0, min(rows, shape.vocabulary - first))
        runs = (RowRun(0, target, first, real),) if real else ()
        return LocalParameter(chunk, name, (rows, shape.hidden), 0, runs)

    def _attention(self, chunk: int, here: str, there: str, at: ShardPosition) -> Iterator[LocalParameter]:
        shape, sizes = self._shape, self._division.sizes
        linear = f"{here}self_attention.linear_qkv."
        norm = f"{linear}layer_norm_weight" if self._division.naming.fused_norms else f"{here}input_layernorm.weight"
        yield self._vector(chunk, norm, f"{there}input_layernorm.weight", shape.hidden)
        rows = (shape.query + 2 * shape.key) // sizes.tensor
        mine = range(at.tensor * rows, (at.tensor + 1) * rows)
        yield LocalParameter(
            chunk, f"{linear}weight", (rows, shape.hidden), 0, tuple(self._qkv(f"{there}self_attn.", "weight", mine))
        )
        if shape.qkv_bias:
            yield LocalParameter(
                chunk, f"{linear}bias", (rows,), 0, tuple(self._qkv(f"{there}self_attn.", "bias", mine))
            )
        if shape.qk_norm:
            for kind in "qk":
                name = f"{here}self_attention.{kind}_layernorm.weight"
                yield self._vector(chunk, name, f"{there}self_attn.{kind}_norm.weight", shape.head_dim)
        columns = shape.query // sizes.tensor
        name, target = f"{here}self_attention.linear_proj.", f"{there}self_attn.o_proj."
        yield LocalParameter(
            chunk,
            f"{name}weight",
            (shape.hidden, columns),
            at.tensor * columns,
            (RowRun(0, f"{target}weight", 0, shape.hidden),),
        )
        if shape.out_bias:
            yield self._vector(chunk, f"{name}bias", f"{target}bias", shape.hidden)

    def _qkv(self, there: str, kind: str, mine: range) -> Iterator[RowRun]:
        """Megatron's fused rows: for each group of query heads these heads, then its key, then its value head.

        With more ranks than groups a rank's part begins or ends inside one.
        """
        shape = self._shape
        queries = shape.query // shape.kv_heads
        fused = 0
        for group in range(shape.kv_heads):
            for name, row, rows in (
                ("q_proj", group * queries, queries),
                ("k_proj", group * shape.head_dim, shape.head_dim),
                ("v_proj", group * shape.head_dim, shape.head_dim),
            ):
                start, stop = max(fused, mine.start), min(fused + rows, mine.stop)
                if start < stop:
                    yield RowRun(start - mine.start, f"{there}{name}.{kind}", row + start - fused, stop - start)
                fused += rows

    def _mlp(self, chunk: int, here: str, there: str, layer: int, at: ShardPosition) -> Iterator[LocalParameter]:
        shape = self._shape
        sparse = shape.sparse[layer]
        fused = self._division.naming.fused_norms and not sparse
        norm = f"{here}mlp.linear_fc1.layer_norm_weight" if fused else f"{here}pre_mlp_layernorm.weight"
        yield self._vector(chunk, norm, f"{there}post_attention_layernorm.weight", shape.hidden)
        if sparse:
            size = (shape.experts, shape.hidden)
            run = RowRun(0, f"{there}mlp.gate.weight", 0, shape.experts)
            yield LocalParameter(chunk, f"{here}mlp.router.weight", size, 0, (run,), whole=True)
            return
        each = shape.ffn // self._division.sizes.tensor
        first = at.tensor * each
        for kind, width in (("weight", (shape.hidden,)), *([("bias", ())] if shape.mlp_bias else [])):
            runs = (
                RowRun(0, f"{there}mlp.gate_proj.{kind}", first, each),
                RowRun(each, f"{there}mlp.up_proj.{kind}", first, each),
            )
            yield LocalParameter(chunk, f"{here}mlp.linear_fc1.{kind}", (2 * each, *width), 0, runs)
        run = RowRun(0, f"{there}mlp.down_proj.weight", 0, shape.hidden)
        yield LocalParameter(chunk, f"{here}mlp.linear_fc2.weight", (shape.hidden, each), first, (run,))
        if shape.mlp_bias:
            yield self._vector(chunk, f"{here}mlp.linear_fc2.bias", f"{there}mlp.down_proj.bias", shape.hidden)

    def _experts(self, chunk: int, here: str, there: str, at: ShardPosition) -> Iterator[LocalParameter]:
        shape, sizes = self._shape, self._division.sizes
        mine, each = shape.experts // sizes.expert, shape.expert_ffn // sizes.expert_tensor
        first = at.expert_tensor * each
        for local in range(mine):
            expert = at.expert * mine + local
            gate, up, down = self._expert_runs(there, expert, first, each)
            first_name, second_name = (
                (f"{here}linear_fc1.weight{local}", f"{here}linear_fc2.weight{local}")
                if self._division.naming.grouped_experts
                else (
                    f"{here}local_experts.{local}.linear_fc1.weight",
                    f"{here}local_experts.{local}.linear_fc2.weight",
                )
            )
            yield LocalParameter(chunk, first_name, (2 * each, shape.hidden), 0, (gate, up))
            yield LocalParameter(chunk, second_name, (shape.hidden, each), first, (down,))

    def _expert_runs(self, there: str, expert: int, first: int, each: int) -> tuple[RowRun, RowRun, RowRun]:
        hidden, ffn = self._shape.hidden, self._shape.expert_ffn
        if self._stacked:
            top = 2 * ffn * expert
            return (
                RowRun(0, f"{there}gate_up_proj", top + first, each),
                RowRun(each, f"{there}gate_up_proj", top + ffn + first, each),
                RowRun(0, f"{there}down_proj", hidden * expert, hidden),
            )
        return (
            RowRun(0, f"{there}{expert}.gate_proj.weight", first, each),
            RowRun(each, f"{there}{expert}.up_proj.weight", first, each),
            RowRun(0, f"{there}{expert}.down_proj.weight", 0, hidden),
        )
