"""User reward functions: found, called, judged; and what the reward role makes of their failures."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from relax_rt.roles.base.sample import SampleMeta, TurnSpan
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.data.gym import GymTask
from relax_rt.roles.data.items import PromptItem
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer
from relax_rt.roles.rewards import builtin
from relax_rt.roles.rewards.compose import Rewards
from relax_rt.roles.rewards.dry_run import dry_run, offered_info
from relax_rt.roles.rewards.library.functions import RewardFunction, UnreadableAnswer, load_reward
from relax_rt.roles.rewards.role import MAX_FAILURES, RewardRole
from relax_rt.roles.rewards.scoring import (
    CallStuck,
    CallThread,
    RewardCaller,
    RewardFailed,
    RewardRequest,
    Score,
    ThreadScorer,
    parse_score,
)
from relax_rt.roles.rewards.settings import RewardSettings, RewardTable
from relax_rt.roles.rewards.worker import TaskSpec
from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.rpc.errors import ProtocolError, RelaxError


def user_file(folder: Path, code: str, name: str = "my_reward.py") -> str:
    (folder / name).write_text(code)
    return f"{name}:reward"


def request(completion: str = "46", answer: str = "46", **info: Any) -> RewardRequest:
    return RewardRequest(completion, answer, info)


def score_with(
    function: Callable[..., Any], *requests: RewardRequest, timeout_s: float = 30.0
) -> list[Score | RewardFailed]:
    async def scored() -> list[Score | RewardFailed]:
        scorer = in_thread(RewardFunction(function, "f"), timeout_s)
        try:
            return await scorer.score(list(requests))
        finally:
            await scorer.close()

    return asyncio.run(scored())


def in_thread(function: RewardFunction, timeout_s: float) -> ThreadScorer:
    return ThreadScorer(RewardCaller(function, timeout_s), timeout_s)


# --- loading


def test_a_users_file_is_loaded_and_its_folder_shadows_nothing(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "beside_me.py").write_text("VALUE = 0.5")
    target = user_file(tmp_path, "import json, beside_me\ndef reward(completion, answer): return beside_me.VALUE\n")
    path = list(sys.path)
    try:
        assert load_reward(target, tmp_path).call("", "", {}) == 0.5
        assert sys.path[: len(path)] == path
    finally:
        sys.path[:] = path
        sys.modules.pop("beside_me", None)


@pytest.mark.parametrize(
    ("code", "target", "words"),
    [
        ("def reward(c, a): return 0", "my_rewrad.py:reward", "there is no file .*did you mean 'my_reward.py'"),
        ("def rewards(c, a): return 0", "my_reward.py:reward", "has no 'reward'.*did you mean 'rewards'"),
        (
            "x = 1\nx.nothing\ndef reward(c, a): return 0",
            "my_reward.py:reward",
            r"AttributeError.* at .*my_reward\.py:2",
        ),
        ("def reward(c, a) return 0", "my_reward.py:reward", r"SyntaxError.* at .*my_reward\.py:1"),
        ("reward = 3", "my_reward.py:reward", "it is a int, not a function"),
        (
            "def reward(completion): return 0",
            "my_reward.py:reward",
            r"it is called as f\(completion, answer, \*\*info\)",
        ),
        ("def reward(*, completion, answer): return 0", "my_reward.py:reward", "it is called as"),
        ("", "my_reward", "names no code"),
    ],
)
def test_what_cannot_be_loaded_is_told_with_setting_and_line(
    tmp_path: Path, code: str, target: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    user_file(tmp_path, code)
    with pytest.raises(RelaxError, match=rf"(?s)reward\.function = '{target}': .*{words}"):
        load_reward(target, tmp_path)


TRL, VERL = "completions, a list  ->  completion", "solution_str             ->  completion"


@pytest.mark.parametrize(
    ("parameters", "group", "words"),
    [
        (
            "completions, **kwargs",
            False,
            ["(completions, **kwargs), as TRL has them", TRL, "prompts              ->  q"],
        ),
        ("completions, **kwargs", True, [TRL, "group = true, def score(completions, answer, **info) -> list[float]"]),
        ("*, completions, solution, **kwargs", False, [TRL]),
        ("prompts, completions, **kwargs", True, [TRL]),
        ("prompts, *, answer", False, [TRL]),
        (
            "data_source, solution_str, ground_truth, extra_info=None",
            False,
            ["as verl has them", VERL, "ground_truth             ->  answer", 'info["extra_info"]'],
        ),
        ("solution_str, **kwargs", False, [VERL]),
        ("completion, **info", False, ["it is called as f(completion, answer, **info)"]),
    ],
)
def test_a_function_for_another_trainer_is_told_how_to_be_written(
    tmp_path: Path, parameters: str, group: bool, words: list[str]
) -> None:
    target = user_file(tmp_path, f"def reward({parameters}):\n    return 0.0\n")
    (problem,) = dry_run(RewardTable(function=target, group=group), tmp_path, [], None)
    assert all(word in problem.render() for word in words), problem.render()
    assert problem.path == ("reward", "function")
    assert all(line.startswith("  ") for line in problem.render().splitlines()[2:])


@pytest.mark.parametrize(
    ("parameters", "group"),
    [
        ("solution_str, ground_truth", False),
        ("completions, answer", True),
        ("completions, answer", False),
        ("prompts, answer, **info", False),
        ("completion, data_source", False),
        ("completion, answer, completions=None, data_source=None", False),
    ],
)
def test_a_function_with_such_names_that_can_be_called_is_taken(tmp_path: Path, parameters: str, group: bool) -> None:
    target = user_file(tmp_path, f"def reward({parameters}):\n    return 0.0\n")
    assert dry_run(RewardTable(function=target, group=group), tmp_path, [], None) == []


def test_a_list_for_one_completion_is_told_of_groups() -> None:
    (failed,) = score_with(lambda completion, answer: [0.0], request())
    assert isinstance(failed, RewardFailed) and "group = true" in failed.reason


def test_information_is_given_by_parameter_name() -> None:
    info = {"level": 3, "question": "q"}
    assert RewardFunction(lambda c, a: (c, a), "f").call("c", "a", info) == ("c", "a")
    assert RewardFunction(lambda c, a, level: level, "f").call("c", "a", info) == 3
    assert RewardFunction(lambda c, a, other=7: other, "f").call("c", "a", info) == 7
    assert RewardFunction(lambda c, a, **rest: rest, "f").call("c", "a", info) == info
    assert RewardFunction(lambda *everything: everything, "f").call("c", "a", info) == ("c", "a")
    with pytest.raises(RelaxError, match="it wants levle, and there is level, question"):
        RewardFunction(lambda c, a, levle: 0, "f").call("c", "a", info)


def plain_answer(completion, answer):  # type: ignore[no-untyped-def]
    return type(answer).__name__


def text_answer(completion: str, answer: str) -> str:
    return f"{type(answer).__name__} {answer}"


@pytest.mark.parametrize(
    ("answer", "kind", "text"),
    [
        ("a", "str", "a"),
        (42, "int", "42"),
        (42.0, "float", "42"),
        (None, "NoneType", ""),
        (["sun", "sunny"], "list", '["sun", "sunny"]'),
        ({"x": 1}, "dict", '{"x": 1}'),
        (True, "bool", "true"),
    ],
)
def test_an_answer_has_its_type_unless_text_is_asked_for(answer: Any, kind: str, text: str) -> None:
    assert RewardFunction(plain_answer, "f").call("c", answer, {}) == kind
    assert RewardFunction(text_answer, "f").call("c", answer, {}) == f"str {text}"


def test_a_column_may_be_called_as_a_parameter() -> None:
    def everything(completion: str, answer: str, **info: Any) -> list[str]:
        return [completion, answer, *sorted(info)]

    info = {"completion": "of the row", "answer": "of the row", "level": 1}
    assert RewardFunction(everything, "f").call("c", "a", info) == ["c", "a", "level"]


def test_a_callable_object_is_a_reward() -> None:
    class Judge:
        async def __call__(self, completion: str, answer: str) -> float:
            return 0.25

    assert score_with(Judge(), request()) == [Score(0.25, {"reward": 0.25})]


# --- reading scores


@pytest.mark.parametrize(
    ("value", "total", "components"),
    [
        (1, 1.0, {"reward": 1.0}),
        (True, 1.0, {"reward": 1.0}),
        (np.float32(0.5), 0.5, {"reward": 0.5}),
        ({"format": 0.25, "right": 0.5}, 0.75, {"format": 0.25, "right": 0.5}),
        ({"format": 0.25, "right": 0.5, "total": 2}, 2.0, {"format": 0.25, "right": 0.5}),
    ],
)
def test_scores_are_read(value: Any, total: float, components: dict[str, float]) -> None:
    assert parse_score(value) == Score(total, components)


def test_rewards_of_turns_are_read() -> None:
    assert parse_score({"right": 1, "turn_rewards": [0, np.float32(0.5)]}) == Score(1.0, {"right": 1.0}, (0.0, 0.5))
    assert parse_score({"turn_rewards": [0.25, 0.5]}) == Score(0.75, {"reward": 0.75}, (0.25, 0.5))


@pytest.mark.parametrize(
    "value",
    [
        *(None, "1", b"1", [1], {}, {"a": None}, {"a": "1"}, float("nan"), {"a": float("inf")}, 10**400, 1e300),
        *({str(i): 1.0 for i in range(65)}, {"a": 3e38, "b": 3e38}),
        *({"turn_rewards": 1.0}, {"turn_rewards": "12"}, {"turn_rewards": [None]}, {"turn_rewards": [float("nan")]}),
    ],
)
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="returned"):
        parse_score(value)


# --- scoring


def test_an_error_fails_its_own_sample_with_the_users_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    target = user_file(
        tmp_path, "import json\ndef reward(completion, answer):\n    return json.loads(completion)['r']\n"
    )
    scorer = in_thread(load_reward(target, tmp_path), 30.0)
    good, bad = asyncio.run(scorer.score([request('{"r": 1}'), request("{")]))
    asyncio.run(scorer.close())
    assert good == Score(1.0, {"reward": 1.0})
    assert isinstance(bad, RewardFailed) and not bad.stuck
    assert "JSONDecodeError" in bad.reason and f"{tmp_path / 'my_reward.py'}:3" in bad.reason


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), TimeoutError("mine"), KeyboardInterrupt()])
def test_whatever_user_code_raises_fails_only_the_sample(error: BaseException) -> None:
    def plain(completion: str, answer: str) -> float:
        if completion == "bad":
            raise error
        return 1.0

    first, second = score_with(plain, request("bad"), request("good"))
    assert isinstance(first, RewardFailed) and not first.stuck and type(error).__name__ in first.reason
    assert second == Score(1.0, {"reward": 1.0})


async def test_a_hanging_call_is_given_up_and_the_rest_is_scored() -> None:
    release = threading.Event()

    def slow(completion: str, answer: str) -> float:
        if completion == "slow":
            release.wait(60)
        return 1.0

    scorer = in_thread(RewardFunction(slow, "f"), 1.0)
    seen: list[int] = []
    results = await scorer.score([request("a"), request("slow"), request("b")], lambda: seen.append(1))
    release.set()
    await scorer.close()
    assert [isinstance(r, RewardFailed) for r in results] == [False, True, False]
    assert isinstance(results[1], RewardFailed) and results[1].stuck and "reward.timeout_s = 1 s" in results[1].reason
    assert len(seen) == 3


def test_async_rewards_run_together_and_time_out_apart() -> None:
    together: list[int] = [0, 0]

    async def judge(completion: str, answer: str) -> float:
        together[0] += 1
        together[1] = max(together)
        await asyncio.sleep(60 if completion == "slow" else 0.01)
        together[0] -= 1
        if completion == "bad":
            raise ValueError("no")
        return float(completion)

    results = score_with(judge, request("1"), request("slow"), request("bad"), request("2"), timeout_s=1.0)
    assert results[0] == Score(1.0, {"reward": 1.0}) and results[3] == Score(2.0, {"reward": 2.0})
    assert (
        isinstance(results[1], RewardFailed) and not results[1].stuck and "did not return within" in results[1].reason
    )
    assert isinstance(results[2], RewardFailed) and "ValueError: no" in results[2].reason
    assert together[1] == 4


async def test_an_async_reward_that_blocks_its_loop_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relax_rt.roles.rewards.scoring.GRACE_S", 0.1)
    release = threading.Event()

    async def blocking(completion: str, answer: str) -> float:
        release.wait(60)
        return 1.0

    scorer = in_thread(RewardFunction(blocking, "f"), 0.2)
    (result,) = await scorer.score([request()])
    release.set()
    await scorer.close()
    assert isinstance(result, RewardFailed) and result.stuck


async def test_an_abandoned_thread_does_not_answer_later_calls() -> None:
    thread, release = CallThread(), threading.Event()
    with pytest.raises(CallStuck):
        await thread.call(lambda: release.wait(60), 0.05)
    release.set()
    assert await thread.call(lambda: 7, 30.0) == 7
    thread.close()


# --- built-in functions


def test_builtins() -> None:
    assert builtin.integer("46", "46") == {"format": 0.3, "right": 0.7}
    assert builtin.integer(" 45 ", "46") == {"format": 0.3, "right": 0.0}
    assert builtin.integer("46", "46", finish_reason="length") == {"format": 0.0, "right": 0.0}
    assert builtin.integer("it is 46", "46") == {"format": 0.0, "right": 0.0}
    assert [builtin.lenient_integer(t, "46") for t in ("it is 46", "none", "46 or 45")] == [1.0, 0.0, 0.0]
    with pytest.raises(UnreadableAnswer, match=r"no number.*it is not an integer"):
        builtin.lenient_integer("nothing", "no number")
    assert [builtin.exact(t, "a b") for t in (" a  b", "A b")] == [1.0, 0.0]


# --- dry run


def items() -> list[PromptItem]:
    task = GymTask("chain_sum", {"min_terms": 2, "max_terms": 2}, 3)
    return [
        PromptItem(
            item="", split="train", question=r.question, answer=r.answer, metadata=r.metadata, messages=[], tokens=[]
        )
        for r in task.items()
    ]


def test_a_good_function_passes_the_dry_run() -> None:
    task = TaskSpec("chain_sum", {"min_terms": 2, "max_terms": 2}, 3)
    for name in ("integer", "relax_rt.roles.rewards.builtin:verifier"):
        assert dry_run(RewardTable(function=name), Path(), items(), task) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return int(completion) == int(answer)", "ValueError"),
        ("return None", "returned None"),
        ("return 1 / 0.0", "ZeroDivisionError"),
        ("return float('nan')", "must be finite"),
    ],
)
def test_a_faulty_function_is_a_problem_of_its_setting(tmp_path: Path, body: str, words: str) -> None:
    target = user_file(tmp_path, f"def reward(completion, answer):\n    {body}\n", f"faulty_{abs(hash(body))}.py")
    (problem,) = dry_run(RewardTable(function=target), tmp_path, items(), None)
    assert problem.path == ("reward", "function")
    assert words in problem.message and "on completion" in problem.message
    if "Error" in words:
        assert ".py:2" in problem.message


@pytest.mark.parametrize(
    ("body", "answer", "words"),
    [
        ("return 0.5", "7", ["is 0.5 for each of"]),
        ("return float(completion.strip() == answer)", 7, ["is 0 for each of", "Answers are int", "answer: str"]),
        ("return float(completion.strip() == str(answer))", 7, []),
        ("return float(len(completion))", "7", []),
    ],
)
def test_the_dry_run_warns_of_a_reward_that_is_always_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, answer: Any, words: list[str]
) -> None:
    (tmp_path / "r.py").write_text(f"def f(completion, answer, **info):\n    {body}\n")
    asked = [replace(item, answer=answer) for item in items()]
    assert dry_run(RewardTable(function="r.py:f"), tmp_path, asked, None) == []
    said = capsys.readouterr().err
    assert all(word in said for word in words) and ("warning" in said) == bool(words)


def test_a_hanging_function_is_found_by_the_dry_run(tmp_path: Path) -> None:
    target = user_file(
        tmp_path, "import time\ndef reward(completion, answer):\n    time.sleep(2)\n    return 1\n", "hang.py"
    )
    (problem,) = dry_run(RewardTable(function=target, timeout_s=0.1), tmp_path, items(), None)
    assert "did not return within reward.timeout_s = 0.1 s" in problem.message


# --- the role


class FakeSample(dict[str, Any]):
    """A leased sample with its columns in a dict."""

    def __init__(self, key: SampleKey, tokenizer: ChatTokenizer, completion: str, answer: str) -> None:
        prompt, said = tokenizer.encode("1 + 1 ="), tokenizer.encode(completion + "<|end|>")
        mask = np.array([0] * len(prompt) + [1] * len(said), np.uint8)
        super().__init__(tokens=np.array(prompt + said, np.int32), loss_mask=mask)
        self.key = key
        self.meta = SampleMeta(
            group=key.group,
            member=key.member,
            prompt=0,
            attempt=0,
            item="i",
            split="train",
            finish_reason="stop",
            truncated=False,
            sampling={},
            tokenizer_digest=tokenizer.tokenizer_digest,
            template_digest="",
            turns=[],
            answer=answer,
            info={"question": "1 + 1 =", "metadata": {"level": 4}},
        )

    def decode(self, name: str, type_: Any) -> Any:
        assert (name, type_) == ("meta", SampleMeta)
        return self.meta


class FakeBatch:
    def __init__(self, samples: list[FakeSample]) -> None:
        self.samples, self.waiting_on = samples, "no sample is ready"

    def __bool__(self) -> bool:
        return bool(self.samples)


class FakeQueue:
    """Gives out batches, then nothing, and sets `stopping` once all are completed."""

    def __init__(self, batches: list[FakeBatch], stopping: asyncio.Event) -> None:
        self.batches, self.stopping = list(batches), stopping
        self.completed: list[tuple[dict[SampleKey, Any], list[Any]]] = []

    async def __aenter__(self) -> FakeQueue:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def lease(self, task: str, *, samples: int = 0, groups: int = 0, wait_s: float) -> FakeBatch:
        assert task == "reward"
        self.asked = (samples, groups)
        if not self.batches:
            self.stopping.set()
            await asyncio.sleep(wait_s)
        return self.batches.pop(0)

    async def complete(self, batch: FakeBatch, columns: Any, failures: Any) -> None:
        self.completed.append((columns, failures))


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(character_tokenizer(), Path("/nonexistent"))


def role_with(function: Callable[..., Any], timeout_s: float = 30.0) -> tuple[RewardRole, SimpleNamespace]:
    config = RLConfig.model_validate(
        {
            "run": {"name": "r"},
            "model": {"path": "m"},
            "data": {"task": "chain_sum"},
            "reward": {"function": "f:f", "timeout_s": timeout_s},
        }
    )
    told = SimpleNamespace(events=[], metrics=[], waits=[], advanced=0)

    def advance(n: int = 1, detail: str = "") -> None:
        told.advanced += n

    async def ready(policy_version: int = 0) -> None:
        told.ready = True

    ctx = SimpleNamespace(
        config=config,
        settings=RewardSettings(),
        who=SimpleNamespace(slot="reward/0"),
        stopping=asyncio.Event(),
        progress=SimpleNamespace(advance=advance, waiting=told.waits.append, extend=lambda s, r: None),
        log=SimpleNamespace(warning=lambda *_, **__: None),
        event=lambda kind, **fields: told.events.append((kind, fields)),
        metrics=told.metrics.append,
        ready=ready,
    )
    role = RewardRole(ctx)  # type: ignore[arg-type]
    role.rewards = Rewards.of_function(function, timeout_s)
    return role, told


def batch_of(tokenizer: ChatTokenizer, *texts: str, group: int = 1) -> FakeBatch:
    return FakeBatch([FakeSample(SampleKey(group, i), tokenizer, text, "2") for i, text in enumerate(texts)])


async def run_role(role: RewardRole, tokenizer: ChatTokenizer, batches: list[FakeBatch]) -> FakeQueue:
    queue = FakeQueue(batches, role.ctx.stopping)
    role.queue, role.tokenizer = queue, tokenizer  # type: ignore[assignment]
    try:
        async with asyncio.timeout(120):
            await role.run()
    finally:
        await role.teardown()
        role.completed = queue.completed  # type: ignore[attr-defined]
    return queue


async def test_a_setup_that_fails_waits_for_no_function_that_loads_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    role, _ = role_with(lambda completion, answer, **_: 0.0)
    loading, ended = asyncio.Event(), asyncio.Event()

    async def start() -> None:
        loading.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    def load() -> None:
        raise RelaxError("the tokenizer")

    monkeypatch.setattr(role.rewards, "start", start)
    monkeypatch.setattr("relax_rt.roles.rewards.role.Rewards", lambda *args: role.rewards)
    monkeypatch.setattr(role, "_load", load)
    async with asyncio.timeout(120):
        with pytest.raises(RelaxError, match="the tokenizer"):
            await role.setup()
    assert loading.is_set() and ended.is_set()


async def test_an_answer_that_cannot_be_read_counts_0_and_is_told_of_once(tokenizer: ChatTokenizer) -> None:
    def reward(completion: str, answer: str) -> float:
        raise UnreadableAnswer(answer, "it is no number")

    role, told = role_with(reward)
    batches = [batch_of(tokenizer, "2", "3"), batch_of(tokenizer, "4", group=2), FakeBatch([])]
    queue = await run_role(role, tokenizer, batches)
    assert [failures for _, failures in queue.completed] == [[], []]
    assert all(column["reward"] == 0 for columns, _ in queue.completed for column in columns.values())
    (fields,) = [fields for kind, fields in told.events if kind == "answer_unreadable"]
    assert (fields["item"], fields["items"]) == ("i", 1) and "'2' cannot be read: it is no number" in fields["reason"]
    assert not any(kind in ("reward_failed", "reward_forgiven") for kind, _ in told.events)
    assert sum(record["unreadable"] for record in told.metrics) == 3 and told.metrics[0]["forgiven"] == 0


async def test_the_role_scores_what_the_policy_said(tokenizer: ChatTokenizer) -> None:
    seen: list[Any] = []

    def reward(completion: str, answer: str, level: int, tokens: int, question: str) -> dict[str, float]:
        seen.append((completion, answer, level, tokens, question))
        if completion == "bad":
            raise ValueError("no")
        return {"right": float(completion == answer)}

    role, told = role_with(reward)
    queue = await run_role(role, tokenizer, [batch_of(tokenizer, "2", "3", "bad"), FakeBatch([])])
    assert queue.asked == (32, 0)
    assert seen[0] == ("2", "2", 4, 2, "1 + 1 =")
    ((columns, failures),) = queue.completed
    assert columns[SampleKey(1, 0)] == {"reward": np.float32(1.0), "rewards": {"right": 1.0}}
    assert columns[SampleKey(1, 1)]["reward"] == 0
    assert columns[SampleKey(1, 0)]["reward"].dtype == np.float32
    assert [f.key for f in failures] == [SampleKey(1, 2)] and "ValueError: no" in failures[0].reason
    assert told.ready and told.advanced == 3
    failed = [fields["samples"] for kind, fields in told.events if kind == "reward_failed"]
    assert failed == [1]
    assert told.metrics[0]["scored"] == 2 and told.metrics[0]["mean"] == 0.5
    assert told.waits[-1] == "no sample is ready"


async def test_a_hanging_function_ends_the_process_after_the_batch_is_handed_back(tokenizer: ChatTokenizer) -> None:
    release = threading.Event()

    def reward(completion: str, answer: str) -> float:
        if completion == "hang":
            release.wait(60)
        return 1.0

    role, _ = role_with(reward, timeout_s=1.0)
    with pytest.raises(RelaxError, match=r"hangs.*did not return within"):
        await run_role(role, tokenizer, [batch_of(tokenizer, "hang", "2")])
    release.set()
    ((columns, failures),) = role.completed  # type: ignore[attr-defined]
    assert list(columns) == [SampleKey(1, 1)] and [f.key for f in failures] == [SampleKey(1, 0)]


async def test_a_function_that_fails_from_some_sample_on_ends_the_process(tokenizer: ChatTokenizer) -> None:
    worked = iter([True])

    def reward(completion: str, answer: str) -> float:
        if next(worked, False):
            return 1.0
        raise ValueError("always")

    batches = [batch_of(tokenizer, *["2"] * 8, group=g) for g in range(MAX_FAILURES)]
    role, told = role_with(reward)
    with pytest.raises(RelaxError, match=r"failed \d+ times in a row.*always"):
        await run_role(role, tokenizer, batches)
    # Failures are reported at a bounded rate, not one event each, and none is forgotten.
    failed = [fields["samples"] for kind, fields in told.events if kind == "reward_failed"]
    assert len(failed) < 8
    assert MAX_FAILURES <= sum(failed) < MAX_FAILURES + 8


async def test_a_function_that_never_worked_is_not_started_anew(tokenizer: ChatTokenizer) -> None:
    """The queue counts the failed groups, and ends the run: another process would fail as well."""

    def reward(completion: str, answer: str) -> float:
        raise ValueError("always")

    batches = [batch_of(tokenizer, *["2"] * 8, group=g) for g in range(2 * MAX_FAILURES // 8)]
    role, _ = role_with(reward)
    queue = await run_role(role, tokenizer, batches)
    failures = [failure for _, failed in queue.completed for failure in failed]
    assert len(failures) == 2 * MAX_FAILURES
    assert all("test_rewards.py:" in one.reason and one.item and not one.late for one in failures)


async def test_other_tokens_are_not_decoded(tokenizer: ChatTokenizer) -> None:
    batch = batch_of(tokenizer, "2")
    batch.samples[0].meta = SampleMeta(
        **{f: getattr(batch.samples[0].meta, f) for f in SampleMeta.__struct_fields__} | {"tokenizer_digest": "other"}
    )
    role, _ = role_with(lambda c, a: 1.0)
    with pytest.raises(ProtocolError, match="of tokenizer other"):
        await run_role(role, tokenizer, [batch])


def test_offered_metadata_does_not_hide_what_is_known() -> None:
    info = offered_info("q", {"question": "other", "level": 1}, lambda text, meta: 0.5, tokens=3)
    assert (info["question"], info["level"], info["tokens"], info["score"]("x")) == ("q", 1, 3, 0.5)


async def test_a_function_is_told_of_the_turns_and_gives_a_reward_for_each(tokenizer: ChatTokenizer) -> None:
    def reward(completion: str, answer: str, turns: list[dict[str, str]]) -> dict[str, Any]:
        assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant"]
        return {"turn_rewards": [float(turn["text"] == "2") for turn in turns if turn["role"] == "assistant"]}

    batch = batch_of(tokenizer, "2+3")
    sample = batch.samples[0]
    first = len(sample["tokens"]) - 4
    spans = [(0, first, "user"), (first, first + 1, "assistant"), (first + 1, first + 2, "user")]
    turns = [TurnSpan(*span) for span in (*spans, (first + 2, first + 4, "assistant"))]
    fields = {f: getattr(sample.meta, f) for f in SampleMeta.__struct_fields__}
    sample.meta = SampleMeta(**{**fields, "turns": turns})
    role, _ = role_with(reward)
    queue = await run_role(role, tokenizer, [batch])
    ((columns, failures),) = queue.completed
    assert failures == [] and columns[SampleKey(1, 0)]["turn_rewards"].tolist() == [1.0, 0.0]
    assert columns[SampleKey(1, 0)]["reward"] == 1.0
