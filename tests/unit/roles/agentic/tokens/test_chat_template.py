"""Renderings, and what is new of them."""

from __future__ import annotations

from typing import Any

import pytest
from chat_fixtures import LLAMA3, MOVES_TOOLS, QWEN3, TOOLS, llama, qwen3, smollm2, tiny, user

from relax_rt.roles.agentic.tokens.template import ChatTemplate
from relax_rt.transport.rpc.errors import Refused

CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}}
ASKED = [user("What is 1 + 1?"), {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}]
TOLD = [*ASKED, {"role": "tool", "content": "2", "tool_call_id": "1"}]


def templates() -> list[ChatTemplate]:
    return [ChatTemplate(smollm2()), ChatTemplate(tiny()), qwen3(), ChatTemplate(llama())]


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("new", [[user("And?")], [user("zqxj"), user("b")], [{"role": "tool", "content": "2"}], []])
def test_the_delta_is_what_the_whole_rendering_has_more(which: int, new: list[dict[str, Any]]) -> None:
    chat = templates()[which]
    said = [user("Hello."), {"role": "assistant", "content": "Good day."}]
    delta = chat.delta([*said, *new], (), 2)
    assert delta is not None and delta.startswith(chat.turn_end)
    assert chat.text([*said, *new]).endswith("Good day." + delta)
    assert delta.count(chat.turn_end) == len(new) + 1


def test_ends_of_turn() -> None:
    assert [chat.turn_end for chat in templates()] == ["<|im_end|>\n", "<|end|>", "<|im_end|>\n", "<|eot|>"]
    assert ChatTemplate(tiny(), template="{% for m in messages %}{{ m.content }} {% endfor %}").turn_end == " "
    assert ChatTemplate(tiny(), template="{% for m in messages %}{{ m.content }}{% endfor %}").turn_end == ""


def test_thoughts_that_the_template_drops_do_not_hide_what_is_new() -> None:
    thinking = {"role": "assistant", "content": "2", "reasoning_content": "1 and 1"}
    chain = [user("a"), {**ASKED[1], "reasoning_content": "a call"}, TOLD[2], thinking]
    whole = [*chain, user("And 2 + 2?")]
    assert "a call" not in qwen3().text(whole, TOOLS) and "a call" in qwen3().text(chain, TOOLS)
    want = "<|im_end|>\n<|im_start|>user\nAnd 2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert qwen3().delta(whole, TOOLS, 4) == want
    inline = [*chain[:3], {"role": "assistant", "content": "<think>\n1 and 1\n</think>\n\n2"}, whole[-1]]
    assert qwen3().delta(inline, TOOLS, 4) == want


def test_a_template_that_writes_earlier_text_otherwise_has_no_delta() -> None:
    chat = ChatTemplate(tiny(), template=MOVES_TOOLS)
    said = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    assert chat.delta(said, TOOLS, 2) is None
    assert chat.delta(said, (), 2) == "<|end|>[INST]c[/INST]"
    without_ends = ChatTemplate(tiny(), template="{% for m in messages %}{{ m.content }}{% endfor %}")
    assert without_ends.delta(said, (), 2) is None


def test_a_role_that_the_template_leaves_out_is_refused_and_not_lost() -> None:
    source = "{% for m in messages if m.role == 'user' or m.role == 'assistant' %}{{ m.content }}<|end|>{% endfor %}"
    deaf = ChatTemplate(tiny(), template=source)
    said = [user("a"), {"role": "assistant", "content": "b"}]
    with pytest.raises(Refused, match="takes no message with the role 'tool': it does not write the words"):
        deaf.delta([*said, {"role": "tool", "content": "c"}], (), 2)
    for role in ("system", "developer"):
        with pytest.raises(Refused, match=f"takes no message with the role '{role}'"):
            deaf.text([{"role": role, "content": "c"}, *said])
        # Nothing is lost of an empty one.
        assert deaf.text([{"role": role, "content": ""}, *said]) == deaf.text(said)


def test_messages_are_made_ready_for_templates() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 + 1?"}]
    told = [{"role": "user", "content": parts}, {**ASKED[1], "content": None}, TOLD[2]]
    text = qwen3().text(told, TOOLS)
    assert "What is 1 + 1?<|im_end|>" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in text
    llamas = ChatTemplate(llama(), template=LLAMA3).text(told, TOOLS)
    assert '{"name": "add", "parameters": {"a": 1}}<|eot|><|head|>ipython<|/head|>\n\n2<|eot|>' in llamas


def test_variables_reach_the_template() -> None:
    chat = ChatTemplate(smollm2(), template=QWEN3, variables={"open_thought": True})
    assert chat.text([user("a")]).endswith("assistant\n<think>\n")
    assert chat.parse("hm\n</think>\n\nYes.", (), prompt=chat.text([user("a")])).reasoning == "hm"


def test_a_template_that_shows_no_tools_has_one_set_of_them() -> None:
    other = [{**TOOLS[0], "type": "else"}]
    plain = ChatTemplate(smollm2())
    assert plain.tools_key(TOOLS) == plain.tools_key(()) == plain.tools_key(other)
    assert len({qwen3().tools_key(tools) for tools in ([], TOOLS, other)}) == 3
    assert qwen3().tools_key([dict(reversed(TOOLS[0].items()))]) == qwen3().tools_key(TOOLS)


@pytest.mark.parametrize(
    ("messages", "wrong"),
    [
        ([], "without messages"),
        ([{"content": "a"}], r"messages\[0\]: it has no role"),
        ([user("a"), {"role": "user", "content": 3}], r"messages\[1\]: content is a text or a list of parts, not 3"),
        ([{"role": "user", "content": ["a"]}], "list of parts"),
        ([{"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "a function with a name"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "chat template does not take it"),
        ([{"role": "user", "content": "\ud800"}], "surrogates not allowed"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: list[dict[str, Any]], wrong: str) -> None:
    with pytest.raises(Refused, match=wrong):
        ChatTemplate(smollm2()).render(messages)


def test_a_templates_own_refusal_is_told() -> None:
    chat = ChatTemplate(tiny(), template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(Refused, match=r"2 messages \(user, user\).*roles must alternate"):
        chat.text([user("a"), user("b")])
    assert chat.turn_end == ""
