"""Write docs/reference/ from the code: config keys, commands, and the public Python interface.

    python tools/reference.py           # writes the pages
    python tools/reference.py --check   # fails if a page differs from the code

`make docs` and `make lint` call it. The pages are part of the repository, so that they can be read where it is.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"
GENERATED = "<!-- Written by tools/reference.py from the code: change the code, then run `make docs`. -->\n\n"

Schema = dict[str, Any]


def main() -> int:
    """Answer with the exit code: 0, or 1 where a page is not what the code says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a page would change")
    check = parser.parse_args().check
    stale = []
    for name, text in {"config.md": config_page(), "commands.md": commands_page()}.items():
        page, text = PAGES / name, GENERATED + text.rstrip() + "\n"
        if page.is_file() and page.read_text() == text:
            continue
        stale.append(name)
        if not check:
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(text)
    if stale and check:
        print(f"docs/reference: {', '.join(stale)} differ from the code: run `python tools/reference.py`")
        return 1
    return 0


# --- config keys


def config_page() -> str:
    """Render every table of roles.toml, its keys with type, default and meaning."""
    command = [sys.executable, "-m", "relax_rt.cli.main", "validate", "--schema", "--json"]
    schema: Schema = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    tables, roles = schema["properties"], schema["properties"]["roles"]["properties"]
    shared = set.intersection(*(set(role["properties"]) for role in roles.values()))
    lines = [
        "# Config keys",
        "",
        "Every table of `roles.toml`. `relax-rt validate --schema` prints the same in the form of a config;",
        "`--schema --json` as JSON Schema, for editors. Unknown keys are errors.",
        "",
    ]
    for name, table in tables.items():
        if name != "roles":
            lines += table_lines(name, table, schema)
    any_role = {**next(iter(roles.values()))}
    any_role["properties"] = {key: value for key, value in any_role["properties"].items() if key in shared}
    any_role["description"] = "Keys that every role has, `[roles.trainer]` as any other."
    lines += table_lines("roles.NAME", any_role, schema)
    for name, role in roles.items():
        own = {key: value for key, value in role["properties"].items() if key not in shared}
        if own:
            lines += table_lines(f"roles.{name}", {**role, "properties": own}, schema)
    return "\n".join(lines)


def table_lines(name: str, table: Schema, schema: Schema) -> list[str]:
    """Render one table, and the tables inside it after it."""
    table = resolved(table, schema)
    needed = set(table.get("required", ()))
    lines = [f"## [{name}]", "", prose(table.get("description", "")), ""]
    inner: list[str] = []
    for key, value in table.get("properties", {}).items():
        if (sub := inner_table(value, schema)) is not None:
            many = resolved(value, schema).get("type") == "array"
            inner += table_lines(f"[{name}.{key}]" if many else f"{name}.{key}", sub, schema)
            continue
        default = "needed" if key in needed else f"default `{toml(value.get('default'))}`"
        lines += [f"`{key}`", f":   {kind(value, schema)}; {default}.", ""]
        lines += [f"    {prose(description(value, schema))}", ""]
    return lines + inner


def resolved(value: Schema, schema: Schema) -> Schema:
    """Follow a reference to `$defs`, keeping what stands beside it."""
    if "$ref" in value:
        rest = {key: one for key, one in value.items() if key != "$ref"}
        return {**schema["$defs"][value["$ref"].rpartition("/")[2]], **rest}
    return value


def inner_table(value: Schema, schema: Schema) -> Schema | None:
    """Return the table that a key holds, one or a list of them; None for a plain value."""
    for one in value.get("anyOf", [value]):
        found = resolved(one, schema)
        if found.get("type") == "array":
            found = resolved(found.get("items", {}), schema)
        if found.get("properties"):
            return found
    return None


def kind(value: Schema, schema: Schema) -> str:
    """Name the type of a value with its bounds, as a reader writes it in TOML."""
    value = resolved(value, schema)
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(kind(one, schema) for one in value["anyOf"] if one.get("type") != "null"))
    if "enum" in value:
        return " or ".join(f"`{toml(one)}`" for one in value["enum"])
    if "const" in value:
        return f"`{toml(value['const'])}`"
    names = {"string": "text", "integer": "integer", "number": "number", "boolean": "true or false", "object": "table"}
    name = names.get(value.get("type", ""), "any value")
    if value.get("type") == "array":
        name = f"list of {kind(value.get('items', {}), schema)}"
    words = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    bounds = [f"{text} {value[key]:,}" for key, text in words.items() if key in value]
    return ", ".join([name, *bounds])


def description(value: Schema, schema: Schema) -> str:
    """Return what a key means."""
    return str(value.get("description") or resolved(value, schema).get("description") or "")


def prose(text: str) -> str:
    """Join the lines of a docstring, and keep Markdown from reading placeholders as HTML."""
    return re.sub(r"<(?=\w)", "&lt;", re.sub(r"\s*\n\s*", " ", text.strip()))


def toml(value: Any) -> str:
    """Write a value as TOML does."""
    return "unset" if value is None else json.dumps(value, ensure_ascii=False)


# --- commands


def commands_page() -> str:
    """Render the help of every command."""
    from relax_rt.cli.main import app

    return "\n".join(without_contents(app.generate_docs().splitlines()))


def without_contents(lines: list[str]) -> Iterator[str]:
    """Drop the table of contents, which the site has at its side."""
    inside = False
    for line in lines:
        if line.startswith("## Table of Contents"):
            inside = True
        elif inside and line and not line.startswith(("- ", "  ")):
            inside = False
        if not inside:
            yield line.rstrip()


if __name__ == "__main__":
    sys.exit(main())
