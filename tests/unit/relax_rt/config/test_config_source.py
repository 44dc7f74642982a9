"""The text of a config: the position of every key and value against tomllib, and syntax errors."""

from __future__ import annotations

import math
import tomllib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relax_rt.config.problems import ConfigErrors, KeyPath
from relax_rt.config.source import SourceText, parse, scan

Paths = dict[KeyPath, Any]
LINES = ["a = 1", "a = 2", "b.c = 1", "[b]", "[[e]]", "x = yes", "x = [1,", 'y = "', "[g", "ü = 1"]

CORNERS = {
    "scalars": "a = 1\nb = -1_000.5e3 # c\nc = 1979-05-27 07:32:00 # d\nd = inf\n  e   =   true   \n",
    "strings": 'a = "x # ] \\" y"\nb = \'c:\\\'\ne = ""\n',
    "multi-line strings": "c = \"\"\"\none \\\" \"\" two\"\"\"\"\"\nd = '''\n'x' ''y'''''\n",
    "empty multi-line": "a = \"\"\"\"\"\"\nb = ''''''\nc = 3\n",
    "keys": "\"a.b\" = 1\n'c d'.e . \"f\\u0020\" = 2\n3.14 = 'pi'\n",
    "tables": "[a]\nx = 1\n[a.b.c] # deep\ny = 2\n[ d . 'e' ]\nz.w.v = 3\nz.u = 4\n",
    "super table later": "[a.b]\nx = 1\n[a]\ny = 2\n",
    "arrays": "a = [ 1, [2, 3,], # c ]\n  'x]', {b = [4]}, ]\nb = []\n",
    "inline tables": "a = { b = 1, c.d = { e = [ {f = 2} ] }, 'g h' = '}' }\nb = {}\n",
    "arrays of tables": "[[a]]\nx = 1\n[[a.b]]\ny = 1\n[[a.b]]\n[a.c]\nz = 1\n[[a]]\n[[a.b]]\ny = 2\n[a.b.q]\nw = 1\n",
    "nothing": "# only a comment",
    "no newline at the end": "a = 'é漢' # ü",
}


def key_paths(data: Any, at: KeyPath = ()) -> Paths:
    found: Paths = {at: data} if at else {}
    children = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in children:
        found |= key_paths(value, (*at, key))
    return found


def check(text: str) -> None:
    spans = scan(text)
    paths = key_paths(tomllib.loads(text))
    assert spans.keys() == paths.keys()
    for path, value in paths.items():
        start, end = spans[path].key
        if isinstance(path[-1], str):
            # Each piece of a key stands where its own name is written.
            assert list(tomllib.loads(f"{text[start:end]} = 0")) == [path[-1]]
        if not isinstance(value, dict | list):
            start, end = spans[path].value
            again = tomllib.loads(f"v = {text[start:end]}")["v"]
            assert again == value or (isinstance(value, float) and math.isnan(value))


@pytest.mark.parametrize("text", CORNERS.values(), ids=CORNERS.keys())
def test_corner_cases(text: str) -> None:
    check(text)


def basic(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(c if c >= " " and c != "\x7f" else f"\\u{ord(c):04x}" for c in escaped) + '"'


TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
BARE = st.text("abcXYZ019_-", min_size=1, max_size=4)
KEY = st.one_of(BARE.map(lambda k: (k, k)), TEXT.map(lambda k: (k, basic(k))))
"""A key and how it is written."""
SPACE = st.sampled_from(["", " ", "\t", "   "])
BLANK = st.sampled_from(["", " ", "\n", " # a = [1] '''\n", "\n\n\t"])


@st.composite
def string(draw: st.DrawFn) -> str:
    text = draw(TEXT)
    style = draw(st.sampled_from(["basic", "literal", "multi", "multi literal"]))
    plain = all(c >= " " and c != "\x7f" for c in text)
    if style == "literal" and plain and "'" not in text:
        return f"'{text}'"
    if style == "multi literal" and plain and "'" not in text:
        return f"'''\n{text}\n'{text}''{text}'''" + draw(st.sampled_from(["", "'", "''"]))
    if style == "multi":
        inner = basic(text)[1:-1]
        return f'"""{inner}\n""{inner} \\\n "{inner}"""' + draw(st.sampled_from(["", '"', '""']))
    return basic(text)


SCALAR = st.one_of(
    string(),
    st.integers(-(2**62), 2**62).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda x: f"{x!r}" if "." in repr(x) else "1.5"),
    st.sampled_from(["inf", "-inf", "nan", "true", "false", "0xff", "1_0", "1979-05-27", "07:32:00", "1e5"]),
)


@st.composite
def array(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    items = draw(st.lists(inner, max_size=3))
    body = ",".join(draw(BLANK) + item + draw(BLANK) for item in items)
    return "[" + body + ("," if items and draw(st.booleans()) else "") + draw(BLANK) + "]"


@st.composite
def inline_table(draw: st.DrawFn, inner: st.SearchStrategy[str]) -> str:
    pairs = draw(st.lists(st.tuples(KEY, inner), max_size=3, unique_by=lambda pair: pair[0][0]))
    return "{" + ",".join(f"{draw(SPACE)}{key[1]}{draw(SPACE)}={draw(SPACE)}{value} " for key, value in pairs) + "}"


VALUE = st.recursive(SCALAR, lambda inner: st.one_of(array(inner), inline_table(inner)), max_leaves=6)


@st.composite
def document(draw: st.DrawFn) -> str:
    """Lines that may clash with each other; those that tomllib refuses are left out one by one."""
    lines: list[str] = []
    for _ in range(draw(st.integers(0, 8))):
        keys = draw(st.lists(KEY, min_size=1, max_size=3))
        dotted = f"{draw(SPACE)}.{draw(SPACE)}".join(written for _, written in keys)
        form = draw(st.sampled_from(["pair", "pair", "table", "array of tables"]))
        line = {
            "pair": f"{draw(SPACE)}{dotted}{draw(SPACE)}={draw(SPACE)}{draw(VALUE)}{draw(SPACE)}",
            "table": f"[{draw(SPACE)}{dotted}{draw(SPACE)}]",
            "array of tables": f"[[{draw(SPACE)}{dotted}{draw(SPACE)}]]",
        }[form] + draw(st.sampled_from(["", " # = [[x]] '"]))
        try:
            tomllib.loads("\n".join([*lines, line]))
        except tomllib.TOMLDecodeError:
            continue
        lines.append(line)
    return draw(BLANK) + "\n".join(lines) + draw(st.sampled_from(["", "\n", "\n\n# end"]))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(document())
def test_every_key_path_has_its_position(text: str) -> None:
    check(text)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(["a = 1", "a = 2", "b.c = 1", "[b]", "[[e]]", "x = yes", "x = [1,", 'y = "', "[g", "ü = 1"])
    )
)
def test_any_text_is_read_or_refused_with_the_place_of_its_first_syntax_error(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        assert parse(SourceText("roles.toml", text)) == tomllib.loads(text)
    except ConfigErrors as error:
        (problem,) = error.problems
        assert problem.place is not None
        assert problem.place.text == text.split("\n")[problem.place.line - 1]
