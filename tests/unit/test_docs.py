"""The documentation is true: its configs are valid, and the names and files that it mentions exist."""

from __future__ import annotations

import ast
import importlib
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors

ROOT = Path(__file__).parents[2]
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
PAGES = [*GUIDES, *sorted((ROOT / "docs/explanation").glob("*.md")), *sorted(ROOT.glob("examples/*/README.md"))]
PAGES += [
    ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md", "docs/benchmarks.md")
]
WALKS = ROOT / "docs/explanation/walks.md"
"""Names files of an older commit."""
ELSEWHERE = ("there is no", "not installed", "nothing can listen", "GPU", "and the run has no")
"""In problems that depend on the reader's files and machine, or on roles of another block of the page."""
BASE: dict[str, Any] = {
    "run": {"name": "docs"},
    "model": {"path": "package:tiny"},
    "data": {"task": "chain_sum", "size": 100, "options": {"min_terms": 2, "max_terms": 2}},
    "reward": {"function": "relax_rt.roles.rewards.builtin:integer"},
    "sampling": {"max_new_tokens": 8},
    "algorithm": {"steps": 5},
    "roles": {"rollout": {}, "reward": {}, "trainer": {}},
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    both = {**base, **change}
    tables = (key for key in change if isinstance(change[key], dict) and isinstance(base.get(key), dict))
    return both | {key: merged(base[key], change[key]) for key in tables}


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_configs_of_a_guide_are_valid(page: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(blocks(ROOT / "docs/guides/algorithms.md", "python")[0] + ACTOR)
    (tmp_path / "game.py").write_text(blocks(ROOT / "docs/guides/environments.md", "python")[0] + FUNCTIONS)
    (tmp_path / "reward.py").write_text(FUNCTIONS)
    for text in blocks(page, "toml"):
        change = tomllib.loads(text)
        if "nodes" in change or "gpu" in change:
            continue  # an inventory
        base = BASE
        if "env" in change.get("roles", {}):
            roles = {"rollout": {}, "trainer": {}, "env": {"environment": "game.py:Echo", "tasks": 10}}
            base = {**{key: one for key, one in BASE.items() if key not in ("data", "reward")}, "roles": roles}
        elif "data" in change:
            base = {**BASE, "data": {}}
        if "components" in change.get("reward", {}):
            base = {**base, "reward": {}}
        config = merged(base, change)
        if "evaluation" in change and "env" not in config["roles"]:
            config["roles"]["evaluator"] = {}
        path = tmp_path / "roles.toml"
        path.write_text("".join(f"{key} = {toml(one)}\n" for key, one in config.items()))
        try:
            load_config(path, preflight=False)
        except ConfigErrors as error:
            wrong = [p.render() for p in error.problems if not any(word in p.render() for word in ELSEWHERE)]
            assert not wrong, text + "\n".join(wrong)


FUNCTIONS = """
def score(completion, answer="", **info): return 1.0
style = strict = score
"""
ACTOR = """
from relax_rt.actors import Actor
class Reward(Actor):
    async def score(self, text: str) -> float:
        return 1.0
"""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_imports_exists(page: Path) -> None:
    for code in blocks(page, "python"):
        for module, names in re.findall(r"^\s*from (relax_rt[\w.]*) import ([\w, ]+)", code, re.MULTILINE):
            for name in re.findall(r"\w+", names):
                assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page != WALKS], ids=lambda page: str(page.relative_to(ROOT))
)
def test_the_files_that_a_page_names_exist(page: Path) -> None:
    for path in re.findall(r"`((?:roles|relax_rt|transport|tests|tools|examples|docs)/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


def test_where_things_happen_names_functions_that_exist() -> None:
    for line in (ROOT / "docs/explanation/where.md").read_text().splitlines():
        if not line.startswith("| ") or line.startswith(("| ---", "| question")):
            continue
        file, functions = line.split(" | ", 2)[1:]
        first = ROOT / re.findall(r"`([^`]+)`", file)[0]
        files = list(first.glob("*.py")) if first.is_dir() else [first]
        for name in re.findall(r"`([\w/]+\.py)`", functions):
            files += [one for one in (ROOT / name, first.parent / name) if one.is_file()][:1]
        trees = [ast.parse(one.read_text()) for one in files]
        known = {getattr(node, "name", "") for tree in trees for node in ast.walk(tree)}
        for named in re.findall(r"`([\w.]+)`", functions):
            if not named.endswith(".py") and not named.startswith("asyncio"):
                assert known.issuperset(named.split(".")), f"{line}: {named}"
