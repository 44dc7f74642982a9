"""Cheap mistakes are told before model, data and heavy packages are touched: by what a process imports and opens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from relax_rt.cli.starter import write_starter
from relax_rt.config.version import RUN_FORMAT

HEAVY = ("torch", "transformers", "pyarrow", "datasets", "safetensors", "tokenizers", "reasoning_gym", "gguf", "sglang")
WATCH = """
import json, sys
seen, folder = [], sys.argv[1]
def watch(event, args):
    if event == "import":
        seen.append("import " + args[0].partition(".")[0])
    elif event == "open" and isinstance(args[0], str) and args[0].startswith(folder):
        seen.append("open " + args[0][len(folder) + 1:])
sys.addaudithook(watch)
from relax_rt.cli.main import main
code = main(sys.argv[2:])
print("SEEN " + json.dumps([code, seen]))
"""


PRECISION = "from relax_rt.roles.models import precision; precision.computes_bfloat16"


class Seen:
    """What a command did: its exit code, what it said, the packages it imported and the files it opened."""

    def __init__(self, folder: Path, *argv: str, before: str = "") -> None:
        """Run the command in a process of its own, with an empty cache, after the code `before`."""
        words = [sys.executable, "-c", WATCH.replace("from relax_rt.cli.main", f"{before}\nfrom relax_rt.cli.main")]
        words += [str(folder), *argv]
        env = {**os.environ, "RELAX_CACHE": str(folder / "cache")}
        done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=env)
        *lines, last = done.stdout.rstrip("\n").split("\n")
        self.code, seen = json.loads(last.removeprefix("SEEN "))
        self.out, self.err = "\n".join(lines), done.stderr
        self.imported = {name for kind, name in (line.split(" ", 1) for line in seen) if kind == "import"}
        self.opened = [name for kind, name in (line.split(" ", 1) for line in seen) if kind == "open"]

    @property
    def touched(self) -> set[str]:
        """What the quick checks must leave alone."""
        return (self.imported & set(HEAVY)) | {name for name in self.opened if name.startswith(("data", "model"))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A starter with data of its own, and files of a model that cannot be read."""
    write_starter(tmp_path)
    toml = tmp_path / "roles.toml"
    text = toml.read_text().replace('task = "basic_arithmetic"', 'path = "data.jsonl"').replace("size = 2000\n", "")
    head, _, rest = text.partition("[data.options]")
    text = head + rest[rest.index("[reward]") :]
    text = text.replace('path = "package:tiny"', 'path = "model"').replace("{expression}", "{question}")
    toml.write_text(text)
    (tmp_path / "data.jsonl").write_text("not JSON\n")
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (model / name).write_text("nothing of the kind")
    return tmp_path


WIDTH = {"model/config.json"}
"""The one small file that the quick checks may read: `dtype = "auto"` depends on the width of the model."""

MISTAKES = {
    "a misspelt key": (["algorithm.prompts_per_stpe=8"], "did you mean 'prompts_per_step'?"),
    "an unknown table": (["trainr.count=1"], "trainr"),
    "a wrong type": (['algorithm.steps="many"'], "must be an integer"),
    "a value out of bounds": (["data.held_out=1.5"], "less than 1"),
    "settings that contradict": (["sampling.top_p=0.5"], "truncating samplers are refused"),
    "capacity that cannot be": (["queue.capacity_mib=8", "checkpoint.every_steps=100000"], "does not hold"),
    "no such model folder": (['model.path="modle"'], "there is no folder"),
    "no such package": (['model.path="package:tyni"'], "did you mean 'package:tiny'?"),
    "no such data": (['data.path="dta.jsonl"'], "did you mean 'data.jsonl'?"),
    "a pattern of folders": (['data.path="rows/*/x.jsonl"'], "only the name of the file may have a wildcard"),
    "a pattern in both": (['data.path="rows*/x*.jsonl"'], "only the name of the file may have a wildcard"),
    "a pattern with ?": (['data.path="dat?.jsonl"'], "and only `*`"),
    "a pattern with []": (['data.path="[cd]ata.jsonl"'], "and only `*`"),
    "a pattern of the cold start": (['cold_start.path="**/sft.jsonl"'], "only the name of the file may have"),
    "a pattern in no folder": (['data.path="shards/*.jsonl"'], "there is no file"),
    "no such task": (['data={ task = "chain_sun" }'], "did you mean 'chain_sum'?"),
    "no such option": (['data={ task = "chain_sum", options = { min_term = 2 } }'], "has no such option"),
    "no such task of a set": (['evaluation.sets=[{ name = "a", task = "chain_sun" }]'], "evaluation.sets[0].task"),
    "size of a set in its options": (
        ['evaluation.sets=[{ name = "a", task = "chain_sum", options = { size = 5 } }]'],
        "set evaluation.sets[0].size",
    ),
    "no such source file": (['reward.function="rewrd.py:score"'], "did you mean 'reward.py'?"),
    "no such function": (['reward.function="reward.py:scroe"'], "did you mean 'score'?"),
    "no such file in a folder with a space": (['reward.function="my code/reward.py:score"'], "there is no file"),
    "no such data of the cold start": (['cold_start.path="sft.jsonl"'], "there is no file"),
    "a model without a tokenizer": (['model.path="bare"'], "lacks a tokenizer"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_validate_reports_it_before_it_touches_anything(folder: Path, name: str) -> None:
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    (folder / "bare" / "model.safetensors").write_text("")
    overrides, words = MISTAKES[name]
    seen = Seen(folder, "validate", *(word for one in overrides for word in ("--set", one)))
    assert seen.code == 2 and words in seen.err
    # A fault of a task is only certain once reasoning-gym itself was asked.
    assert seen.touched <= WIDTH | ({"reasoning_gym"} if any("task =" in one for one in overrides) else set())


COMMANDS: Sequence[Sequence[str]] = (
    ["validate"],
    ["validate", "--json"],
    ["validate", "--quick"],
    ["up"],
    ["up", "--detach"],
    ["plan"],
    ["doctor"],
    ["sample"],
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_that_takes_a_config_reports_all_of_them_at_once(folder: Path, command: Sequence[str]) -> None:
    wrong = ["algorithm.stepz=1", "sampling.top_p=0.5", 'data.path="nowhere.jsonl"', 'reward.function="reward.py:f"']
    seen = Seen(folder, *command, "roles.toml", *(word for one in wrong for word in ("--set", one)))
    said = seen.out + seen.err
    assert seen.code == 2
    assert all(word in said for word in ("stepz", "truncating samplers", "nowhere.jsonl", "has no 'f'"))
    assert seen.touched <= WIDTH


@pytest.mark.parametrize("command", [["validate", "--quick"], ["validate", "--quick", "--json"]], ids=" ".join)
def test_the_quick_check_of_a_right_config_times_nothing(folder: Path, command: Sequence[str]) -> None:
    """Also on a CPU that may be fast in bfloat16, of which nothing is known yet."""
    (folder / "model" / "config.json").write_text('{"hidden_size": 1024}')
    code = f"{PRECISION} = lambda: True"
    seen = Seen(folder, *command, before=code)
    assert seen.code == 0, seen.err
    assert seen.touched <= WIDTH
    assert "torch" in Seen(folder, "plan", before=code).imported, "which has to be sure"


def test_what_passes_the_quick_checks_is_looked_into_and_it_says_so(folder: Path) -> None:
    """The test above would pass if nothing were ever read."""
    seen = Seen(folder, "validate")
    assert seen.code == 2 and "transformers" in seen.imported
    assert any(name.startswith("model/") for name in seen.opened) and "data.jsonl" in seen.opened
    assert "importing torch and transformers…" in seen.err and "reading the model model…" in seen.err


def test_the_run_directory_of_another_config_is_refused_before_the_slow_checks(folder: Path) -> None:
    run_dir = folder / "runs" / "mine"
    run_dir.mkdir(parents=True)
    (run_dir / "run.json").write_text(
        json.dumps({"format": RUN_FORMAT, "run_id": "0" * 8, "status": "finished", "config_digest": "0" * 16})
    )
    seen = Seen(folder, "up", "--set", "run.name=mine", before=f"{PRECISION} = lambda: False")
    assert seen.code == 2 and "belongs to a run with another config" in seen.err
    assert seen.touched <= WIDTH


@pytest.mark.parametrize(
    "text",
    [
        "from elsewhere import *\n",
        "def __getattr__(name): return len\n",
        "globals()['score'] = len\n",
        "try:\n    from fast import score\nexcept ImportError:\n    score = None\n",
        "if True:\n    async def score(completion, answer): ...\n",
        "score, other = len, 1\n",
        "for score in (len,): pass\n",
        "with open('x') as score: pass\n",
        "import math as score\n",
        "score: object = len\n",
    ],
)
def test_a_name_that_the_source_may_give_is_not_refused(folder: Path, text: str) -> None:
    (folder / "reward.py").write_text(text)
    assert Seen(folder, "validate", "--quick").code == 0


def test_a_column_that_is_called_path_is_no_file(folder: Path) -> None:
    assert Seen(folder, "validate", "--quick", "--set", 'data.columns={ path = "file" }').code == 0


def test_a_pattern_of_files_passes_the_quick_checks(folder: Path) -> None:
    assert Seen(folder, "validate", "--quick", "--set", 'data.path="dat*.jsonl"').code == 0


@pytest.mark.parametrize(
    "template",
    [
        "Fix the bug in app.py: {question}",
        "main.py:{question}",
        "app.py: 3 lines {question}",
        "Read {question} of util.py:7",
        "{question} see a.py:main",
        "run.py:1{question}",
    ],
)
def test_a_prompt_that_names_a_source_file_is_no_code(folder: Path, template: str) -> None:
    seen = Seen(folder, "validate", "--quick", "--set", f"data.template={json.dumps(template)}")
    assert seen.code == 0, seen.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def score(:\n", "SyntaxError"),
        ("def other(completion, answer):\n    score = 1\n", "has no 'score'"),
        ("class A:\n    def score(self): ...\n", "it has: A"),
        ("", "it has no names"),
        ("x = '\0'\n", "cannot be imported"),
        ("del score\n", "has no 'score'"),
    ],
)
def test_a_name_that_the_source_cannot_give_is(folder: Path, text: str, words: str) -> None:
    (folder / "reward.py").write_text(text)
    seen = Seen(folder, "validate", "--quick")
    assert seen.code == 2 and words in seen.err
