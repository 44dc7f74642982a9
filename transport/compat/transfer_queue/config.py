"""The configuration as the interface has it, what of it is used here, and the samplers as users name them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relax_rt.transport.compat.store.api import StoreConfig, StoreSampler
from relax_rt.transport.compat.transfer_queue.errors import NotOffered
from relax_rt.transport.rpc.errors import Refused

FOLDER_VARIABLE = "RELAX_TRANSFER_QUEUE"
"""Folder of the queue that every process of a job uses; `init` sets it for processes started later."""
MEMORY_VARIABLE = "RELAX_TRANSFER_QUEUE_BYTES"
"""Shared memory that one process may put into; default: half of what is free."""
EXPECTED_VARIABLE = "TQ_PRE_ALLOC_SAMPLE_NUM"
DEFAULTS: dict[str, Any] = {
    "metrics": {"enabled": False, "port": 0},
    "controller": {"sampler": "SequentialSampler", "polling_mode": False, "zmq_info": None},
    "backend": {
        "storage_backend": "SimpleStorage",
        "SimpleStorage": {"total_storage_size": None, "num_data_storage_units": 2, "zmq_info": None},
    },
    "relax": {"folder": None, "capacity_bytes": None, "spill_bytes": 0},
}


class Config(dict[str, Any]):
    """A dict whose keys are attributes too, for where OmegaConf is not installed."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def _plain(conf: Any) -> Any:
    """OmegaConf's and other mappings as dicts, without a look at OmegaConf where it is not used."""
    if isinstance(conf, Mapping) or hasattr(conf, "items"):
        return {str(key): _plain(value) for key, value in conf.items()}
    return conf


def _over(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    both = deepcopy(base)
    for key, value in more.items():
        known = both.get(key)
        both[key] = _over(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return both


def merged(conf: Any) -> dict[str, Any]:
    """The user's configuration over the defaults.

    Raises:
        NotOffered: it asks for a storage backend that is not here, or for a metrics server.
    """
    full = _over(DEFAULTS, _plain(conf) if conf is not None else {})
    backend = full["backend"]["storage_backend"]
    if backend != "SimpleStorage":
        raise NotOffered(
            f"storage backend {backend}", why="payloads lie in shared memory here", hint="leave storage_backend out"
        )
    if full["metrics"].get("enabled"):
        raise NotOffered("metrics.enabled", why="there is no metrics server here", hint="leave metrics out")
    return full


def as_given(full: dict[str, Any]) -> Any:
    """The merged configuration in the form in which users know it: a DictConfig where OmegaConf is installed."""
    if find_spec("omegaconf") is None:
        return _attributes(full)
    omega = import_module("omegaconf").OmegaConf
    return omega.merge(omega.create({}, flags={"allow_objects": True}), full)


def _attributes(value: Any) -> Any:
    return Config({key: _attributes(item) for key, item in value.items()}) if isinstance(value, dict) else value


def store_config(full: dict[str, Any]) -> StoreConfig:
    """The sampler as the broker takes it.

    Raises:
        ValueError, TypeError, NotOffered: the sampler is none of those offered.
    """
    size = full["backend"]["SimpleStorage"].get("total_storage_size")
    return StoreConfig(
        spec_of(full["controller"]["sampler"]),
        expected=max(int(os.environ.get(EXPECTED_VARIABLE, "1")), 0),
        polling=bool(full["controller"]["polling_mode"]),
        max_rows=int(size or 0),
    )


def folder_of(full: dict[str, Any] | None) -> Path | None:
    """The folder that the configuration or the environment names."""
    named = (full or DEFAULTS)["relax"].get("folder") or os.environ.get(FOLDER_VARIABLE)
    return Path(named).absolute() if named else None


def capacity_bytes(full: dict[str, Any] | None) -> int:
    """Shared memory that this process may put into.

    Raises:
        Refused: it is not a positive number.
    """
    given = (full or DEFAULTS)["relax"].get("capacity_bytes") or os.environ.get(MEMORY_VARIABLE)
    if given:
        if not str(given).isdigit() or int(given) < 1 << 20:
            raise Refused(f"capacity of {given!r} bytes", why="it is at least 1 MiB, a whole number of bytes")
        return int(given)
    memory = os.statvfs("/dev/shm")
    return max(memory.f_bavail * memory.f_frsize // 2, 1 << 20)


# --- samplers


class BaseSampler:
    """What the samplers have in common. One's own are not offered: the broker runs no code of its callers."""

    def spec(self) -> StoreSampler:
        """The sampler as the broker takes it.

        Raises:
            NotOffered: it is a sampler of the user's own.
        """
        raise NotOffered(
            f"sampler {type(self).__name__}",
            why="samplers of one's own are not offered",
            hint="SequentialSampler, RankAwareSampler, GRPOGroupNSampler and SeqlenBalancedSampler are",
        )


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value


class SequentialSampler(BaseSampler):
    """The oldest samples first, each once."""

    def spec(self) -> StoreSampler:
        """The sampler as the broker takes it."""
        return StoreSampler("sequential")


class RankAwareSampler(BaseSampler):
    """Each batch of a data-parallel rank is chosen once; all that ask with the same rank and index get the same one."""

    def spec(self) -> StoreSampler:
        """The sampler as the broker takes it."""
        return StoreSampler("ranked")


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of samples that were put one after the other.

    Args:
        n_samples_per_prompt: size of a group.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        self.n_samples_per_prompt = _positive("n_samples_per_prompt", n_samples_per_prompt)

    def spec(self) -> StoreSampler:
        """The sampler as the broker takes it."""
        return StoreSampler("groups", self.n_samples_per_prompt)


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, dealt to the data-parallel ranks so that the sums of the tag ``total_lengths`` are alike.

    Args:
        n_samples_per_prompt: size of a group.
        dp_size: number of ranks; a rank asks for its own share only.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        self.dp_size = _positive("dp_size", dp_size)

    def spec(self) -> StoreSampler:
        """The sampler as the broker takes it."""
        return StoreSampler("balanced", self.n_samples_per_prompt, self.dp_size)


_BY_NAME: dict[str, type[BaseSampler]] = {
    kind.__name__: kind for kind in (SequentialSampler, RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler)
}


def spec_of(sampler: Any) -> StoreSampler:
    """The broker's form of a sampler, its class, or its name.

    Raises:
        ValueError: there is no sampler of this name.
        TypeError: it is neither of these.
        NotOffered: it is a sampler of the user's own.
    """
    if isinstance(sampler, str):
        if sampler not in _BY_NAME:
            raise ValueError(f"Could not find sampler {sampler}")
        sampler = _BY_NAME[sampler]
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        sampler = sampler()
    if not isinstance(sampler, BaseSampler):
        raise TypeError(f"sampler {sampler!r} is neither a sampler nor the class or name of one")
    if type(sampler) not in _BY_NAME.values():
        return BaseSampler.spec(sampler)
    return sampler.spec()
