"""The rewards that have names."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from relax_rt.process import sandbox
from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.dry_run import dry_run
from relax_rt.roles.rewards.library.code import cases, same_text
from relax_rt.roles.rewards.library.forms import unfenced
from relax_rt.roles.rewards.library.functions import UnreadableAnswer, make_function, rewards
from relax_rt.roles.rewards.scoring import RewardCaller, RewardFailed, RewardRequest, Score
from relax_rt.roles.rewards.settings import RewardTable

DOCS = Path(__file__).parents[4] / "docs" / "guides" / "rewards.md"


def score(name: str, completion: str, answer: str = "", info: dict[str, Any] | None = None, **options: Any) -> float:
    function = make_function(name, options)
    return float(function.call(completion, answer, info or {}))


def test_every_reward_and_every_option_is_documented() -> None:
    text = DOCS.read_text()
    for name, reward in rewards().items():
        assert f"`{name}`" in text, name
        for option in reward.options.model_fields:
            assert f"`{option}" in text, (name, option)


def test_exact_and_integers() -> None:
    assert [score("exact", " a  B ", "a B"), score("exact", "A b", "a B")] == [1, 0]
    assert score("exact", "A b", "a B", ignore_case=True) == 1
    assert score("lenient_integer", "so 41, no: 42", "42") == 1


@pytest.mark.parametrize(
    ("completion", "answer", "right"),
    [
        ("it is \u22125", "-5", 1),
        ("it is \u22125", "5", 0),
        ("it is 1,234", "1234", 1),
        ("it is 1234", "1,234", 1),
        ("so 3.5", "5", 0),
        ("so 5.0", "5", 1),
        ("so 2/5", "5", 0),
        ("so 3:05", "5", 0),
        ("so x^5", "5", 0),
        ("so .5", "5", 0),
        ("\uff15\uff12", "52", 1),
        ("so 42", 42, 1),
        ("so 42", 42.0, 1),
    ],
)
def test_the_last_number_is_read_whole(completion: str, answer: Any, right: int) -> None:
    assert score("lenient_integer", completion, answer) == right


@pytest.mark.parametrize("name", ["integer", "lenient_integer"])
@pytest.mark.parametrize("answer", ["4.5", "1/2", "12 apples", "", "x", "1,23", None, True])
def test_an_answer_that_is_no_integer_is_reported(name: str, answer: Any) -> None:
    with pytest.raises(UnreadableAnswer, match="it is not an integer"):
        make_function(name, {}).call("4", answer, {})


def test_integer_takes_thousands_and_signs() -> None:
    right = {"format": 0.3, "right": 0.7}
    assert [make_function("integer", {}).call(text, "-1,234", {}) for text in ("-1234", "\u22121,234")] == [
        right,
        right,
    ]


def test_empty_answers_are_reported() -> None:
    for name, options in (("exact", {}), ("regex", {"pattern": "(a)?b", "equals_answer": True})):
        with pytest.raises(UnreadableAnswer, match="it is empty"):
            make_function(name, options).call("b", "", {})
    assert score("exact", "e\u0301", "\u00e9") == 1 and score("exact", "[1, 2]", [1, 2]) == 1  # type: ignore[arg-type]


def test_regex() -> None:
    assert score("regex", "x\nanswer: 12 answer: 13", "13", pattern=r"answer: (\d+)", equals_answer=True) == 1
    assert score("regex", "answer: 12", "13", pattern=r"answer: (\d+)", equals_answer=True) == 0
    assert [score("regex", text, pattern=r"a.b", whole=True) for text in ("a\nb", "a\nb ")] == [1, 0]
    assert score("regex", "YES", pattern="yes", ignore_case=True) == 1


@pytest.mark.parametrize(
    ("completion", "right"),
    [
        ("<think>x</think><answer>2</answer>", 1),
        (" <think>x\n</think>\n\n<answer>2</answer>\n", 1),
        ("<think> </think><answer>2</answer>", 0),
        ("<think>x</think> and <answer>2</answer>", 0),
        ("<think>x</think><answer>2</answer> so", 0),
        ("<answer>2</answer><think>x</think>", 0),
        ("<think>x<think></think><answer>2</answer>", 0),
        ("", 0),
    ],
)
def test_tags(completion: str, right: int) -> None:
    assert score("tags", completion) == right


def test_tags_that_the_prompt_has_opened() -> None:
    assert score("tags", "x</think><answer>2</answer>", opened=True) == 1
    assert score("tags", "<think>x</think><answer>2</answer>", opened=True) == 0


def test_json() -> None:
    assert [score("json", text) for text in ('{"a": 1}', 'so\n```json\n{"a": 1}\n```\n', "{'a': 1}", "[" * 10_000)] == [
        *(1, 1),
        *(0, 0),
    ]
    keys = {"a": "number", "b": "array"}
    texts = ('{"a": 1, "b": []}', '{"a": true, "b": []}', '{"a": 1}', "[]", '{"a": 1, "b": [], "c": 0}')
    assert [score("json", text, keys=keys) for text in texts] == [1, 0, 0, 0, 1]
    assert score("json", texts[-1], keys=keys, only=True) == 0


@pytest.mark.parametrize("text", ["NaN", "[Infinity]", '{"a": -Infinity}'])
def test_json_has_no_infinities(text: str) -> None:
    assert score("json", text) == 0


def test_length() -> None:
    assert [score("length", "", info={"tokens": n}, free=10, most=20) for n in (5, 10, 15, 20, 99)] == [
        0,
        0,
        -0.5,
        -1,
        -1,
    ]


def test_fences() -> None:
    assert unfenced("a\n```python\nx = 1\n```\nb\n```\ny\n```") == "y\n"
    assert unfenced("```python\nx = 1\n```\n```python\nx =") == "x = 1\n"
    assert unfenced("```python\nx =") == "x =" and unfenced("x = 1") == "x = 1" and unfenced("```x = 1```") == "x = 1"


# --- programs


async def command_here() -> list[str]:
    """Nothing for this interpreter; where boxes cannot run that, what the error tells to use instead."""
    try:
        await sandbox.cached_mode()
    except sandbox.SandboxFailed as error:
        found = re.search(r'command = \["([^"]+)", "-I", "-B"\]', error.hint)
        assert found, error
        return [found[1], "-I", "-B"]
    return []


async def run(name: str, completion: str, given: Any, **options: Any) -> float | str:
    entry = {"entry_point": options.pop("entry")} if "entry" in options else {}
    options = {"box": "limits", "command": await command_here(), **options}
    results: list[Score | RewardFailed] = []
    caller = RewardCaller(make_function(name, options), None)
    await caller.together(
        [RewardRequest(completion, "", {"metadata": {"tests": given, **entry}})], lambda i, r: results.append(r)
    )
    return results[0].reason if isinstance(results[0], RewardFailed) else results[0].total


DOUBLE = "Here:\n```python\nprint(2 * int(input()))\n```"


async def test_a_program_prints_what_it_should() -> None:
    tests = [{"input": "2", "output": "4\n"}, {"input": "3", "output": "6"}]
    assert await run("code", DOUBLE, tests) == 1
    assert await run("code", DOUBLE, {"inputs": ["2", "3"], "outputs": ["4", "7"]}) == 0
    assert (
        await run(
            "code", DOUBLE, json.dumps([{"input": "2", "output": "4"}, {"input": "x", "output": "7"}]), partial=True
        )
        == 0.5
    )
    assert await run("code", "while True: pass", tests, timeout_s=0.3) == 0
    assert await run("code", "echo 4", tests[:1], command=["bash"]) == 1


async def test_a_program_is_not_run_where_it_cannot_be_closed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_modes", {(): sandbox.SandboxMode("limits", "unshare: not permitted")})
    tests = [{"input": "2", "output": "4"}]
    said = str(await run("code", "import os; os.write(1, b'4')", tests, box="namespaces"))
    assert re.search(r"see the files.*unshare: not permitted.*box = \"limits\"", said, re.DOTALL)
    table = {"components": [{"name": "exact"}, {"name": "code"}]}
    (problem,) = await asyncio.to_thread(dry_run, RewardTable.model_validate(table), Path(), [], None)
    assert problem.path == ("reward", "components", 1, "name") and 'box = "limits"' in problem.hint
    rewards_of = Rewards(RewardTable.model_validate({"components": [{"name": "code", "box": "limits"}]}), Path())
    await rewards_of.start()
    assert rewards_of.sandbox == sandbox.SandboxMode("limits", "unshare: not permitted")
    await rewards_of.close()


async def test_functions_pass_their_tests() -> None:
    program, test = "def double(x):\n    return 2 * x", "def check(f):\n    assert f(2) == 4"
    assert await run("unit_tests", program, test, entry="double") == 1
    assert await run("unit_tests", "def double(x):\n    return x", test, entry="double") == 0
    assert await run("unit_tests", program, ["assert double(1) == 2", "assert double(1) == 3"], partial=True) == 0.5
    # One that ends before its tests has not passed them.
    for early in ("import os; os._exit(0)", "raise SystemExit(0)", "print('x'); import sys; sys.exit()"):
        assert await run("unit_tests", early, test, entry="double") == 0


async def test_items_without_usable_tests_fail() -> None:
    assert "no 'other' to test with; it has tests" in str(await run("code", "", [], tests="other"))
    assert "the item has no tests" in str(await run("code", "", []))
    assert "neither" in str(await run("unit_tests", "", 3))
    with pytest.raises(ValueError, match="neither"):
        cases("3")
    with pytest.raises(ValueError, match=r"call the function 'add'.*use unit_tests"):
        cases({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]})
    assert same_text(b"a \nb\n\n", "a\nb") and not same_text(b"a\n\nb", "a\nb")


# --- servers


class Answers(BaseHTTPRequestHandler):
    """Answers by the completion, and remembers what it was sent."""

    seen: list[dict[str, Any]]
    tries = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        type(self).seen.append({**body, "authorization": self.headers.get("authorization")})
        type(self).tries += 1
        what = body["completion"]
        status = (
            503 if (what == "busy" and type(self).tries < 3) or what == "down" else 400 if what == "refused" else 200
        )
        texts = {
            "components": '{"a": 0.25, "b": 0.5}',
            "long": " " * 100_000 + "1",
            "words": "fine",
            "deep": "[" * 9000,
        }
        data = texts.get(what, "0.75").encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except ConnectionError:
            return

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    Answers.seen, Answers.tries = [], 0
    monkeypatch.setattr("relax_rt.roles.rewards.library.remote.FIRST_WAIT_S", 0.01)
    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/score"
        server.shutdown()
        thread.join()


async def ask(completion: str, **options: Any) -> Score | RewardFailed:
    function = make_function("http", options)
    results: list[Score | RewardFailed] = []
    info = {"question": "q", "metadata": {"level": 1}, "private": object()}
    await RewardCaller(function, None).together([RewardRequest(completion, "a", info)], lambda i, r: results.append(r))
    await function.function.aclose()  # type: ignore[attr-defined]
    return results[0]


async def test_a_server_is_asked_and_its_answer_read(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_TOKEN", "t0ken")
    assert await ask("x", url=server, token_env="REWARD_TOKEN") == Score(0.75, {"reward": 0.75})
    assert Answers.seen == [
        {"completion": "x", "answer": "a", "question": "q", "metadata": {"level": 1}, "authorization": "Bearer t0ken"}
    ]
    assert await ask("components", url=server) == Score(0.75, {"a": 0.25, "b": 0.5})


@pytest.mark.parametrize(
    ("completion", "options", "words", "tries"),
    [
        ("refused", {}, "it answered 400", 1),
        ("down", {"retries": 2}, "it answered 503.*3 tries", 3),
        ("long", {}, "more than answer_kib = 64 KiB", 1),
        ("words", {}, "no JSON", 1),
        ("deep", {}, "no JSON", 1),
        ("x", {"token_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE .* is empty", 0),
        ("x", {"url": "http://127.0.0.1:1/", "retries": 1}, "ConnectError.*2 tries", 0),
    ],
)
async def test_a_server_that_does_not_answer_well_fails_the_sample(
    server: str, completion: str, options: dict[str, Any], words: str, tries: int
) -> None:
    result = await ask(completion, **{"url": server, **options})
    assert isinstance(result, RewardFailed)
    assert re.search(words, result.reason, re.DOTALL), result.reason
    assert Answers.tries == tries


async def test_a_busy_server_is_asked_again_and_a_silent_one_is_given_up(server: str) -> None:
    assert await ask("busy", url=server) == Score(0.75, {"reward": 0.75})
    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    result = await ask("x", url=f"http://127.0.0.1:{port}/", timeout_s=0.3)
    silent.close()
    for writer in writers:
        writer.close()
        await writer.wait_closed()
    assert isinstance(result, RewardFailed) and "no answer within timeout_s = 0.3 s" in result.reason
