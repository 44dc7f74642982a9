"""What names a batch of samples: by keys (KVBatchMeta), or by the numbers that the broker gave them (BatchMeta)."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict

T = TypeVar("T")
Schema = dict[str, dict[str, Any]]
"""By field: dtype, shape (None if the samples differ in it), is_nested, is_non_tensor, per_sample_shapes if nested."""

_log = logging.getLogger(__name__)


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)


def _merged_info(infos: Sequence[dict[str, Any] | None], what: str) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for info in infos:
        for key, value in (info or {}).items():
            if not _same(merged.setdefault(key, value), value):
                raise ValueError(f"{what}: the batches have different values of extra_info {key!r}")
    return merged


def _spans(size: int, chunks: int, what: str) -> list[tuple[int, int]]:
    """Bounds of `chunks` parts of `size`, the first ones larger by one if it does not divide."""
    if size < chunks:
        _log.warning("%s of %d samples is cut into %d chunks: some are empty", what, size, chunks)
    bounds = [size // chunks * part + min(part, size % chunks) for part in range(chunks + 1)]
    return list(pairwise(bounds))


@dataclass
class KVBatchMeta:
    """A batch of samples by their keys.

    Attributes:
        keys: of the samples, each once.
        tags: of each sample.
        partition_id: where they are.
        fields: that all of them have.
        extra_info: of the batch as a whole.
    """

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = field(default_factory=dict)

    def __post_init__(self) -> None:
        if len(self.tags) != len(self.keys):
            raise ValueError(f"{len(self.keys)} keys came with the tags of {len(self.tags)} samples")
        for name, values in (("keys", self.keys), ("fields", self.fields or [])):
            if len(set(values)) != len(values):
                raise ValueError(f"Got duplicated {name}.")
        self.tags, self.extra_info = copy.deepcopy(self.tags), copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def __str__(self) -> str:
        return f"KVBatchMeta(size={self.size}, field_names={self.fields}, extra_info={self.extra_info})"

    def _part(self, indexes: Sequence[int]) -> KVBatchMeta:
        return KVBatchMeta(
            [self.keys[i] for i in indexes],
            [self.tags[i] for i in indexes],
            self.partition_id,
            self.fields,
            self.extra_info,
        )

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """The part with these keys, in their order.

        Raises:
            ValueError: a key is named twice.
            RuntimeError: a key is not in the batch.
        """
        if len(set(keys_to_select)) != len(keys_to_select):
            raise ValueError(f"keys are named twice: {keys_to_select}")
        places = {key: place for place, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in places]
        if unknown:
            raise RuntimeError(f"keys {unknown} are not in the batch")
        return self._part([places[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Put the samples in the order of these places, in place.

        Raises:
            ValueError: they are not each place once.
        """
        if sorted(indexes) != list(range(self.size)):
            raise ValueError(f"an order of {self.size} samples names each place once, got {indexes}")
        self.keys = [self.keys[i] for i in indexes]
        self.tags = [self.tags[i] for i in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Cut into this many parts of as good as the same size."""
        return [self._part(range(start, end)) for start, end in _spans(self.size, chunks, "a KVBatchMeta")]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """One batch of several.

        Raises:
            ValueError: they differ in fields, partition, or a value of extra_info.
        """
        data = [part for part in data if part]
        if not data:
            return KVBatchMeta()
        first = data[0]
        for part in data:
            if part.fields is not None and set(part.fields) != set(first.fields or ()):
                raise ValueError(f"fields differ: {first.fields} and {part.fields}")
            if part.partition_id != first.partition_id:
                raise ValueError(f"partitions differ: {first.partition_id} and {part.partition_id}")
        return KVBatchMeta(
            [key for part in data for key in part.keys],
            [tags for part in data for tags in part.tags],
            first.partition_id,
            first.fields,
            _merged_info([part.extra_info for part in data], "KVBatchMeta.concat") or None,
        )


def schema_of(data: TensorDict) -> Schema:
    """What the fields of a batch are like."""
    schema: Schema = {}
    for name, value in data.items():
        if not isinstance(value, torch.Tensor):
            schema[name] = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}
            continue
        shapes = [row.shape for row in value.unbind()] if value.is_nested else [value.shape[1:] or torch.Size([1])]
        alike = all(shape == shapes[0] for shape in shapes)
        schema[name] = {
            "dtype": value.dtype,
            "shape": shapes[0] if alike else None,
            "is_nested": not alike,
            "is_non_tensor": False,
        }
        if not alike:
            schema[name]["per_sample_shapes"] = [tuple(shape) for shape in shapes]
    return schema


class SampleView:
    """One sample of a BatchMeta, to look at."""

    __slots__ = ("_batch", "_place")

    def __init__(self, batch: BatchMeta, place: int) -> None:
        self._batch, self._place = batch, place

    @property
    def global_index(self) -> int:
        return self._batch.global_indexes[self._place]

    @property
    def partition_id(self) -> str:
        return self._batch.partition_ids[self._place]

    @property
    def production_status(self) -> int:
        """1 if all fields of the batch are there, else 0."""
        return int(self._batch.production_status[self._place])

    @property
    def custom_meta(self) -> MappingProxyType[str, Any]:
        return MappingProxyType(self._batch.custom_meta[self._place])

    @property
    def fields(self) -> MappingProxyType[str, MappingProxyType[str, Any]]:
        """What its fields are like; `shape` is its own."""
        found: dict[str, MappingProxyType[str, Any]] = {}
        for name, one in self._batch.field_schema.items():
            own = {key: value for key, value in one.items() if key != "per_sample_shapes"}
            if "per_sample_shapes" in one:
                own["shape"] = one["per_sample_shapes"][self._place]
            found[name] = MappingProxyType(own)
        return MappingProxyType(found)


class BatchMeta:
    """A batch of samples by their numbers.

    Args:
        global_indexes: numbers of the samples, unique over all partitions.
        partition_ids: of each sample.
        field_schema: what the fields are like.
        production_status: of each sample 1 if all fields are there, else 0 (the default).
        extra_info: of the batch as a whole.
        custom_meta: tags of each sample.
        field_names: if the schema is not known yet: it is looked up when it is first asked for.
        describe: looks it up.
    """

    def __init__(
        self,
        global_indexes: Sequence[int],
        partition_ids: Sequence[str],
        field_schema: Schema | None = None,
        production_status: Sequence[int] | NDArray[np.int8] | None = None,
        extra_info: dict[str, Any] | None = None,
        custom_meta: Sequence[dict[str, Any]] | None = None,
        *,
        field_names: Sequence[str] = (),
        describe: Callable[[BatchMeta], Schema] | None = None,
    ) -> None:
        self.global_indexes, self.partition_ids = list(global_indexes), list(partition_ids)
        size = len(self.global_indexes)
        self._schema = {name: dict(one) for name, one in field_schema.items()} if field_schema is not None else None
        self._names = sorted(field_schema if field_schema is not None else field_names)
        self._describe = describe
        self.extra_info = dict(extra_info or {})
        self.custom_meta: list[dict[str, Any]] = [dict(tags) for tags in custom_meta or [{}] * size]
        status = production_status if production_status is not None else [0] * size
        self.production_status: NDArray[np.int8] = np.array(status, np.int8)
        for name, length in (
            ("partition_ids", len(self.partition_ids)),
            ("production_status", len(self.production_status)),
            ("custom_meta", len(self.custom_meta)),
        ):
            if length != size:
                raise ValueError(f"{size} samples came with {name} of {length}")
        for name, one in (self._schema or {}).items():
            if len(one.get("per_sample_shapes") or [()] * size) != size:
                raise ValueError(f"{size} samples came with {len(one['per_sample_shapes'])} shapes of field {name!r}")

    def __getstate__(self) -> dict[str, Any]:
        # What looks the schema up belongs to this process.
        return {**self.__dict__, "_describe": None}

    @property
    def size(self) -> int:
        return len(self.global_indexes)

    def __len__(self) -> int:
        return self.size

    @property
    def field_names(self) -> list[str]:
        return list(self._names)

    @property
    def field_schema(self) -> Schema:
        """What the fields are like."""
        if self._schema is None:
            blank = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": False}
            if self._describe is None or not self.is_ready or not self._names:
                return {name: dict(blank) for name in self._names}
            found = self._describe(self)
            self._schema = {name: found.get(name, dict(blank)) for name in self._names}
        return self._schema

    @property
    def is_ready(self) -> bool:
        """Whether all fields of all samples are there."""
        return self.size > 0 and bool(np.all(self.production_status == 1))

    @property
    def samples(self) -> Sequence[SampleView]:
        return [SampleView(self, place) for place in range(self.size)]

    def __iter__(self) -> Iterator[BatchMeta]:
        return (self.select_samples([place]) for place in range(self.size))

    def __getitem__(self, item: int | slice) -> BatchMeta:
        if isinstance(item, slice):
            return self.select_samples(list(range(*item.indices(self.size))))
        if not isinstance(item, int | np.integer):
            raise TypeError(f"a BatchMeta is indexed by numbers and slices, not by {type(item).__name__}")
        place = int(item) + self.size if item < 0 else int(item)
        if not 0 <= place < self.size:
            raise IndexError(f"sample {item} of a BatchMeta of {self.size}")
        return self.select_samples([place])

    def __str__(self) -> str:
        return (
            f"BatchMeta(size={self.size}, field_names={self.field_names}, is_ready={self.is_ready}, "
            f"global_indexes={self.global_indexes}, extra_info={self.extra_info})"
        )

    # --- fields

    def _of_field(self, name: str) -> dict[str, Any]:
        if name not in self._names:
            raise KeyError(f"field {name!r} is not among {self._names}")
        return self.field_schema[name]

    def get_dtypes(self, field_name: str) -> list[torch.dtype | None]:
        return [self._of_field(field_name)["dtype"]] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        one = self._of_field(field_name)
        return list(one.get("per_sample_shapes") or [one["shape"]] * self.size)

    def add_fields(self, tensor_dict: TensorDict, set_all_ready: bool = True) -> BatchMeta:
        """Fields of a batch of the same size are part of this one from now on; in place.

        Raises:
            ValueError: the sizes differ.
        """
        if tensor_dict.batch_size[0] != self.size:
            raise ValueError(f"fields of {tensor_dict.batch_size[0]} samples for a batch of {self.size}")
        known, new = self._schema, schema_of(tensor_dict)
        if known is not None or not self._names:
            self._schema = {**(known or {}), **new}
        self._names = sorted({*self._names, *new})
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_fields(self, field_names: list[str]) -> BatchMeta:
        """The same samples with these fields only; names of others are passed over."""
        schema = None if self._schema is None else {n: self._schema[n] for n in field_names if n in self._schema}
        return self._with(
            range(self.size), schema=copy.deepcopy(schema), names=[n for n in field_names if n in self._names]
        )

    # --- tags and extra information

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: dict[str, Any]) -> None:
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: list[dict[str, Any]] | None) -> None:
        """Add tags to each sample's.

        Raises:
            ValueError: their number is not that of the samples.
        """
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(f"tags of {len(custom_meta)} samples for a batch of {self.size}")
        for own, more in zip(self.custom_meta, custom_meta, strict=True):
            own.update(more)

    def clear_custom_meta(self) -> None:
        self.custom_meta = [{} for _ in range(self.size)]

    # --- parts and sums

    def _with(self, places: Sequence[int], *, schema: Schema | None, names: Sequence[str]) -> BatchMeta:
        return BatchMeta(
            [self.global_indexes[i] for i in places],
            [self.partition_ids[i] for i in places],
            schema,
            self.production_status[list(places)],
            copy.deepcopy(self.extra_info),
            copy.deepcopy([self.custom_meta[i] for i in places]),
            field_names=names,
            describe=self._describe,
        )

    def _schema_at(self, places: Sequence[int]) -> Schema | None:
        if self._schema is None:
            return None
        schema = copy.deepcopy(self._schema)
        for one in schema.values():
            if one.get("per_sample_shapes") is not None:
                one["per_sample_shapes"] = [one["per_sample_shapes"][i] for i in places]
        return schema

    def select_samples(self, sample_indices: list[int]) -> BatchMeta:
        """The samples at these places.

        Raises:
            ValueError: there is no such place.
        """
        if any(not 0 <= place < self.size for place in sample_indices):
            raise ValueError(f"places of a batch of {self.size} are 0 to {self.size - 1}, got {sample_indices}")
        return self._with(sample_indices, schema=self._schema_at(sample_indices), names=self._names)

    def copy(self) -> BatchMeta:
        return self.select_samples(list(range(self.size)))

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Cut into this many parts of as good as the same size."""
        return [self.select_samples(list(range(*span))) for span in _spans(self.size, chunks, "a BatchMeta")]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """One part for each partition."""
        places: dict[str, list[int]] = {}
        for place, partition in enumerate(self.partition_ids):
            places.setdefault(partition, []).append(place)
        return [self.select_samples(at) for at in places.values()]

    def reorder(self, indices: list[int]) -> None:
        """Put the samples in the order of these places, in place.

        Raises:
            ValueError: they are not each place once.
        """
        if sorted(indices) != list(range(self.size)):
            raise ValueError(f"an order of {self.size} samples names each place once, got {indices}")
        self.__dict__.update(self.select_samples(indices).__dict__)

    def union(self, other: BatchMeta) -> BatchMeta:
        """The same samples with the fields of both; where both have something, the other's counts.

        Raises:
            ValueError: the samples differ.
        """
        if not other:
            return self.copy()
        if not self:
            return other.copy()
        if (self.global_indexes, self.partition_ids) != (other.global_indexes, other.partition_ids):
            raise ValueError(f"union of different samples: {self.global_indexes} and {other.global_indexes}")
        merged = self.copy()
        known = merged._schema is not None and other._schema is not None
        merged._schema = copy.deepcopy({**(merged._schema or {}), **(other._schema or {})}) if known else None
        merged._names = sorted({*self._names, *other._names})
        merged.production_status &= other.production_status
        merged.extra_info |= other.extra_info
        merged.update_custom_meta(copy.deepcopy(other.custom_meta))
        return merged

    @classmethod
    def concat(cls, data: list[BatchMeta], validate: bool = True) -> BatchMeta:
        """One batch of several.

        Raises:
            ValueError: they differ in a value of extra_info, or, with validate, in their fields.
        """
        data = [part for part in data if part]
        if not data:
            return cls.empty()
        first = data[0]
        if validate:
            for part in data:
                if part.field_names != first.field_names:
                    raise ValueError(f"fields differ: {first.field_names} and {part.field_names}")
        return cls(
            [index for part in data for index in part.global_indexes],
            [partition for part in data for partition in part.partition_ids],
            _joined_schema(data, validate=validate),
            np.concatenate([part.production_status for part in data]),
            _merged_info([part.extra_info for part in data], "BatchMeta.concat"),
            [tags for part in data for tags in part.custom_meta],
            field_names=first.field_names,
            describe=first._describe,
        )

    @classmethod
    def empty(cls, extra_info: dict[str, Any] | None = None) -> BatchMeta:
        return cls([], [], {}, extra_info=extra_info)


def _joined_schema(data: Sequence[BatchMeta], *, validate: bool) -> Schema | None:
    schemas = [part._schema for part in data]
    if any(schema is None for schema in schemas):
        return None
    joined: Schema = {}
    for name in data[0].field_names:
        ones = [(schema or {}).get(name, {}) for schema in schemas]
        if validate and any(one.get("dtype") != ones[0].get("dtype") for one in ones):
            raise ValueError(f"dtypes of field {name!r} differ")
        shapes = [shape for part, one in zip(data, ones, strict=True) for shape in _shapes(part, one)]
        alike = all(shape == shapes[0] for shape in shapes)
        joined[name] = {**ones[0], "shape": shapes[0] if alike else None, "is_nested": not alike}
        joined[name].pop("per_sample_shapes", None)
        if not alike:
            joined[name]["per_sample_shapes"] = shapes
    return joined


def _shapes(part: BatchMeta, one: dict[str, Any]) -> list[Any]:
    return list(one.get("per_sample_shapes") or [one.get("shape")] * part.size)
