"""Every key of a roles.toml, described: as TOML with comments for people, as JSON Schema for editors."""

from __future__ import annotations

import json
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from relax_rt.config.job import Job, Planner
from relax_rt.config.loader import FILLED_IN, SYSTEM_ROLES
from relax_rt.config.schema import RoleSettings

WIDTH = 100
INTERNAL = (*FILLED_IN, "roles")
NAMES = {str: "text", int: "integer", float: "number", bool: "true or false", dict: "table", list: "array"}


def as_toml(job: Job) -> str:
    """The tables of a job's roles.toml with every key at its default, each under what it means."""
    parts = list(_table("", job.Config))
    parts += _table("roles.NAME", RoleSettings, "Every role, also your own, takes these.")
    for kind, settings in _roles(job).items():
        own = [name for name in settings.model_fields if name not in RoleSettings.model_fields]
        if own:
            parts += _table(f"roles.{kind}", settings, "Besides those of every role.", only=own)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


def as_json_schema(job: Job) -> dict[str, Any]:
    """JSON Schema of a job's roles.toml."""
    schema = job.Config.model_json_schema()
    for name in FILLED_IN:
        schema.get("properties", {}).pop(name, None)
    roles = {kind: settings.model_json_schema() for kind, settings in _roles(job).items()}
    for role in roles.values():
        # References are looked up at the top of the document; tables of one name are one class.
        schema["$defs"].update(role.pop("$defs", {}))
    schema["properties"]["roles"] = {
        "type": "object",
        "properties": roles,
        "additionalProperties": RoleSettings.model_json_schema(),
    }
    return schema


def _roles(job: Job) -> Mapping[str, type[RoleSettings]]:
    named = job.Planned if isinstance(job, Planner) else {}
    return {**dict.fromkeys(SYSTEM_ROLES, RoleSettings), **job.Roles, **named}


def _table(path: str, model: type[BaseModel], about: str = "", only: list[str] | None = None) -> Iterator[str]:
    about = about or " ".join((model.__doc__ or "").split())
    names = [name for name in (only or model.model_fields) if name not in INTERNAL]
    tables = {name: inner for name in names if (inner := _model(model.model_fields[name].annotation))}
    plain = [name for name in names if name not in tables]
    if path and (plain or not tables):
        yield from _comment(about)
        yield f"[{path}]"
    for name in plain:
        yield from _key(name, model.model_fields[name])
    for name, inner in tables.items():
        yield ""
        lines, field = _table(f"{path}.{name}" if path else name, inner), model.model_fields[name]
        many = get_origin(field.annotation) is list
        unset = not field.is_required() and field.default is None
        yield from _as_comments(lines, many=many) if many or unset else lines
    if path and not tables:
        yield ""


def _as_comments(lines: Iterator[str], *, many: bool) -> Iterator[str]:
    """A table that is not there unless one writes it, or one of an array of those."""
    for line in lines:
        if line.startswith("["):
            yield f"# [{line}]" if many else f"# {line}"
        else:
            yield f"# {line}" if line and not line.startswith("#") else line


def _key(name: str, field: FieldInfo) -> Iterator[str]:
    kind = _kind(field.annotation, field.metadata)
    yield from _comment(f"{' '.join((field.description or '').split())} ({kind})".strip())
    if field.is_required():
        yield f"{name} = …    # needed"
    elif field.default is None:
        yield f"# {name} is not set"
    else:
        default = field.get_default(call_default_factory=True)
        yield f"{name} = {_value(default if default is not PydanticUndefined else None)}"


def _comment(text: str) -> Iterator[str]:
    for line in textwrap.wrap(text, WIDTH - 2):
        yield f"# {line}"


def _kind(annotation: Any, metadata: list[Any]) -> str:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        return _kind(inner, [m for one in more for m in (getattr(one, "metadata", None) or [one])] + metadata)
    bounds = _bounds(metadata)
    if origin is Literal:
        return " or ".join(f'"{one}"' for one in get_args(annotation))
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(one, metadata) for one in get_args(annotation) if one is not type(None))
    if origin in (list, tuple):
        return f"array of {_kind(get_args(annotation)[0], [])}"
    return NAMES.get(origin or annotation, "value") + (f", {bounds}" if bounds else "")


def _bounds(metadata: list[Any]) -> str:
    bounds = []
    for one in metadata:
        match one:
            case Gt(gt=limit):
                bounds.append(f"above {limit}")
            case Ge(ge=limit):
                bounds.append(f"at least {limit}")
            case Lt(lt=limit):
                bounds.append(f"below {limit}")
            case Le(le=limit):
                bounds.append(f"at most {limit}")
            case BaseMetadata():
                pass
    return ", ".join(bounds)


def _model(annotation: Any) -> type[BaseModel] | None:
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False)
