"""Load user code that a setting names: `file.py:name` or `package.module:name`; suggest near names for typos."""

from __future__ import annotations

import builtins
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from relax_rt.transport.rpc.errors import Refused, did_you_mean


class NoTarget(Refused):
    """The named code does not exist or cannot be imported; `__cause__` is what the import raised."""


def load_target(target: str, base: Path = Path()) -> Any:
    """Import what a target names.

    A file is imported once per process, as a module of its package: relative imports work, also of the folders between
    `base` and the file. Sibling modules, and packages in `base`, can be imported by name, and this code gets them even
    if another module of that name is installed or loaded.

    Args:
        base: what a relative file is relative to. `package.module` is looked for there, too.

    Raises:
        NoTarget: malformed, not there, or raised while it was imported.
    """
    place, separator, name = target.rpartition(":")
    if not separator or not place or not name.isidentifier():
        raise NoTarget(f"'{target}' names no code", hint="write file.py:name or package.module:name")
    try:
        beside = None if place.endswith(".py") else _beside(place, base)
        if beside is not None:
            place = str(beside.relative_to(base.resolve()))
        module = _import_file(place, base) if place.endswith(".py") else importlib.import_module(place)
    except NoTarget:
        raise
    except Exception as error:
        file = base / f"{place}.py" if isinstance(error, ModuleNotFoundError) and error.name == place else None
        hint = f"did you mean '{place}.py:{name}'? A file is named with its ending" if file and file.is_file() else ""
        raise NoTarget(f"{place} cannot be imported", why=f"{type(error).__name__}: {error}", hint=hint) from error
    if not hasattr(module, name):
        known = [n for n in vars(module) if not n.startswith("_")]
        raise NoTarget(f"{place} has no '{name}'", hint=did_you_mean(name, known) or f"it has: {', '.join(known)}")
    return getattr(module, name)


_modules: dict[Path, ModuleType] = {}
"""Files of users that were imported, by their path."""


def _beside(place: str, base: Path) -> Path | None:
    """The file in `base` that `package.module` refers to; None if Python finds the module itself."""
    parts = place.split(".")
    if base == Path() or len(parts) < 2 or not all(part.isidentifier() for part in parts):
        return None
    if not _is_other(parts[0], base.resolve()):
        return None
    path = base.resolve().joinpath(*parts)
    return next((one for one in (path / "__init__.py", path.with_name(f"{path.name}.py")) if one.is_file()), None)


def _is_other(name: str, root: Path) -> bool:
    """Whether `import name` would not find what lies in `root`: Python finds another module or none, or it is a package
    of `root` that is already imported under our package name and must not be loaded twice.

    The standard library and this package are never overridden by a folder.
    """
    if name in sys.stdlib_module_names or name in ("__main__", __name__.partition(".")[0]):
        return False
    if name in UserCode.of(root).packages:
        return True
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return True
    ours = (root / f"{name}.py", root / name, root / name / "__init__.py")
    found = [place for place in (spec.origin, *(spec.submodule_search_locations or ())) if place]
    return not any(Path(place).resolve() in ours for place in found)


def _import_file(place: str, base: Path) -> ModuleType:
    path = (base / place).resolve()
    if not path.is_file():
        beside = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise NoTarget(f"there is no file {path}", hint=did_you_mean(path.name, beside))
    if path in _modules:
        return _modules[path]
    root = base.resolve()
    outside = Path(place).is_absolute() or not path.is_relative_to(root)
    # A name in the path, as v1.2, cannot be a package's.
    if outside or any("." in part for part in path.parent.relative_to(root).parts):
        # The folder of the outermost package that the file belongs to; its own if it is in none.
        root = path.parent
        while (root / "__init__.py").is_file() and root.name.isidentifier():
            root = root.parent
    for folder in dict.fromkeys((path.parent, root)):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    _modules[path] = UserCode.of(root).load(path)
    return _modules[path]


class UserCode(importlib.abc.MetaPathFinder):
    """Imports the modules below one folder under a package name of their own, so that no names collide.

    `relax_user_…` is the folder as a package, in which relative imports work as usual. For modules of the folder,
    `__import__` is `_import`, which resolves two kinds of top-level names to the folder: those that Python would
    resolve elsewhere (`tools` with another `tools` installed), and packages that contain a target, which would
    otherwise be loaded twice. Changing sys.path instead would affect all other imports, and come too late for modules
    that are already loaded.
    """

    _all: ClassVar[dict[Path, UserCode]] = {}

    def __init__(self, root: Path) -> None:
        self.root = root
        # Two files may bear one name in different folders.
        self.package = f"relax_user_{hashlib.sha256(str(root).encode()).hexdigest()[:8]}"
        package = ModuleType(self.package)
        package.__path__ = [str(root)]
        sys.modules[self.package] = package
        sys.meta_path.insert(0, self)
        self.packages: set[str] = set()
        self.builtins = {**vars(builtins), "__import__": self._import}

    @classmethod
    def of(cls, root: Path) -> UserCode:
        """The importer of a folder."""
        if root not in cls._all:
            cls._all[root] = cls(root)
        return cls._all[root]

    def load(self, path: Path) -> ModuleType:
        """Import a file of the folder, with the packages that it lies in."""
        parts = [self.package, *path.relative_to(self.root).with_suffix("").parts]
        if len(parts) > 2:
            self.packages.add(parts[1])
        name = ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)
        spec = importlib.util.find_spec(name) if "." not in path.stem else None
        if spec is not None and spec.origin == str(path):
            return importlib.import_module(name)
        # No import statement can name this file: my.reward.py, or a reward.py next to reward/__init__.py.
        name = f"{'.'.join(parts[:-1])}.{path.stem.replace('.', '_')}_py"
        spec = importlib.util.spec_from_file_location(name, path, loader=UserLoader(name, str(path), self))
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module in the folder with Python's own search, but with our loader."""
        if not fullname.startswith(f"{self.package}."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = UserLoader(fullname, spec.loader.path, self)
        return spec

    def _import(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if level == 0 and self._has(name, fromlist or ()):
            return builtins.__import__(name, {"__package__": self.package}, None, fromlist or (), 1)
        return builtins.__import__(name, globals, locals, fromlist or (), level)

    def _has(self, name: str, fromlist: Sequence[str]) -> bool:
        """Whether an import of a top-level name means what lies in the folder."""
        top, _, rest = name.partition(".")
        folder = self.root / top
        whole = folder.with_name(f"{top}.py").is_file() or (folder / "__init__.py").is_file()
        if not whole and top not in self.packages:
            # A folder without __init__.py may be unrelated: it is used only if it contains what is imported.
            below = [rest.partition(".")[0]] if rest else fromlist
            if not any((folder / f"{one}.py").is_file() or (folder / one).is_dir() for one in below if one != "*"):
                return False
        return _is_other(top, self.root)


class UserLoader(importlib.machinery.SourceFileLoader):
    """Executes a module with the `__import__` of its folder."""

    def __init__(self, fullname: str, path: str, code: UserCode) -> None:
        super().__init__(fullname, path)
        self._code = code

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with the builtins of its folder."""
        module.__dict__["__builtins__"] = self._code.builtins
        super().exec_module(module)
