"""A config, a model and a context for the tests of cold starts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from relax_rt.config.loader import load_config
from relax_rt.roles.config.sections import RLConfig
from relax_rt.transport.rpc.identity import Incarnation

ROLES_TOML = """
[run]
name = "cold"
dir = "{dir}/run"
[model]
path = "model"
[data]
task = "chain_sum"
size = 200
options = {{ min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 2 }}
template = "{{question}}"
max_prompt_tokens = 128
[reward]
function = "relax_rt.roles.rewards.builtin:integer"
[sampling]
max_new_tokens = 8
temperature = 0.7
[algorithm]
learning_rate = 1e-3
[evaluation]
items = 8
"""


def config_of(folder: Path, *overrides: str) -> RLConfig:
    """The config of these tests with these settings; `folder` has the model in it."""
    path = folder / "roles.toml"
    path.write_text(ROLES_TOML.format(dir=folder))
    config = load_config(path, overrides)
    assert isinstance(config, RLConfig)
    return config


def write_rows(path: Path, rows: list[Any]) -> str:
    """A .jsonl file; text stands as it is."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path.name


class FakeContext:
    """What a cold start uses of a role's context; it keeps what it is told."""

    def __init__(self, config: RLConfig, run_dir: Path, epoch: int = 1) -> None:
        self.config, self.run_dir, self.who = config, run_dir, Incarnation("trainer/0", epoch)
        self.stopping = asyncio.Event()
        self.records: list[dict[str, Any]] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.readies = 0
        nothing = lambda *args, **kwargs: None  # noqa: E731
        self.progress = SimpleNamespace(advance=nothing, waiting=nothing, extend=self._extend)
        self.log = SimpleNamespace(info=nothing, warning=nothing)
        self.extended: list[tuple[float, str]] = []
        run_dir.mkdir(exist_ok=True)

    def _extend(self, seconds: float, reason: str) -> None:
        self.extended.append((seconds, reason))

    async def ready(self, policy_version: int = 0) -> None:
        self.readies += 1

    def metrics(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def event(self, kind: str, /, **fields: Any) -> None:
        self.events.append((kind, fields))
