"""A stand-in for an accelerator: tensors that say they are on another device, have their values all the same, and do
not meet those of the CPU.

"meta" lends its name, because torch's autograd runs on it without a device's own threads. What torch itself makes on
"meta" within `Accelerator` is one of these tensors; every operation is checked and computed on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE, HERE = torch.device("meta"), torch.device("cpu")
ACROSS = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
"""What may have tensors of both."""


class There(torch.Tensor):
    """A tensor of the stand-in; `inner` has its values."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> There:
        found: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        found.inner = inner
        return found

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"There({self.inner!r})"

    def tolist(self) -> Any:
        """Its values; torch does not look behind a subclass."""
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


class Accelerator(TorchDispatchMode):
    """Within it the device is there. `seen`: operations that were computed on it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(leaf, There) for leaf in tree_leaves((args, kwargs))):
            self.seen.add(str(func))
        return computed(func, args, kwargs or {})


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation on the inner tensors; what comes out is where what went in was, or where `device` says."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [one for one in tensors if isinstance(one, There)]
    if there and func not in ACROSS:
        # A number on the CPU may meet any device.
        alien = [one for one in tensors if not isinstance(one, There) and one.dim() > 0]
        assert not alien, f"{func} has tensors of both devices: {[tuple(one.shape) for one in tensors]}"
    result_there = bool(there)
    if kwargs.get("device") is not None:
        result_there = torch.device(kwargs["device"]).type == DEVICE.type
        kwargs = {**kwargs, "device": HERE}
    elif func is ACROSS[0]:
        result_there = isinstance(args[0], There)
    known = {id(one.inner): one for one in there}

    def inside(leaf: Any) -> Any:
        return leaf.inner if isinstance(leaf, There) else leaf

    def outside(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not result_there:
            return leaf
        return known[id(leaf)] if id(leaf) in known else There(leaf)

    return tree_map(outside, func(*tree_map(inside, args), **tree_map(inside, kwargs)))
