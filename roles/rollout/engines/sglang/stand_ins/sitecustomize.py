"""Loaded first by each Python process of the server: patches modules that it imports, for runs on the CPU."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

EMPTY = ("torchvision._meta_registrations",)
"""Modules that need compiled operators of a package that is installed without them; replaced by empty ones."""


def _no_pinning(module: Any) -> None:
    module._cuda_host_register = lambda *_, **__: None


def _cpu_attention_repeats(module: Any) -> None:
    """Allow torch's own attention: it sums in the same order for a sequence, whatever else is in the batch."""
    module.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    module.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def _nothing_to_replace(module: Any) -> None:
    """Disable batch-invariant operators, which are Triton kernels."""
    module.enable_batch_invariant_mode = lambda *_, **__: None


def _opened_by_name(module: Any) -> None:
    """Open shared memory by file name. torch fetches it from the process that created it, with a key that only its
    children have; the engine, which is no parent, names a file (weight_loading.py)."""
    fetched = module.DupFd.detach

    def detach(self: Any) -> int:
        return os.open(self._id, os.O_RDWR) if isinstance(self._id, str) else fetched(self)

    module.DupFd.detach = detach


CHANGED: dict[str, Callable[[Any], None]] = {
    "multiprocessing.resource_sharer": _opened_by_name,
    "sglang.srt.mem_cache.pool_host.common": _no_pinning,
    "sglang.srt.arg_groups.choices": _cpu_attention_repeats,
    "sglang.srt.batch_invariant_ops.batch_invariant_ops": _nothing_to_replace,
}


class _Changes(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in EMPTY:
            return importlib.machinery.ModuleSpec(fullname, self)
        if fullname not in CHANGED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changed(spec.loader, CHANGED[fullname])
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Changed(importlib.abc.Loader):
    """A module's own loader, followed by a patch."""

    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)


sys.meta_path.insert(0, _Changes())
