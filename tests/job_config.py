"""A small config, and what is wrong with a changed one."""

from __future__ import annotations

from pathlib import Path

from relax_rt.config.loader import load_config
from relax_rt.config.problems import ConfigErrors, Problem

ROLES_TOML = """
[run]
name = "r"
dir = "{dir}/run"
[model]
path = "model"
[data]
task = "chain_sum"
size = 300
options = {{ min_terms = 2, max_terms = 2 }}
[reward]
function = "relax_rt.roles.rewards.builtin:integer"
[sampling]
max_new_tokens = 8
[evaluation]
items = 8
"""


def problems(toml: Path, *overrides: str, preflight: bool = False) -> dict[str, Problem]:
    """What is wrong, by dotted key; empty if nothing is."""
    try:
        load_config(toml, overrides, preflight=preflight)
    except ConfigErrors as error:
        return {".".join(map(str, p.path)): p for p in error.problems}
    return {}
