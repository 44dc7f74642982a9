"""What only the layers of TransformerEngine can do. Imports neither torch nor Megatron: validation asks as well."""

from __future__ import annotations

from collections.abc import Iterator

from relax_rt.roles.sections import ShardedSettings, TrainedSettings


def without_engine(table: ShardedSettings) -> Iterator[tuple[str, str]]:
    """Keys of a table that cannot be kept with Megatron-Core's own layers, and why not."""
    if table.context_parallel > 1:
        yield "context_parallel", "attention over parts of a sequence"
    if table.attention == "unfused":
        yield "attention", "unfused attention over packed sequences"
    if isinstance(table, TrainedSettings) and table.optimizer_dtype != "float32":
        yield "optimizer_dtype", "an optimizer whose moments are not float32"
