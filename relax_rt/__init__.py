"""relax-rt: asynchronous RL post-training on bare-metal nodes, as restartable processes."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from relax_rt.config.version import VERSION

if TYPE_CHECKING:
    from relax_rt.actors import Actor
    from relax_rt.cluster import discovery
    from relax_rt.config.problems import BadInput
    from relax_rt.runtime import Runtime
    from relax_rt.transport.rpc.errors import RelaxError

__version__ = VERSION
__all__ = ["Actor", "BadInput", "RelaxError", "Runtime", "__version__", "discovery"]

_MODULES = {
    "Actor": "relax_rt.actors",
    "BadInput": "relax_rt.config.problems",
    "RelaxError": "relax_rt.transport.rpc.errors",
    "Runtime": "relax_rt.runtime",
}
"""Where each public name is. It is imported at its first use, so that `import relax_rt` stays light."""


def __getattr__(name: str) -> Any:
    if name == "discovery":
        return importlib.import_module("relax_rt.cluster.discovery")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module 'relax_rt' has no attribute '{name}'")
