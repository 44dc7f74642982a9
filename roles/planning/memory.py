"""Memory of one GPU by formula: what a training rank and an engine keep on it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from relax_rt.roles.models.parallel import ParallelSizes, stage_layers
from relax_rt.roles.models.settings import ShardedSettings, TrainedSettings
from relax_rt.roles.models.shape import ModelShape, WeightGroup
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.training.backend.settings import LoraTable, TrainerSettings

MIB, GIB = 1 << 20, 1 << 30
WIDTH = {"float32": 4, "bfloat16": 2, "auto": 4}
MASTER = 4
"""Bytes of a float32 master weight."""
BUCKET_BYTES = 512 * MIB
"""Bytes of a bucket of the weight transfer; a tensor is never cut, so that a larger one is a bucket by itself."""
CONTEXT_BYTES = 1536 * MIB
"""A process on a GPU before it holds anything: CUDA context, kernels, library workspaces."""
COMMUNICATOR_BYTES = 256 * MIB
"""NCCL's buffers of one communicator."""
FRAGMENTATION = 0.05
"""Part of what comes and goes (activations, logits) that the allocator cannot use."""
GRAPHS_BYTES = 1536 * MIB
"""An engine's captured CUDA graphs."""
LOGIT_BYTES = {"megatron": 10, "torch": 14}
"""Bytes of the logits of one trained token and vocabulary entry. Megatron: bfloat16, float32 turned into probabilities
in place, float32 gradient. torch: also their log-softmax."""


class MemoryPart(msgspec.Struct, frozen=True):
    """One part of a process's memory in bytes, and where the number comes from."""

    name: str
    bytes: int
    how: str = ""


class LayerStore(msgspec.Struct, frozen=True, kw_only=True):
    """What one decoder layer stores for its backward pass, bytes on one rank.

    Attributes:
        kept: stored until the backward pass, with the recomputation asked for.
        working: besides, while the layer itself runs backward.
    """

    kept: float
    working: float


def layer_activations(
    shape: ModelShape,
    *,
    sparse: bool,
    tokens: int,
    sequence: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    expert_tensor: int = 1,
    recompute: str = "none",
    fused: bool = True,
    imbalance: float = 1.0,
    gated: bool = True,
    dropout: bool = False,
    width: int = 2,
) -> LayerStore:
    """Activations of one layer after Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer
    Models (arXiv 2205.05198), section 4, with their tensors counted for grouped queries, gated MLPs and experts.

    With their shapes (queries, keys and values of the hidden width, an MLP of four times that with GELU, dropout) it
    gives their results: sbh(34 + 5as/h) for one rank, sbh(10 + 24/t + 5as/(ht)) with tensor parallelism t,
    sbh/t (34 + 5as/h) with sequence parallelism besides, 5as/h less with selective recomputation.

    Args:
        sparse: the layer's MLP is a mixture of experts.
        tokens: tokens of a micro-batch on one context-parallel rank, s x b.
        sequence: length of one sequence, s.
        fused: the attention kernel does not store its scores, only a number a head and token.
        imbalance: tokens of the busiest expert rank by those of the mean one.
        gated: the MLP multiplies two projections (SwiGLU); else one of them goes through GELU.
        dropout: masks of one byte are stored.
        width: bytes of an activation.
    """
    query, key = shape.query, shape.key
    # Between the tensor-parallel parts: inputs of both norms, and of the first linear layer of each block.
    between = width * tokens * shape.hidden * 4 + (2 * tokens * shape.hidden if dropout else 0)
    inside = width * tokens * (query + 2 * key + query)
    if shape.qk_norm:
        inside += width * tokens * (query + key)
    if fused:
        core = 4 * tokens * shape.heads
    else:
        # Softmax output, its dropped-out copy and the mask: 5 bytes a score in 16 bit, without dropout the first only.
        core = tokens * sequence * shape.heads * (2 * width + 1 if dropout else width)
    experts = 0.0
    if sparse:
        experts = _expert_activations(shape, tokens, imbalance, expert_tensor, width)
        between += 8 * tokens * shape.experts
    elif gated:
        inside += width * tokens * 3 * shape.ffn
    else:
        inside += width * tokens * 2 * shape.ffn
    divided = tensor if sequence_parallel else 1
    # Tokens are dealt out to the experts as they lie: cut by sequence parallelism or whole.
    whole = between / divided + (inside + core) / tensor + experts / divided
    if recompute == "full":
        return LayerStore(kept=width * tokens * shape.hidden / divided, working=whole)
    if recompute == "selective":
        return LayerStore(kept=whole - core / tensor, working=core / tensor)
    return LayerStore(kept=whole, working=0.0)


def _expert_activations(shape: ModelShape, tokens: int, imbalance: float, expert_tensor: int, width: int) -> float:
    """Tokens as dealt out, both projections, their product, and what comes back, for each token's chosen experts."""
    # The ranks that share an expert's columns gather each other's tokens first.
    dealt = tokens * shape.experts_per_token * imbalance * expert_tensor
    return dealt * width * (2 * shape.hidden + 3 * shape.expert_ffn / expert_tensor)


def rank_elements(part: WeightGroup, sizes: ParallelSizes) -> int:
    """Elements of a weight on one rank; a vocabulary that tensor parallelism does not divide is padded."""
    if part.split == "expert":
        return part.elements // (sizes.expert * sizes.expert_tensor)
    return part.elements if part.split == "none" else -(-part.elements // sizes.tensor)


def rank_weights(shape: ModelShape, sizes: ParallelSizes, rank: int) -> tuple[int, int]:
    """Elements that a rank holds: those of the dense layers, and those of experts."""
    stage = sizes.stage(rank)
    parts: list[WeightGroup] = list(shape.input_weights()) if stage == 0 else []
    for layer in stage_layers(shape.layers, sizes.pipeline, stage):
        parts += shape.layer_weights(layer)
    if stage == sizes.pipeline - 1:
        parts += shape.output_weights(separate=sizes.pipeline > 1)
    experts = sum(rank_elements(part, sizes) for part in parts if part.split == "expert")
    return sum(rank_elements(part, sizes) for part in parts) - experts, experts


def micro_batches(table: ShardedSettings, sizes: ParallelSizes, tokens_a_step: int, longest: int) -> int:
    """Micro-batches of one replica in one step, all samples at their longest."""
    each = max(table.tokens_per_micro_batch, longest)
    return max(1, -(-tokens_a_step // (sizes.data * each)))


def gang_memory(
    shape: ModelShape,
    table: ShardedSettings,
    sizes: ParallelSizes,
    rank: int,
    *,
    longest: int,
    tokens_a_step: int,
    communicators: int,
    sends: bool,
    held_versions: int = 0,
) -> list[MemoryPart]:
    """Return what one rank of a gang keeps on its GPU.

    Args:
        longest: tokens of the longest sample.
        communicators: NCCL communicators that the rank is a member of.
        sends: it sends the weights to the engines.
        held_versions: bytes of versions that it keeps on the GPU for engines to copy.
    """
    trained = isinstance(table, TrainedSettings)
    if table.backend == "torch":
        found = list(_fsdp_state(shape, table, sizes))
    else:
        dense, experts = rank_weights(shape, sizes, rank)
        found = list(_state(table, sizes, dense, experts))
    tokens = max(table.tokens_per_micro_batch, longest)
    pending = min(sizes.pipeline - sizes.stage(rank), micro_batches(table, sizes, tokens_a_step, longest))
    activations = _activations(shape, table, sizes, rank, tokens, longest, pending if trained else 0)
    logits = _logits(shape, table, sizes, rank, tokens, training=trained)
    found += [part for part in (activations, logits) if part is not None]
    moving = sum(part.bytes for part in (activations, logits) if part is not None)
    if sends:
        found.append(_bucket(shape, WIDTH["bfloat16"], "gathered and sent"))
    if held_versions:
        found.append(MemoryPart("published weights", held_versions, "whole versions, for the engines on its node"))
    return [*found, *_overhead(communicators, moving)]


def _state(table: ShardedSettings, sizes: ParallelSizes, dense: int, experts: int) -> Iterator[MemoryPart]:
    held, width = dense + experts, WIDTH[table.dtype]
    yield MemoryPart("weights", held * width, f"{held:,} parameters x {width} bytes ({table.dtype})")
    if not isinstance(table, TrainedSettings):
        return
    gradient = WIDTH[table.gradient_dtype]
    yield MemoryPart("gradients", held * gradient, f"{held:,} x {gradient} ({table.gradient_dtype})")
    # float32 weights are their own masters.
    master = MASTER if width < MASTER else 0
    each = master + 2 * WIDTH[table.optimizer_dtype]
    made_of = (f"float32 master {MASTER} + " if master else "") + f"two moments {WIDTH[table.optimizer_dtype]} each"
    if not table.distributed_optimizer:
        yield MemoryPart("optimizer", held * each, f"{held:,} x {each} ({made_of}), not divided")
        return
    over, expert_over = sizes.data * sizes.context, sizes.expert_data
    total = -(-dense * each // over) + -(-experts * each // expert_over)
    how = f"{each} bytes ({made_of}): {dense:,} over {over}"
    yield MemoryPart("optimizer", total, how + (f", experts {experts:,} over {expert_over}" if experts else ""))


def _fsdp_state(shape: ModelShape, table: ShardedSettings, sizes: ParallelSizes) -> Iterator[MemoryPart]:
    """FSDP2: everything divided over all ranks, and two layers gathered at a time. A model that is not trained has its
    weights in float32 as well, so that its numbers are those of the trainer."""
    total, over, held = shape.parameters, sizes.world, MASTER
    what = "float32 master" if isinstance(table, TrainedSettings) else "float32"
    yield MemoryPart("weights", -(-total * held // over), f"{total:,} x {held} ({what}) over {over}")
    if isinstance(table, TrainedSettings):
        lora = table.lora if isinstance(table, TrainerSettings) else None
        trained, of = (total, "") if lora is None else (adapter_elements(shape, lora), "adapters, ")
        yield MemoryPart("gradients", -(-trained * MASTER // over), f"{of}{trained:,} x {MASTER} (float32) over {over}")
        how = f"{of}{trained:,} x 8 (two moments, float32) over {over}"
        yield MemoryPart("optimizer", -(-trained * 8 // over), how)
    if over > 1:
        layer = max(sum(part.elements for part in shape.layer_weights(n)) for n in range(shape.layers))
        gathered = max(layer, shape.vocabulary * shape.hidden)
        yield MemoryPart("gathered layers", 2 * gathered * held, f"two of {gathered:,} x {held} ({what})")


def adapter_elements(shape: ModelShape, lora: LoraTable) -> int:
    """Elements of A [rank, in] and B [out, rank] of every linear layer that is a target; experts have none."""
    hidden, ffn = shape.hidden, shape.ffn
    sizes = {
        "q_proj": (hidden, shape.query),
        "k_proj": (hidden, shape.key),
        "v_proj": (hidden, shape.key),
        "o_proj": (shape.query, hidden),
        "gate_proj": (hidden, ffn),
        "up_proj": (hidden, ffn),
        "down_proj": (ffn, hidden),
    }
    chosen = sizes if isinstance(lora.targets, str) else {n: sizes[n] for n in lora.targets if n in sizes}
    dense = sum(not sparse for sparse in shape.sparse)
    layers = {name: dense if name in ("gate_proj", "up_proj", "down_proj") else shape.layers for name in chosen}
    return lora.rank * sum(layers[name] * sum(two) for name, two in chosen.items())


def sequence_parallel(table: ShardedSettings) -> bool:
    """Whether a gang's ranks cut also what lies between tensor-parallel layers."""
    return table.tensor_parallel > 1 if table.sequence_parallel is None else table.sequence_parallel


def _activations(
    shape: ModelShape, table: ShardedSettings, sizes: ParallelSizes, rank: int, tokens: int, longest: int, pending: int
) -> MemoryPart:
    """Activations of the stage's layers for each micro-batch in flight; a forward pass alone holds one layer's."""
    layers = stage_layers(shape.layers, sizes.pipeline, sizes.stage(rank))
    recompute = table.recompute if isinstance(table, TrainedSettings) else "none"
    stores = {
        sparse: layer_activations(
            shape,
            sparse=sparse,
            tokens=-(-tokens // sizes.context),
            sequence=longest,
            tensor=sizes.tensor,
            sequence_parallel=sequence_parallel(table),
            expert_tensor=sizes.expert_tensor,
            recompute=recompute,
            fused=table.attention == "fused",
            imbalance=table.expert_imbalance if sizes.expert > 1 else 1.0,
            width=WIDTH[table.dtype],
        )
        for sparse in {shape.sparse[layer] for layer in layers}
    }
    if not pending:
        one = max(store.kept + store.working for store in stores.values())
        return MemoryPart("activations", round(one), f"one layer at a time, forward only, {tokens} tokens")
    kept = sum(stores[shape.sparse[layer]].kept for layer in layers)
    working = max(store.working for store in stores.values())
    how = f"{len(layers)} layers x {kept / len(layers) / MIB:.0f} MiB x {pending} micro-batch"
    how += f"{'es' if pending > 1 else ''} of {tokens} tokens, recompute {recompute}"
    return MemoryPart("activations", round(kept * pending + working), how)


def _logits(
    shape: ModelShape, table: ShardedSettings, sizes: ParallelSizes, rank: int, tokens: int, *, training: bool
) -> MemoryPart | None:
    if sizes.stage(rank) != sizes.pipeline - 1 or shape.value_head:
        return None
    here = -(-tokens // sizes.context)
    entry = LOGIT_BYTES[table.backend] if training else 6
    how = f"{here} tokens x vocabulary {shape.vocabulary}"
    how += f" / {sizes.tensor}" if sizes.tensor > 1 else ""
    return MemoryPart("logits", here * -(-shape.vocabulary // sizes.tensor) * entry, f"{how} x {entry} bytes")


def bucket_bytes(shape: ModelShape, width: int) -> int:
    """Bytes of the largest bucket of the weight transfer."""
    return max(BUCKET_BYTES, shape.largest_tensor * width)


def _bucket(shape: ModelShape, width: int, doing: str) -> MemoryPart:
    largest = bucket_bytes(shape, width)
    return MemoryPart("transfer buckets", 2 * largest, f"2 x {largest / MIB:.0f} MiB, {doing}")


def _overhead(communicators: int, moving: int) -> Iterator[MemoryPart]:
    yield MemoryPart("CUDA context", CONTEXT_BYTES, "context, kernels, workspaces; assumed")
    if communicators:
        how = f"{communicators} communicator{'s' if communicators > 1 else ''} x {COMMUNICATOR_BYTES // MIB} MiB"
        yield MemoryPart("NCCL", communicators * COMMUNICATOR_BYTES, f"{how}; assumed")
    if moving:
        how = f"{FRAGMENTATION:.0%} of activations and logits; assumed"
        yield MemoryPart("fragmentation", round(FRAGMENTATION * moving), how)


def engine_elements(shape: ModelShape, tensor: int) -> int:
    """Elements of the weights on one GPU of an engine; key-value heads fewer than GPUs are held more than once."""
    total = 0
    for part in shape.all_weights():
        over = {"none": 1, "kv": min(tensor, shape.kv_heads)}.get(part.split, tensor)
        total += -(-part.elements // over)
    return total


def kv_token_bytes(shape: ModelShape, tensor: int, width: int) -> int:
    """Bytes that one token takes in the KV cache of one GPU."""
    return shape.kv_values_a_token // min(tensor, shape.kv_heads) * width


def kv_bytes(shape: ModelShape, table: EngineSettings, memory_bytes: int, longest: int) -> int:
    """Bytes of the KV cache on one GPU of an engine; negative if the weights alone are too many."""
    width = WIDTH[table.dtype]
    if table.engine == "sglang":
        return int(table.memory_fraction * memory_bytes) - engine_elements(shape, table.tensor_parallel) * width
    return table.max_sequences * longest * shape.kv_values_a_token * width


def engine_memory(
    shape: ModelShape,
    table: EngineSettings,
    memory_bytes: int,
    *,
    longest: int,
    communicators: int,
    received: int = 0,
) -> list[MemoryPart]:
    """Return what an engine keeps on each of its GPUs, also while weights are swapped.

    Args:
        memory_bytes: of the GPU.
        longest: tokens of the longest sample.
        communicators: NCCL communicators that each of its processes is a member of.
        received: bytes that it keeps on its first GPU to receive broadcasts into.
    """
    width, tensor = WIDTH[table.dtype], table.tensor_parallel
    held, cache = engine_elements(shape, tensor), kv_bytes(shape, table, memory_bytes, longest)
    how = f"{held:,} parameters x {width} bytes ({table.dtype})"
    token = kv_token_bytes(shape, tensor, width)
    extra = [MemoryPart("broadcast memory", received, "a version as it comes, before the engine copies it")]
    extra = extra if received else []
    if table.engine == "embedded":
        found = [
            *extra,
            MemoryPart("weights", 2 * held * width, f"2 x {how}: serving, and being fetched"),
            MemoryPart("KV cache", cache, f"{table.max_sequences} sequences x {longest} tokens x {token} bytes"),
        ]
        return [*found, *_overhead(communicators, 0)]
    inside = 2 * shape.query + 2 * shape.key + 3 * _widest(shape)
    chunk = table.prefill_tokens * width * (4 * shape.hidden + inside // tensor)
    logits = table.max_sequences * shape.vocabulary * 8
    tokens = max(cache, 0) // token
    return [
        *extra,
        MemoryPart("weights", held * width, how),
        MemoryPart(
            "KV cache",
            max(cache, 0),
            f"memory_fraction {table.memory_fraction:g} less the weights: {tokens:,} tokens x {token} bytes",
        ),
        MemoryPart("activations", chunk, f"one layer, {table.prefill_tokens} prefill tokens"),
        MemoryPart("logits", logits, f"{table.max_sequences} sequences x vocabulary {shape.vocabulary} x 8 bytes"),
        MemoryPart("CUDA graphs", GRAPHS_BYTES, "assumed"),
        _bucket(shape, width, "received and loaded"),
        *_overhead(communicators, 0),
    ]


def _widest(shape: ModelShape) -> int:
    """The widest MLP that a token passes through."""
    sparse = shape.expert_ffn * shape.experts_per_token if any(shape.sparse) else 0
    return max(sparse, 0 if all(shape.sparse) else shape.ffn)


def total_bytes(components: Iterable[MemoryPart]) -> int:
    """Sum the bytes of these parts."""
    return sum(component.bytes for component in components)
