"""What a gang of Megatron-Core's ranks may be asked for in a plan, and cannot do. Imports neither torch nor Megatron:
validation asks as well."""

from __future__ import annotations

from collections.abc import Iterator

from relax_rt.roles.models.settings import ShardedSettings, TrainedSettings


def unsupported(table: ShardedSettings) -> Iterator[tuple[str, str]]:
    """Keys of a table that cannot be kept, and why not."""
    if table.attention == "unfused":
        yield "attention", "packed sequences have fused attention alone"
    if isinstance(table, TrainedSettings) and table.optimizer_dtype != "float32":
        yield "optimizer_dtype", "moments of other types than float32 are not in checkpoints"
