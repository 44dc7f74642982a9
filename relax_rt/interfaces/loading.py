"""Finding role classes: by entry point of the group ``relax_rt.roles``, or by a target named in roles.toml."""

from __future__ import annotations

from importlib.metadata import entry_points

from relax_rt.config.target import TargetError, load_target
from relax_rt.interfaces.role import Role, RoleInfo

ROLE_GROUP = "relax_rt.roles"


def known_roles() -> dict[str, RoleInfo]:
    """The roles that installed packages offer, by kind, without importing them."""
    return {entry.name: RoleInfo(kind=entry.name, target=entry.value) for entry in entry_points(group=ROLE_GROUP)}


def role_target(kind: str, target: str | None = None) -> str:
    """Where a kind of role is implemented: the target given, else that of the installed package that offers it.

    Raises:
        TargetError: no package offers it and no target is given.
    """
    if target:
        return target
    known = known_roles()
    if kind not in known:
        raise TargetError(
            f"no role is called {kind!r}",
            why=f"installed packages offer: {', '.join(sorted(known)) or 'nothing'}",
            hint='install the package that offers it, or give roles.<name>.target = "file.py:Class"',
        )
    return known[kind].target


def load_role(target: str) -> type[Role]:
    """Import a role class: ``package.module:Class`` or ``/path/file.py:Class``.

    Raises:
        TargetError: it cannot be imported, or names something that is no role.
    """
    found = load_target(target)
    if not (isinstance(found, type) and issubclass(found, Role)):
        raise TargetError(f"{target} is not a subclass of relax_rt.interfaces.role.Role")
    return found
