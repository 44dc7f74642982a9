"""Stand-in for Triton: kernels are defined and never launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from absent import make_absent  # type: ignore[import-not-found]

__version__ = "3.9.0"
make_absent(__name__, decorates=True)


def jit(function: Any = None, **_: Any) -> Any:
    """Return the kernel's Python function."""
    return function if function is not None else lambda decorated: decorated


def autotune(*_: Any, **__: Any) -> Callable[[Any], Any]:
    """Return the kernel as it is."""
    return lambda decorated: decorated


heuristics = autotune


class Config:
    """A kernel's configuration."""

    def __init__(self, kwargs: Any = None, **_: Any) -> None:
        self.kwargs = kwargs or {}


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n."""
    return 1 << (n - 1).bit_length() if n > 0 else 1
