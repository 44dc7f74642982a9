"""Reading past mistakes of TOML."""

from __future__ import annotations

import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from relax_rt.config.problems import ConfigErrors
from relax_rt.config.syntax import MAX_MISTAKES, Text, parse

SOUND = ["a = 1", "a = 2", "b.c = 1", "b = 3", "[b]", "[d]", "[[e]]", "[d.f]", "k = {l = 1}", "k.m = 2", "", "# [b]"]
WRONG = ["x = yes", "x = [1,", "2]", "y = '", '"""', "= 3", "[g", "h", 'z = "a # b"', "s = '''", "'''", "ü = 1"]
LINES = st.sampled_from(SOUND + WRONG)


@settings(max_examples=400, deadline=None)
@given(st.lists(LINES, max_size=14))
def test_any_text_is_read_past_its_mistakes_or_refused(lines: list[str]) -> None:
    text = "\n".join(lines)
    try:
        found = parse(Text("roles.toml", text))
    except ConfigErrors as error:
        assert error.problems and all(problem.place is not None for problem in error.problems)
        return
    assert tomllib.loads(found.read) == found.data
    # Places stay what they were: only blanks came in.
    assert len(found.read) == len(text)
    assert all(new in (old, " ") for new, old in zip(found.read, text, strict=True))
    assert bool(found.problems) == (found.read != text)
    for problem in found.problems:
        assert problem.place is not None
        assert problem.place.text == text.split("\n")[problem.place.line - 1]


def test_a_text_of_mistakes_only_ends() -> None:
    try:
        parse(Text("roles.toml", "a = x\n" * 1000))
    except ConfigErrors as error:
        assert len(error.problems) == MAX_MISTAKES + 1
    else:
        raise AssertionError("so many mistakes are not read past")
