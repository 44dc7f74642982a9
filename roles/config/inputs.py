"""Find what a config names and what does not exist: files, and tasks of reasoning-gym."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from relax_rt.config.problems import KeyPath, Problem, did_you_mean, dotted
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.files import is_pattern, missing_hint
from relax_rt.roles.data.gym import find_fault
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.evaluation.settings import EvaluationSet
from relax_rt.roles.models.resolve import check_model
from relax_rt.transport.rpc.errors import RelaxError

DATA = ("data", "cold_start", "evaluation")
"""Tables whose keys named `path` are files or folders of rows."""
MODELS: tuple[KeyPath, ...] = (("model", "path"), ("roles", "reference", "model"), ("roles", "genrm", "model"))
CODE = re.compile(r"\S+\.py:(?!\d)\w+")
"""`file.py:name`, and no text in which such a thing stands, as a prompt."""
CODE_KEYS = ("function", "environment", "target")
"""Keys that name code only, so that the path of the file may have spaces."""


def missing_inputs(config: RLConfig, config_dir: Path) -> Iterator[Problem]:
    """Report each model, data file, task, source file or name in it that does not exist.

    Args:
        config_dir: what relative paths are relative to.
    """
    for path, text in _texts(config, ()):
        if path in MODELS and not (
            path[0] == "roles" and getattr(config.roles[str(path[1])], "target", None) is not None
        ):
            yield from _model(path, text, config_dir)
        elif path[0] in DATA and path[-1] == "path" and not {"options", "columns"} & set(path):
            yield from _data(path, text, config_dir)
        elif CODE.fullmatch(text) or (path[-1] in CODE_KEYS and text.rpartition(":")[0].endswith(".py")):
            yield from _code(path, text, config_dir)
    tables: list[tuple[KeyPath, DataTable | EvaluationSet]] = [(("data",), config.data)]
    tables += [(("evaluation", "sets", number), one) for number, one in enumerate(config.evaluation.sets)]
    for at, table in tables:
        if table.task and (fault := find_fault(table.task, table.options, dotted(at))):
            key = (*at, *fault.key)
            what = f"{dotted(key)} = {table.task!r}" if fault.key == ("task",) else dotted(key)
            yield Problem(key, f"{what}: {fault.why}", fault.hint, at="value" if fault.key == ("task",) else "key")


def _texts(value: Any, at: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text of a config with its key."""
    if isinstance(value, str):
        yield at, value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _texts(getattr(value, name), (*at, name))
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, (*at, name))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _texts(inner, (*at, index))


def _model(path: KeyPath, text: str, config_dir: Path) -> Iterator[Problem]:
    try:
        check_model(text, config_dir)
    except RelaxError as error:
        yield Problem(path, error.what.replace("model.path", dotted(path)) + f": {error.why}", error.hint)


def _data(path: KeyPath, text: str, config_dir: Path) -> Iterator[Problem]:
    file = config_dir / Path(text).expanduser()
    if not is_pattern(file) and not file.exists():
        yield Problem(path, f"{dotted(path)} = {text!r}: there is no file {file}", missing_hint(file, text))


def _code(path: KeyPath, text: str, config_dir: Path) -> Iterator[Problem]:
    """Check that the file exists and defines the name. It is parsed, not imported, which may take long."""
    name, _, wanted = text.rpartition(":")
    file = (config_dir / Path(name).expanduser()).resolve()
    what = f"{dotted(path)} = {text!r}"
    if not file.is_file():
        yield Problem(path, f"{what}: there is no file {file}", _near(file))
        return
    try:
        tree = ast.parse(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        line = f" at {file}:{error.lineno}" if isinstance(error, SyntaxError) else f" of {file}"
        yield Problem(path, f"{what}: {name} cannot be imported: {type(error).__name__}: {error}{line}")
        return
    except OSError as error:
        yield Problem(path, f"{what}: {file} cannot be read: {error.strerror or error}")
        return
    known = _names(tree)
    if known is not None and wanted not in known:
        public = sorted(one for one in known if not one.startswith("_"))
        hint = did_you_mean(wanted, public) or (f"it has: {', '.join(public)}" if public else "it has no names")
        yield Problem(path, f"{what}: {file} has no '{wanted}'", hint)


def _names(tree: ast.Module) -> set[str] | None:
    """Return the names that a module defines; None if that is only known when it runs."""
    found: set[str] = set()
    for node in _own(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            found.add(node.name)
        elif isinstance(node, ast.Name) and node.id in ("globals", "vars", "exec", "setattr"):
            return None
    return None if found & {"*", "__getattr__"} else found


def _own(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run when a module is imported: not those inside functions and classes."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _own(node)


def _near(file: Path) -> str:
    folder = file.parent
    beside = [p.name for p in folder.iterdir() if p.name.endswith(".py")] if folder.is_dir() else []
    return did_you_mean(file.name, beside)
