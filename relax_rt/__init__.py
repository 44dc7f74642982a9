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


def __getattr__(name: str) -> Any:
    # Loaded with the first use, not with the package.
    if name == "Actor":
        from relax_rt.actors import Actor

        return Actor
    if name == "BadInput":
        from relax_rt.config.problems import BadInput

        return BadInput
    if name == "RelaxError":
        from relax_rt.transport.rpc.errors import RelaxError

        return RelaxError
    if name == "Runtime":
        from relax_rt.runtime import Runtime

        return Runtime
    if name == "discovery":
        return importlib.import_module("relax_rt.cluster.discovery")
    raise AttributeError(f"module 'relax_rt' has no attribute '{name}'")
