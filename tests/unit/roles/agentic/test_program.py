"""Programs as environments: what is started, what becomes of it, and what its episode is. Real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_rt.roles.agentic import Task
from relax_rt.roles.agentic.episode import EpisodeLimits, PlayedEpisode
from relax_rt.roles.agentic.interface import EnvironmentFailed, EnvironmentStuck, EpisodeLost, GenerationFailed
from relax_rt.roles.agentic.loading import load_factory
from relax_rt.roles.agentic.program import Program, load_program, parse_result
from relax_rt.roles.agentic.program_episodes import ProgramPlayer
from relax_rt.roles.agentic.program_host import ProgramHost
from relax_rt.roles.agentic.tokens.types import Branch, BranchTurn, Counts, Episode
from relax_rt.roles.gateway.api import Access, ClosedSession, GivenAnswer, SessionLimits
from relax_rt.transport.queue.ledger.messages import VersionSpan
from relax_rt.transport.rpc.errors import Refused, RelaxError

TASK = Task(index=3, item="train-3", split="train", seed=7, question="2 + 3 =", answer="5")


def programs_of(pid: int) -> list[int]:
    """Processes that live and whose parent is this one."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdigit() and f"PPid:\t{pid}\n" in (path / "status").read_text():
                found.append(int(path.name))
    return found


def lives(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    return False


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def hosting(folder: Path, *preload: str) -> AsyncIterator[ProgramHost]:
    async with ProgramHost(folder, preload) as host:
        yield host


SCRIPT = """
import json, os, sys
task = json.loads(sys.stdin.readline())
print(task["question"], sys.argv[1:], os.environ["OPENAI_API_KEY"], os.getcwd() == os.environ["HERE"])
print("to the log", file=sys.stderr)
sys.exit(int(os.environ.get("CODE", "0")))
"""


@pytest.mark.parametrize("preload", [(), ("json",)])
async def test_a_program_has_its_task_and_its_way_to_the_policy_and_its_words_and_end_are_known(
    tmp_path: Path, preload: tuple[str, ...]
) -> None:
    (tmp_path / "agent.py").write_text(SCRIPT)
    program = load_program("python agent.py --seed {seed} '{question}'", {"preload": list(preload)}, tmp_path)
    async with hosting(tmp_path, *preload) as host:
        env = {**os.environ, "OPENAI_API_KEY": "key", "HERE": str(tmp_path)}
        first, second = await asyncio.gather(
            host.run(program.argv_for(TASK), env, program.stdin_for(TASK)),
            host.run(program.argv_for(TASK), {**env, "CODE": "3"}, program.stdin_for(TASK)),
        )
    assert (first.code, second.code) == (0, 3)
    assert first.stdout == "2 + 3 = ['--seed', '7', '2 + 3 ='] key True\n" and first.stderr == "to the log\n"


async def test_a_program_that_is_given_up_is_killed_with_its_group_and_so_are_all_when_the_slot_ends(
    tmp_path: Path,
) -> None:
    async with hosting(tmp_path) as host:
        run = asyncio.create_task(host.run(["/bin/sh", "-c", "sleep 600 & echo $! > child; sleep 600"], {}))
        other = asyncio.create_task(host.run(["/bin/sleep", "600"], {}))
        spawner = host.spawner
        told = tmp_path / "child"
        await until(lambda: told.exists() and told.read_text().strip() and len(programs_of(spawner)) == 2)
        child = int(told.read_text())
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
        await until(lambda: not lives(child))
        await until(lambda: len(programs_of(spawner)) == 1)
        (left,) = programs_of(spawner)
        # The spawner is killed: its programs end with it, who waits hears of it, and the next one has another spawner.
        os.kill(spawner, signal.SIGKILL)
        with pytest.raises(EpisodeLost, match="its spawner ended by signal 9"):
            await other
        await until(lambda: not lives(left))
        assert (await host.run(["/bin/echo", "again"], {})).stdout == "again\n"
        assert host.spawner not in (0, spawner)


async def test_what_a_program_writes_is_bounded_and_what_cannot_be_started_says_so(tmp_path: Path) -> None:
    async with hosting(tmp_path) as host:
        long = await host.run(["/bin/sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' x; echo end"], dict(os.environ))
        assert long.code == 0 and len(long.stdout) == 1 << 20 and long.stdout.endswith("xend\n")
        ended = await host.run([str(tmp_path / "nothing")], {})
        assert ended.code == 127 and "FileNotFoundError" in ended.stderr
        with pytest.raises(EnvironmentFailed, match="arguments and environment have"):
            await host.run(["/bin/echo", "x" * 200_000], {})
    with pytest.raises(RelaxError, match="No module named 'nosuch'"):
        async with hosting(tmp_path, "nosuch"):
            pass


def test_the_last_line_of_json_with_a_reward_counts() -> None:
    assert parse_result("no\n{}\n") is None
    found = parse_result('{"reward": 1}\n{"reward": 0.5, "info": {"tools": 2}, "answer": 7}\nthat was it\n{"a": 1}')
    assert found is not None and (found.reward, found.info) == (0.5, {"tools": 2.0})
    for wrong in ('{"reward": "much"}', '{"reward": NaN}', '{"rewards": 1}', '{"rewards": {"r": [1, NaN]}}'):
        with pytest.raises(ValueError, match="reward"):
            parse_result(wrong)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("", {}, "names no command"),
        ("python 'a", {}, "No closing quotation"),
        ("nosuchcommand x", {}, "no command 'nosuchcommand'"),
        ("./nothing", {}, "no command './nothing'"),
        ("python nothing.py", {}, "there is no nothing.py"),
        ("python agent.py", {"prelod": ["json"]}, "no such option (did you mean 'preload'"),
        ("python agent.py", {"preload": ["nosuch"]}, "there is no module 'nosuch'"),
        ("/bin/echo", {"preload": ["json"]}, "/bin/echo is another"),
        ("./agent.py", {}, "no command './agent.py'"),
        ("python3.99/bin/python agent.py", {}, "no command 'python3.99/bin/python'"),
        ("python agent.py", {"stdin": "tasks"}, "none of task, question and none"),
        ("python agent.py", {"env": {"A": 1}}, "Expected `str`"),
    ],
)
def test_what_cannot_be_started_is_told_before_a_run(
    tmp_path: Path, command: str, options: dict[str, Any], message: str
) -> None:
    (tmp_path / "agent.py").touch()
    with pytest.raises(RelaxError) as caught:
        load_factory(f"program:{command}", options, tmp_path)
    assert message in str(caught.value)


def test_a_misspelt_placeholder_is_refused_and_other_braces_stay(tmp_path: Path) -> None:
    with pytest.raises(RelaxError, match=r"\{questoin\} is no placeholder.*did you mean \{question\}\?"):
        load_program("echo '{questoin}'", {}, tmp_path)
    words = load_program("echo '{print} {x = 1}' {item}", {}, tmp_path).argv_for(TASK)
    assert words == ["echo", "{print} {x = 1}", "train-3"]


def test_a_prompt_is_the_question_in_its_template(tmp_path: Path) -> None:
    said = [("system", "Be brief."), ("user", "What is 2 + 3?"), ("assistant", "What?"), ("user", "I said 2 + 3!")]
    task = msgspec.structs.replace(TASK, messages=[{"role": role, "content": text} for role, text in said])
    words = load_program("echo '{question}' '{prompt}'", {}, tmp_path).argv_for(task)
    assert words == ["echo", "2 + 3 =", "I said 2 + 3!"]


async def test_an_interpreter_of_its_own_is_the_one_that_is_named(tmp_path: Path) -> None:
    """A virtual environment is the folder in which its link to python lies: `python -m venv` makes nothing but that."""
    home, own = tmp_path / "job", tmp_path / "job/.own"
    (own / "bin").mkdir(parents=True)
    (own / "bin/python").symlink_to(sys.executable)
    (own / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n")
    (home / "agent.py").write_text("import sys; print(sys.prefix, *sys.argv[1:])")
    for command in (".own/bin/python agent.py {seed}", f"{own}/bin/python agent.py {{seed}}"):
        program = load_program(command, {}, home)
        async with hosting(home) as host:
            ended = await host.run(program.argv_for(TASK), dict(os.environ))
        assert (ended.code, ended.stdout) == (0, f"{own} 7\n"), ended.stderr
    with pytest.raises(RelaxError, match=r"there is no nothing\.py"):
        load_program(".own/bin/python nothing.py", {}, home)


# --- episodes


class Lender:
    """A gateway that has what it is told to have."""

    slot = "gateway/0"

    def __init__(self, closed: ClosedSession | None = None) -> None:
        self.access = Access("http://127.0.0.1:9/v1", "key", "gateway/0#1")
        self.gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed, self.asked, self.closes = closed, {}, 0  # type: ignore[var-annotated]

    @contextlib.asynccontextmanager
    async def session(self, name: str, limits: SessionLimits) -> AsyncIterator[Lender]:
        self.asked[name] = limits
        yield self

    async def close(self) -> ClosedSession:
        self.closes += 1
        if self.closed is None:
            raise Refused("session", why="none of this name and nonce is open")
        return self.closed


def said(*ids: str, **changes: Any) -> ClosedSession:
    turns = tuple(BranchTurn(n, n + 1, "assistant", name, True) for n, name in enumerate(ids))
    tokens = tuple(range(len(ids)))
    branch = Branch(tokens, (1,) * len(ids), (-1.0,) * len(ids), (VersionSpan(0, len(ids), 1, 1),), turns, "stop")
    answers = tuple(GivenAnswer(name, {"role": "assistant", "content": name}, "stop", f"r-{name}") for name in ids)
    episode = Episode((branch,) if ids else (), Counts())
    return ClosedSession(episode=episode, answers=answers, **changes)


async def play(
    folder: Path, lender: Lender, script: str, *, judged: bool = False, limit_s: float = 120.0, routing: bool = False
) -> PlayedEpisode:
    limits = EpisodeLimits(max_turns=4, max_new_tokens=8, turn_timeout_s=5, episode_timeout_s=limit_s)
    program = Program(argv=("/bin/sh", "-c", script), cwd=str(folder))
    async with hosting(folder) as host:
        programs = ProgramPlayer(program, host, lender, limits, 100, judged, lambda count: None)  # type: ignore[arg-type]
        try:
            return await programs.play("7.1", TASK, 11, temperature=0.5, routing=routing)
        finally:
            assert not programs.activity
            await until(lambda: not programs_of(host.spawner))


async def test_an_episode_has_the_session_s_tokens_and_the_program_s_reward(tmp_path: Path) -> None:
    lender = Lender(said("a", "b"))
    played = await play(tmp_path, lender, """echo '{"reward": 2, "rewards": [0.5, 0.25], "info": {"x": 1}}'""")
    assert played.rewards == {"a": 0.5, "b": 2.25} and played.info == {"x": 1.0} and played.turns == 2
    assert played.episode.branches == said("a", "b").episode.branches and not played.truncated
    limits = SessionLimits(tokens=100, new_tokens=8, calls=4, group="7", seed=11, temperature=0.5, weights="episode")
    assert lender.asked == {"7.1": limits}
    named = await play(tmp_path, Lender(said("a", "b")), """echo '{"rewards": {"r-b": 0.5}, "reward": 1}'""")
    assert named.rewards == {"a": 0.0, "b": 1.5}
    three = said("a", "b", "c")
    three = msgspec.structs.replace(
        three, answers=[msgspec.structs.replace(one, response="r", choice=n) for n, one in enumerate(three.answers)]
    )
    several = await play(tmp_path, Lender(three), """echo '{"rewards": {"r": [1, 2, 3]}}'""")
    assert several.rewards == {"a": 1.0, "b": 2.0, "c": 3.0}
    judged = await play(tmp_path, Lender(said("a")), "echo 42", judged=True)
    assert judged.rewards == {"a": 0.0} and judged.output == "42\n"
    quoted = await play(tmp_path, Lender(said("a")), """echo '{"reward": 1000}'""", judged=True)
    assert quoted.rewards == {"a": 0.0}, "what the policy says and the program quotes is no reward"
    wanting = Lender(said("a"))
    await play(tmp_path, wanting, "echo 42", judged=True, routing=True)
    assert wanting.asked == {"7.1": msgspec.structs.replace(limits, routing=True)}
    # It was refused a call, and did not know what to do then.
    cut = await play(tmp_path, Lender(said("a", exhausted="tokens")), "exit 1")
    assert cut.truncated == "tokens" and cut.rewards == {"a": 0.0}


@pytest.mark.parametrize(
    ("script", "closed", "error", "message"),
    [
        ("echo no >&2; exit 3", said("a"), EnvironmentFailed, "exit code 3: no"),
        ("kill -9 $$", said("a"), EnvironmentFailed, "signal 9"),
        ("echo fine", said("a"), EnvironmentFailed, "no line of JSON"),
        ("echo '{\"reward\": 1}'", said(), EnvironmentFailed, "before the policy had replied"),
        ("echo '{\"reward\": 1e39}'", said("a"), EnvironmentFailed, "must be finite"),
        ("echo '{\"rewards\": [1]}'", said("a", "b"), EnvironmentFailed, "rewards to 1 answers, and it had 2"),
        (
            'echo \'{"rewards": {"r-c": 1}}\'',
            said("a", "b"),
            EnvironmentFailed,
            "1 rewards to response 'r-c', which has 0 answers",
        ),
        (
            'echo \'{"rewards": {"r-a": [1, 2]}}\'',
            said("a", "b"),
            EnvironmentFailed,
            "2 rewards to response 'r-a', which has 1",
        ),
        ("echo '{\"reward\": 1}'", None, EpisodeLost, "none of this name"),
        ("exit 1", said("a", error="no engine"), EpisodeLost, "no engine"),
        ("exit 1", said("a", error="too long", permanent=True), GenerationFailed, "too long"),
    ],
)
async def test_what_goes_wrong_is_told_apart(
    tmp_path: Path, script: str, closed: ClosedSession | None, error: type[RelaxError], message: str
) -> None:
    with pytest.raises(error, match=message):
        await play(tmp_path, Lender(closed), script)


@pytest.mark.parametrize(("waiting", "error"), [(0, EnvironmentStuck), (1, EpisodeLost)])
async def test_one_that_is_late_is_killed_and_at_fault_only_if_it_had_all_its_answers(
    tmp_path: Path, waiting: int, error: type[RelaxError]
) -> None:
    with pytest.raises(error, match=r"not over within 1 s"):
        await play(tmp_path, Lender(said("a", interrupted=waiting)), "sleep 600", limit_s=1.0)


async def test_one_whose_gateway_was_started_again_is_killed_at_once(tmp_path: Path) -> None:
    lender = Lender(said("a"))
    lender.gone.set_exception(RelaxError("the session", why="gateway/0#1 had it, and now it is gateway/0#2"))
    with pytest.raises(EpisodeLost, match="now it is gateway/0#2"):
        await play(tmp_path, lender, "sleep 600")
    assert not lender.closes
