"""Reading tokens as text, keys, the token's file, and events of streams."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_rt.roles.gateway import reading
from relax_rt.roles.gateway.access import Caller, Keys, run_token
from relax_rt.roles.gateway.calls import CallError, event
from relax_rt.roles.gateway.reading import AnswerReader
from relax_rt.transport.rpc.errors import Refused

END = 0


def spell(tokens: Sequence[int]) -> str:
    """A token is a byte."""
    return bytes(tokens).decode(errors="replace")


def cut(tokens: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    found, at = [], 0
    while at < len(tokens):
        size = sizes[len(found) % len(sizes)]
        found.append(list(tokens[at : at + size]))
        at += size
    return found


TEXT = st.text("abß€😀 \n", max_size=40)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=4)


@given(TEXT, SIZES)
def test_text_is_complete_however_tokens_are_split(text: str, sizes: list[int]) -> None:
    reader, shown = AnswerReader(spell, (), {END}), ""
    for piece in cut([*text.encode(), END], sizes):
        assert reader.take(piece, [0.0] * len(piece)) == len(piece)
        shown += reader.show()
        assert text.startswith(shown) and "�" not in shown
    assert reader.visible == text and shown == text.rstrip() == reader.shown


@given(TEXT, SIZES, st.integers(0, 3))
def test_a_text_that_is_cut_inside_a_character_has_all_before_it(text: str, sizes: list[int], missing: int) -> None:
    tokens = text.encode()[: max(0, len(text.encode()) - missing)]
    reader, shown = AnswerReader(spell, (), {END}), ""
    for piece in cut(tokens, sizes):
        reader.take(piece, [0.0] * len(piece))
        shown += reader.show()
        assert text.startswith(shown)
    assert reader.text == tokens.decode(errors="ignore"), "whole characters do not wait for the one that is not"
    reader.finish()
    assert reader.text == reader.visible == tokens.decode(errors="replace")
    assert shown + reader.show() == reader.text.rstrip()


def test_a_decoder_that_retracts_a_character_changes_nothing_read() -> None:
    def together(tokens: Sequence[int]) -> str:
        """As tokenizers with a fall-back to bytes have it: bytes that are no text together are none of them."""
        try:
            return bytes(tokens).decode()
        except UnicodeDecodeError:
            return "�" * len(tokens)

    reader = AnswerReader(together, ("!",), {END}, logprobs=True)
    for token in "ab😀😀!".encode():
        reader.take([token], [0.0])
    assert reader.text == "ab😀😀!" and reader.stop == "!" and reader.visible == "ab😀😀"


@given(st.text("ab", max_size=40), st.integers(0, 40), st.integers(1, 7))
def test_a_text_position_is_found_in_its_tokens(text: str, end: int, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reading, "PIECE", piece)
        count = reading.tokens_before(list(text.encode()), end, spell)
    assert count == min(end, len(text))


@given(TEXT, SIZES, st.lists(st.text("abß€ ", min_size=1, max_size=3), min_size=1, max_size=3))
def test_a_stop_string_ends_it_at_the_token_that_completes_it(text: str, sizes: list[int], stops: list[str]) -> None:
    reader, shown, kept = AnswerReader(spell, stops, {END}, logprobs=True), "", 0
    tokens = [*text.encode(), END]
    for piece in cut(tokens, sizes):
        count = reader.take(piece, [-0.1] * len(piece))
        kept += count
        shown += reader.show()
        if reader.stop is not None:
            break
        assert count == len(piece)
    firsts = [(text.index(stop) + len(stop), stop) for stop in stops if stop in text]
    if not firsts:
        assert reader.stop is None and kept == len(tokens) and reader.visible == text
        return
    end = min(firsts)[0]
    assert reader.stop in stops and kept == len(text[:end].encode()), "not at the first token that completes one"
    assert reader.text == text[:end] and reader.text.endswith(reader.stop)
    assert reader.visible.startswith(shown), "something was shown and taken back"
    assert len(reader.tokens) == kept


@given(
    st.text("ab<", max_size=10), st.sampled_from(["<think>", "<tool_call>", "<|python_tag|>", "[TOOL_CALLS]"]), SIZES
)
def test_text_behind_a_marker_is_not_shown(text: str, mark: str, sizes: list[int]) -> None:
    reader, shown = AnswerReader(spell, (), {END}), ""
    for piece in cut((text + mark + "hidden").encode(), sizes):
        reader.take(piece, [0.0] * len(piece))
        shown += reader.show()
    assert shown == text.rstrip() or text.startswith(shown)
    assert "hidden" not in shown and mark not in shown and reader.text == text + mark + "hidden"


def test_json_may_be_a_tool_call_if_tools_were_offered() -> None:
    for calls, shown in ((True, ""), (False, '{"name"')):
        reader = AnswerReader(spell, (), {END}, calls=calls)
        reader.take(list(b'{"name"'), [0.0] * 7)
        assert reader.show() == shown


@given(st.text(max_size=30))
def test_a_key_is_checked_by_its_token_alone(name: str) -> None:
    keys, others = Keys("t" * 40), Keys("u" * 40)
    if name:
        key = keys.of_session(name)
        assert keys.check(key) == Caller(name) and others.check(key) is None
        assert keys.check(key[:-1]) is None and keys.check(key + "0") is None and keys.check(key[4:]) is None
    assert keys.check(name) is None and keys.check("t" * 40) == Caller()


def test_the_token_is_created_once_and_private_to_the_user(tmp_path: Path) -> None:
    token = run_token(tmp_path)
    assert run_token(tmp_path) == token and len(token) >= 32
    path = tmp_path / "gateway.token"
    assert path.stat().st_mode & 0o777 == 0o600 and [p.name for p in tmp_path.iterdir()] == ["gateway.token"]
    path.chmod(0o640)
    with pytest.raises(Refused, match="others on this machine may read it"):
        run_token(tmp_path)
    path.chmod(0o600)
    path.write_text("short")
    with pytest.raises(Refused, match="too few"):
        run_token(tmp_path)


def test_an_event_is_one_line_of_data() -> None:
    sent = event({"text": "a\nb\r\n\n data: x"}, "name")
    assert sent.startswith(b"event: name\ndata: {") and sent.endswith(b"}\n\n") and sent.count(b"\n") == 3


def test_errors_have_the_forms_of_both_apis() -> None:
    error = CallError(429, "wait", retry_after_s=2.2)
    assert error.body("openai")["error"]["type"] == "rate_limit_error"
    assert error.body("anthropic", "r")["error"] == {"type": "rate_limit_error", "message": "wait"}
    assert dict(error.headers)[b"retry-after"] == b"3"
    assert dict(CallError(400, "no").headers) == {b"x-should-retry": b"false"}
