"""Finding role classes: by entry point of the group ``relax_rt.roles``, or as ``module:Class``."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points

from relax_rt.role import Role, RoleInfo
from relax_rt.transport.errors import RelaxError

ROLE_GROUP = "relax_rt.roles"


class RoleNotFound(RelaxError):
    """No class fills this kind of role."""


def known_roles() -> dict[str, RoleInfo]:
    """The roles that installed packages offer, by kind, without importing them."""
    return {entry.name: RoleInfo(kind=entry.name, target=entry.value) for entry in entry_points(group=ROLE_GROUP)}


def role_target(kind: str, target: str | None = None) -> str:
    """``module:Class`` of a kind of role.

    Raises:
        RoleNotFound: no package offers it and no target is given.
    """
    if target:
        return target
    known = known_roles()
    if kind not in known:
        raise RoleNotFound(
            f"no role is called {kind!r}",
            why=f"the entry point group {ROLE_GROUP} offers: {', '.join(sorted(known)) or 'nothing'}",
            hint="install the package that offers it, or correct the table's name in roles.toml",
        )
    return known[kind].target


def load_role(target: str) -> type[Role]:
    """Import a role class.

    Raises:
        ImportError: its module, or what that imports, cannot be imported.
        RoleNotFound: the target is malformed, or names something that is no role.
    """
    module, separator, name = target.partition(":")
    if not separator or not module or not name:
        raise RoleNotFound(f"role target {target!r} is not of the form module:Class")
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise RoleNotFound(f"module {module} has no {name}")
    if not (isinstance(found, type) and issubclass(found, Role)):
        raise RoleNotFound(f"{target} is not a subclass of relax_rt.role.Role")
    return found
