"""Stand-ins for packages of GPU kernels, which SGLang imports everywhere and a machine without a GPU lacks.

An absent package can be imported, with any module and name in it. Its names can be used in annotations, as base
classes and as decorators. Only a call of one, which would launch a kernel, fails, and names it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any


class Base:
    """Base of classes that inherit from an absent one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __init_subclass__(cls, **_: Any) -> None:
        super().__init_subclass__()


class Name:
    """A name in an absent package.

    Args:
        path: its full dotted name.
        decorates: a call of it returns a decorator.
    """

    def __init__(self, path: str, decorates: bool) -> None:
        self._path, self._decorates = path, decorates
        self.__name__ = path.rpartition(".")[2]

    def __getattr__(self, name: str) -> Name:
        return Name(f"{self._path}.{_public(name)}", self._decorates)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        if self._decorates:
            return lambda decorated: decorated
        raise NotImplementedError(f"{self._path} is not on this machine: a stand-in takes its place")

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return (Base,)

    def __getitem__(self, _: Any) -> Name:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False

    def __or__(self, _: Any) -> type:
        return object

    __ror__ = __or__


def _public(name: str) -> str:
    """Refuse names that Python itself looks for."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(name)
    return name


def _names_of(package: str, decorates: bool) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        path = f"{package}.{_public(name)}"
        if path in sys.modules:
            return sys.modules[path]
        if name.lstrip("_")[:1].isupper() and not name.isupper():
            return type(name, (Base,), {"__module__": package})
        return Name(path, decorates)

    return find


class _Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports every module below an absent package."""

    def __init__(self, package: str, decorates: bool) -> None:
        self._below, self._decorates = package + ".", decorates

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith(self._below):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__dict__["__getattr__"] = _names_of(spec.name, self._decorates)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def make_absent(package: str, *, decorates: bool) -> None:
    """Give a package that is being imported every name and module."""
    module = sys.modules[package]
    module.__path__ = []
    module.__dict__["__getattr__"] = _names_of(package, decorates)
    sys.meta_path.insert(0, _Modules(package, decorates))
