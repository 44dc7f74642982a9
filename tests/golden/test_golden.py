"""What people see of the command line is frozen: messages of wrong configs, and the help of every command.

After a change that is meant, renew the files and look at the difference:

    RELAX_RENEW_GOLDEN=1 python -m pytest tests/golden && git diff tests/golden
"""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from rich.console import Console

from relax_rt.cli.main import app, main

HERE = Path(__file__).parent
RENEW = bool(os.environ.get("RELAX_RENEW_GOLDEN"))
WIDTH = 100
"""Of the terminal that the help is laid out for, whatever the tests run in."""


@pytest.fixture(autouse=True)
def one_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told of this machine's own is left out."""
    monkeypatch.setattr("relax_rt.roles.models.precision.computes_bfloat16", lambda: False)
    monkeypatch.setattr("relax_rt.roles.models.precision.processor_name", lambda: "this CPU")


def compare(name: str, said: str) -> None:
    path = HERE / name
    said = said.replace(str(HERE), "<folder>")
    if RENEW:
        path.parent.mkdir(exist_ok=True)
        path.write_text(said)
    assert path.exists(), f"{path} is not there: renew it as test_golden.py says"
    assert said == path.read_text(), f"{name} has changed: if it was meant to, renew it as test_golden.py says"


def commands() -> list[str]:
    return sorted(name for name in app if not name.startswith("-"))


def help_of(*tokens: str) -> str:
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, force_terminal=False, color_system=None, legacy_windows=False)
    app.help_print(tokens, console=console)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("command", ["", *commands()])
def test_help(command: str) -> None:
    compare(f"help/{command or 'relax-rt'}.txt", help_of(*([command] if command else [])))


def test_no_help_is_left_of_a_command_that_is_gone() -> None:
    assert sorted(path.stem for path in (HERE / "help").glob("*.txt")) == sorted(["relax-rt", *commands()])


@pytest.mark.parametrize("columns", ["40", "300"])
def test_every_mistake_of_a_config_is_reported_at_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["validate", "mistakes.toml"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    compare("mistakes.txt", err)


def test_the_first_syntax_error_of_a_config_is_reported_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    assert main(["validate", "not_toml.toml"]) == 2
    compare("not_toml.txt", capsys.readouterr().err)


def test_every_mistake_of_a_config_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    assert main(["validate", "mistakes.toml", "--json"]) == 2
    said = capsys.readouterr().out
    assert len(json.loads(said)["problems"]) >= 6
    compare("mistakes.json", said)


def test_mistakes_of_overrides(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    sets = ["algorithm.stepz=3", "run.seed=-1", "sampling=3", "nonsense", "roles.trainer.count=two"]
    words = [word for one in sets for word in ("--set", one)]
    assert main(["validate", "sound.toml", *words]) == 2
    compare("overrides.txt", capsys.readouterr().err)
