"""Write docs/reference/ from the code: config keys, commands, events, and the metrics of `relax-rt export`.

    python tools/reference.py           # writes the pages
    python tools/reference.py --check   # fails if a page differs from the code

`make docs` and `make lint` call it. The pages are part of the repository, so that they can be read where it is.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
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
    pages = {"config.md": config_page(), "commands.md": commands_page(), "events.md": events_page()}
    for name, text in {**pages, "metrics.md": metrics_page()}.items():
        page = PAGES / name
        text = (GENERATED if name in pages else "") + text.rstrip() + "\n"
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


# --- events

EMITTERS = frozenset({"event", "emit", "_emit", "_emit_role", "_event", "_notify", "_tell", "Emit", "append_event"})
"""Functions that write an event whose kind is their first literal argument."""
NOT_EVENTS = ("roles/gateway/anthropic_messages.py", "roles/gateway/openai_responses.py")
"""Modules in which these names belong to the events of an HTTP stream."""
ALWAYS = {
    ("relax_rt/supervision/supervisor.py", "_emit"): ("slot", "epoch"),
    ("relax_rt/supervision/supervisor.py", "_emit_role"): ("role",),
    ("relax_rt/hosting/faults.py", "_tell"): ("slot", "epoch"),
}
"""Fields that these functions add themselves."""
EVENT = re.compile(r"[a-z][a-z_]+")


def events_page() -> str:
    """Render every kind of event with its fields, as the code writes them, and its meaning.

    Raises:
        SystemExit: the code and the table of meanings do not have the same kinds.
    """
    meanings = tomllib.loads((ROOT / "tools" / "reference_events.toml").read_text())
    fields, constants = event_fields()
    known = {kind for kinds in meanings.values() for kind in kinds}
    if missing := sorted(set(fields) - known):
        raise SystemExit(f"tools/reference_events.toml lacks {', '.join(missing)}, which the code writes as events")
    if gone := sorted(known - constants):
        raise SystemExit(f"tools/reference_events.toml has {', '.join(gone)}, which no code writes any more")
    lines = [
        "# Events",
        "",
        "`<run_dir>/events/` holds one JSON object a line: `events-000001.jsonl` and so on, then `current.jsonl`. Each",
        "event has `t` (wall-clock time, s), `m` (the machine's monotonic clock, s), `by` (the process that wrote it:",
        "`slot#epoch`, `agent`, `keeper` or `chaos`) and `kind`; events that the queue derives from its journal have",
        "its sequence number `n`. `relax-rt why` explains them, `relax-rt trace` draws them, and",
        "`relax_rt.observe.events.read_events` reads them.",
        "",
        "An ellipsis stands for further fields.",
        "",
    ]
    for writer, kinds in meanings.items():
        lines += [f"## {writer}", "", "| event | fields | meaning |", "| --- | --- | --- |"]
        for kind, meaning in sorted(kinds.items()):
            names = ", ".join("…" if name == "**" else f"`{name}`" for name in fields.get(kind, ["**"]))
            lines.append(f"| `{kind}` | {names} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def event_fields() -> tuple[dict[str, list[str]], set[str]]:
    """Return the fields of every event that the code writes with a literal kind, and all string constants."""
    fields: dict[str, dict[str, None]] = {}
    constants: set[str] = set()
    for path in sorted(p for folder in ("transport", "relax_rt", "roles") for p in (ROOT / folder).glob("**/*.py")):
        name = str(path.relative_to(ROOT))
        if name in NOT_EVENTS:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                constants.add(node.value)
            elif isinstance(node, ast.Call):
                function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if function in EMITTERS or (function == "log" and name.startswith("transport/queue/ledger/")):
                    for kind in event_kinds(node):
                        own = fields.setdefault(kind, dict.fromkeys(ALWAYS.get((name, function), ())))
                        own |= dict.fromkeys(event_names(node))
    # An ellipsis comes last.
    return {kind: sorted(own, key=lambda field: field == "**") for kind, own in fields.items()}, constants


def event_kinds(call: ast.Call) -> Iterator[str]:
    """Return the literal kinds that a call may write."""
    for argument in call.args[:3]:
        choices = [argument.body, argument.orelse] if isinstance(argument, ast.IfExp) else [argument]
        kinds = [c.value for c in choices if isinstance(c, ast.Constant) and isinstance(c.value, str)]
        if kinds and all(map(EVENT.fullmatch, kinds)):
            yield from kinds
            return


def event_names(call: ast.Call) -> Iterator[str]:
    """Return the fields that a call gives: keywords, and the keys of a literal table."""
    tables = [argument for argument in call.args if isinstance(argument, ast.Dict)]
    for table in tables:
        yield from (key.value if isinstance(key, ast.Constant) else "**" for key in table.keys)
    if not tables and len(call.args) > 1 and not isinstance(call.args[1], ast.Name | ast.Attribute | ast.Constant):
        yield "**"
    yield from (keyword.arg or "**" for keyword in call.keywords)


# --- metrics

PROMETHEUS = re.compile(r"(<!-- prometheus: .*? -->\n).*?(?=<!-- end -->)", re.DOTALL)


def metrics_page() -> str:
    """Return docs/reference/metrics.md with the table of `relax-rt export --prometheus` made anew.

    The rest of the page is written by hand; it must have a section for every kind of record that the code writes.

    Raises:
        SystemExit: a kind has no section, or the page has no place for the table.
    """
    from relax_rt.cli.export import RUN_METRICS, SLOT_METRICS

    text = (PAGES / "metrics.md").read_text()
    if missing := sorted(kind for kind in record_kinds() if f"## {kind}:" not in text):
        raise SystemExit(f"docs/reference/metrics.md has no section '## {missing[0]}: …' for these records")
    rows = ["| metric | type | labels | meaning |", "| --- | --- | --- | --- |"]
    for metrics, labels in ((RUN_METRICS, "`run`"), (SLOT_METRICS, "`run`, `slot`, `role`, `node`")):
        rows += [f"| `relax_{name}` | {kind} | {labels} | {help_} |" for name, (kind, help_) in metrics.items()]
    table = "\n".join(["", *rows, "", ""])
    if not PROMETHEUS.search(text):
        raise SystemExit("docs/reference/metrics.md has no place for the table: <!-- prometheus: … --> to <!-- end -->")
    return PROMETHEUS.sub(lambda found: found[1] + table, text)


def record_kinds() -> set[str]:
    """Return the kinds of records that roles write with a literal kind: `metrics({"kind": …})`."""
    found: set[str] = set()
    for path in sorted((ROOT / "roles").glob("**/*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "metrics":
                for table in (argument for argument in node.args if isinstance(argument, ast.Dict)):
                    pairs = zip(table.keys, table.values, strict=True)
                    found |= {
                        value.value
                        for key, value in pairs
                        if isinstance(key, ast.Constant) and key.value == "kind" and isinstance(value, ast.Constant)
                    }
    return found


if __name__ == "__main__":
    sys.exit(main())
