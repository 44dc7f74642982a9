"""What a roles.toml with [roles.env] may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_rt.config.job import absent_kinds
from relax_rt.config.loader import load_config
from relax_rt.config.problems import BadInput, ConfigErrors
from relax_rt.roles.agentic.preflight import preflight_environment
from relax_rt.roles.agentic.settings import EnvSettings, env_settings
from relax_rt.roles.config.sections import RLConfig
from relax_rt.roles.job.job import RLJob
from relax_rt.roles.rollout.engines.settings import longest_tokens

DOCS = Path(__file__).parents[4] / "docs"
SOUND = """
[run]
name = "game"
[model]
path = "package:tiny"
[roles.env]
environment = "game.py:Game"
tasks = 100
max_tokens = 400
[sampling]
max_new_tokens = 8
"""
GAME = """
class Game:
    def __init__(self, size=1): ...
    async def reset(self, task): return "go " * 20
    async def step(self, reply): ...
"""


def read(folder: Path, text: str = SOUND, *overrides: str) -> RLConfig:
    (folder / "game.py").write_text(GAME)
    (folder / "roles.toml").write_text(text)
    found = load_config(folder / "roles.toml", overrides)
    assert isinstance(found, RLConfig)
    return found


def test_neither_prompts_nor_rewards_nor_their_roles_are_needed(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert {kind: config.roles[kind].count for kind in ("env", "rollout", "reward", "evaluator", "trainer")} == {
        "env": 1, "rollout": 1, "reward": 0, "evaluator": 0, "trainer": 1,
    }  # fmt: skip
    assert isinstance(env_settings(config), EnvSettings) and longest_tokens(config) == 400
    policy = RLJob().ledger_policy(config)
    assert set(policy.tasks) == {"train"} and "reward" in policy.tasks["train"]


def test_what_the_environment_does_instead_is_no_role_of_the_run(tmp_path: Path) -> None:
    assert absent_kinds(read(tmp_path)) == {"reward", "evaluator"}
    prompts = SOUND.split("[roles.env]")[0] + '[data]\npath = "a.jsonl"\n[reward]\nfunction = "a.py:b"\n'
    assert not absent_kinds(read(tmp_path, prompts, "roles.evaluator.count=0"))


def test_other_runs_still_need_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors) as caught:
        read(tmp_path, '[run]\nname = "x"\n[model]\npath = "package:tiny"\n')
    assert {problem.message for problem in caught.value.problems} >= {"missing table [data]", "missing table [reward]"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["roles.env.count=0"], "nobody plays the episodes"),
        (["reward.function=x.py:f"], "the environment gives the rewards"),
        (["roles.reward.count=1"], "nothing to do for reward"),
        (["roles.evaluator.count=1"], "nothing to do for evaluator"),
        (["data.task=chain_sum"], "tasks and [data] are both set"),
        (["algorithm.sampler=curriculum"], "a sampler chooses among the items of [data]"),
        (["sampling.max_new_tokens=400"], "each reply may have 400"),
        (["roles.env.turn_timeout_s=900"], "is not below episode_timeout_s"),
        (["roles.env.episodes_in_flight=4"], "less than a group"),
        (["algorithm.mode=colocate", "algorithm.max_staleness=0"], "no episode waits for turns of the trainer"),
        (["evaluation.greedy=true"], "greedy episodes"),
        (["roles.rollout.count=0"], "must be at least 1, not 0"),
        (["roles.env.max_turn=3"], "unknown key 'max_turn'"),
        (["roles.env.drift=fork_"], "is not one of"),
        (["roles.env.tool_parser=hermess"], "tool_parser = 'hermess': no such parser"),
        (["roles.env.chat_template=nowhere.jinja"], "there is no file"),
        (["roles.gateway.reasoning_parser=thinks"], "reasoning_parser = 'thinks': no such parser"),
        (["roles.gateway.chat_template=nowhere.jinja"], "there is no file"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigErrors) as caught:
        read(tmp_path, SOUND, *overrides)
    assert any(message in problem.message for problem in caught.value.problems), caught.value.render()


def test_episodes_are_about_something(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="what are the episodes about"):
        read(tmp_path, SOUND.replace("tasks = 100", ""))
    text = SOUND.replace("tasks = 100", "") + '[data]\ntask = "chain_sum"\n'
    assert read(tmp_path, text).data.task == "chain_sum"


def looked_at(folder: Path, *overrides: str, context: int | None = None) -> list[str]:
    pytest.importorskip("transformers")
    from episode_kit import tokenizer

    config = read(folder, SOUND, *overrides)
    return [str(problem.message) for problem in preflight_environment(config, folder, tokenizer(), context)]


def test_the_first_held_out_task_is_begun_before_a_run(tmp_path: Path) -> None:
    assert looked_at(tmp_path) == []
    assert "an episode begins with 63 tokens" in looked_at(tmp_path, "roles.env.max_tokens=60")[0]
    assert "context is 128" in looked_at(tmp_path, context=128)[0]
    assert "has no 'Gam'" in looked_at(tmp_path, "roles.env.environment=game.py:Gam")[0]
    assert "no such option" in looked_at(tmp_path, "roles.env.options.sise=2")[0]
    assert looked_at(tmp_path, "roles.env.workers=2") == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise OSError('no board')", "reset raised OSError: no board"),
        ("return 3", "no Observation and no text"),
        ("import asyncio; await asyncio.sleep(60)", "reset did not return within"),
        (
            "from relax_rt.roles.agentic import Observation as O; "
            "return O(messages=[{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'data:,'}}]}])",
            "shows parts of type 'image_url': the model, its engines and its trainer take text alone",
        ),
    ],
)
def test_a_task_that_cannot_be_begun_is_told(tmp_path: Path, body: str, why: str, monkeypatch: Any) -> None:
    text = GAME.replace('return "go " * 20', body)
    monkeypatch.setattr(f"{__name__}.GAME", text)
    assert why in looked_at(tmp_path, "roles.env.turn_timeout_s=2")[0]


OFFERS = (
    "from relax_rt.roles.agentic import Observation as O; "
    "return O(messages=[{'role': 'user', 'content': 'go'}], tools=[{'type': 'function', 'function': {'name': 'add'}}])"
)
SHOWS = (
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], True),
        (["roles.env.chat_template=tools.jinja"], False),
        (["roles.gateway.chat_template=tools.jinja"], False),
        (["roles.gateway.chat_template=tools.jinja", "roles.env.chat_template=none.jinja"], True),
        (["roles.env.tool_parser=hermes"], False),
    ],
)
def test_tools_that_the_policy_would_not_see_are_told_before_a_run(
    tmp_path: Path, overrides: list[str], told: bool, monkeypatch: Any
) -> None:
    monkeypatch.setattr(f"{__name__}.GAME", GAME.replace('return "go " * 20', OFFERS))
    (tmp_path / "tools.jinja").write_text(SHOWS)
    (tmp_path / "none.jinja").write_text(SHOWS[SHOWS.index("{% for m in") :])
    found = looked_at(tmp_path, *overrides)
    assert len(found) == told and all(
        "offers tools, and the model's chat template does not show" in one for one in found
    )


TOOLS_SHOWN = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
MESSAGE = "{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}"
OPENING = "{{ '<|assistant|>' if add_generation_prompt }}"
CALLS_SHOWN = "{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments | tojson }}{% endfor %}"


def speaking(calls: str = CALLS_SHOWN, results: str = MESSAGE, first: str = "") -> str:
    """A template that writes calls and results in these ways."""
    turn = "{% if m.tool_calls %}" + calls + "{% elif m.role == 'tool' %}" + results + "{% else %}" + MESSAGE
    return TOOLS_SHOWN + first + "{% for m in messages %}" + turn + "{% endif %}{% endfor %}" + OPENING


RAISES = "{{ raise_exception('not here') }}"


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (speaking(), ""),
        # Arguments wanted as text are given as text.
        (speaking(CALLS_SHOWN.replace(" | tojson", "")), ""),
        (speaking(RAISES), "a turn of the assistant with a tool call: it raises TemplateError: not here"),
        (speaking(CALLS_SHOWN.replace("arguments", "arguments.x.y")), "with a tool call: it raises UndefinedError"),
        (speaking(CALLS_SHOWN.replace("name +", "name + 1 +")), "with a tool call: it raises TypeError"),
        (speaking(results=RAISES), "the result of a tool call (role 'tool'): it raises TemplateError"),
        (speaking(results=""), "the result of a tool call (role 'tool'): it does not write the words"),
        (speaking(first="{{ messages[-1].content + 1 if messages[-1].role == 'tool' }}"), "the result of a tool call"),
        (
            speaking(first="{{ raise_exception('one turn') if messages | length == 3 and not tools }}"),
            "a turn of the user after one of the assistant: it raises TemplateError: one turn",
        ),
    ],
)  # fmt: skip
def test_a_template_that_ends_an_episode_is_told_before_a_run(
    tmp_path: Path, source: str, told: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(f"{__name__}.GAME", GAME.replace('return "go " * 20', OFFERS))
    (tmp_path / "own.jinja").write_text(source)
    found = looked_at(tmp_path, "roles.env.chat_template=own.jinja", "roles.env.tool_parser=hermes")
    assert len(found) == bool(told) and all(told in one and "an episode would end there" in one for one in found)


def test_calls_that_the_template_leaves_out_are_a_warning(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(f"{__name__}.GAME", GAME.replace('return "go " * 20', OFFERS))
    (tmp_path / "own.jinja").write_text(speaking(calls=""))
    assert looked_at(tmp_path, "roles.env.chat_template=own.jinja", "roles.env.tool_parser=hermes") == []
    assert "cannot render a turn of the assistant with a tool call: it does not write" in capsys.readouterr().err


def test_what_a_program_cannot_send_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    from episode_kit import tokenizer

    (tmp_path / "agent.py").write_text("")
    for source, words in (
        (speaking(results=RAISES), "the gateway's calls that send it are refused"),
        (speaking(), ""),
    ):
        (tmp_path / "own.jinja").write_text(source)
        config = read(tmp_path, PROGRAM, "roles.gateway.chat_template=own.jinja")
        assert list(preflight_environment(config, tmp_path, tokenizer(), None)) == []
        said = capsys.readouterr().err
        assert words in said and ("cannot render" in said) == bool(words)


def test_who_would_sample_episodes_is_told_how_to_see_some(tmp_path: Path) -> None:
    for text, hint in ((SOUND, r"debug=True\) plays single ones"), (PROGRAM, r"docs/guides/programs\.md, By hand")):
        with pytest.raises(BadInput, match=hint):
            RLJob().sample(read(tmp_path, text), None, 1)
    assert "## By hand" in (DOCS / "guides" / "programs.md").read_text()


PROGRAM = """
[run]
name = "game"
[model]
path = "package:tiny"
[roles.env]
environment = "program:python agent.py"
tasks = 100
max_tokens = 400
episode_timeout_s = 20
[roles.gateway]
[sampling]
max_new_tokens = 8
"""


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["roles.env.turn_timeout_s=5"], "turn_timeout_s has no effect on programs"),
        (["roles.env.workers=2"], "workers has no effect on programs"),
        (["roles.env.worker_processes=5"], "worker_processes has no effect on programs"),
        (["roles.env.worker_memory_mib=500"], "worker_memory_mib has no effect on programs"),
        (["roles.env.unfinished=keep"], "replies of a program's episode are not kept"),
        (["roles.env.drift=drop"], "drift of programs is the gateway's"),
        (["roles.gateway.count=0"], "there is none"),
        # Two of the three slots are at the first of the two gateways.
        (
            ["roles.env.count=3", "roles.gateway.count=2", "roles.gateway.sessions=100"],
            "sessions = 100, and up to 128 episodes",
        ),
        (["roles.gateway.sessions=100", "evaluation.every_steps=5"], "sessions = 100, and up to 128 episodes"),
        (["roles.gateway.connections=60"], "connections = 60, and up to 64 episodes"),
        (["roles.gateway.waiting=60"], "waiting = 60, and up to 64 episodes"),
    ],
)
def test_what_has_no_effect_on_a_program_or_is_too_little_for_it_is_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigErrors) as caught:
        read(tmp_path, PROGRAM, *overrides)
    (problem,) = caught.value.problems
    assert message in problem.message and problem.hint, caught.value.render()


@pytest.mark.parametrize(
    ("words", "overrides", "refused"),
    [
        ("{question}", ["data.template={question} ="], True),
        ("{question}", ["data.template={question} =", 'roles.env.options.stdin="none"'], True),
        ("{question}", ["data.template={question} =", 'roles.env.options.stdin="task"'], False),
        ("{question} {prompt}", ["data.template={question} ="], False),
        ("{answer}", ["data.template={question} ="], False),
        ("{question}", [], False),
    ],
)
def test_a_template_that_does_not_reach_a_program_is_refused(
    tmp_path: Path, words: str, overrides: list[str], refused: bool
) -> None:
    text = PROGRAM.replace("agent.py", f"agent.py '{words}'").replace("tasks = 100\n", "")
    overrides = ["data.path=rows.jsonl", *overrides]
    if not refused:
        assert read(tmp_path, text, *overrides)
        return
    with pytest.raises(ConfigErrors, match=r"data\.template has no effect on \{question\}"):
        read(tmp_path, text, *overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["roles.env.unfinished=drop"],
        ["roles.gateway.sessions=64", "roles.gateway.connections=64", "roles.gateway.waiting=64"],
        ["roles.env.count=3", "roles.gateway.count=2", "roles.gateway.sessions=128"],
        ["supervision.nodes.listen=127.0.0.1:0"],
        ["supervision.nodes.listen=127.0.0.1:0", "roles.gateway.host=node"],
    ],
)
def test_what_a_program_needs_is_enough(tmp_path: Path, overrides: list[str]) -> None:
    assert read(tmp_path, PROGRAM, *overrides)


@pytest.mark.parametrize(
    ("at_home", "overrides", "refused"),
    [
        (["env", "gateway"], [], False),
        (["gateway"], [], True),
        (["gateway"], ["roles.env.node=head"], False),
        (["gateway"], ["roles.env.node=b"], True),
        (["gateway"], ["roles.env.node=b", "roles.gateway.host=node"], False),
        (["gateway"], ["roles.env.node=b", "roles.gateway.host=0.0.0.0"], False),
        ([], ["roles.gateway.host=::1", "roles.env.node=b"], True),
        ([], ["roles.gateway.node=b", "roles.env.node=b"], False),
    ],
)
def test_programs_that_may_be_on_other_nodes_need_a_gateway_that_listens_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_home: list[str], overrides: list[str], refused: bool
) -> None:
    monkeypatch.setattr(RLJob, "one_node", at_home)
    listen = "supervision.nodes.listen=127.0.0.1:0"
    if not refused:
        assert read(tmp_path, PROGRAM, listen, *overrides)
        return
    with pytest.raises(ConfigErrors, match="programs on other nodes than the gateway's do not reach it"):
        read(tmp_path, PROGRAM, listen, *overrides)
