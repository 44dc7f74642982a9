"""Our interface for users of the transfer_queue package answers as the package does.

`compat_answers.json` holds what transferqueue 0.1.11 answers to the calls in `compat_cases.py`. Our answers are
compared with it always; where the package's own environment is there, so are its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("tensordict", reason="transport.compat needs tensordict: pip install 'relax-rt[transferqueue]'")

import compat_cases as cases

import relax_rt.transport.compat.transfer_queue as ours

ROOT = Path(__file__).parents[4]
ANSWERS = Path(__file__).with_name("compat_answers.json")
PEER = Path(os.environ.get("RELAX_PEER_PYTHON") or ROOT / ".peers/venv/bin/python")
NEEDS_PEER = pytest.mark.skipif(
    not PEER.exists(), reason="transferqueue is not here: run `make peer-env`, or set RELAX_PEER_PYTHON to its Python"
)
MARK = "RELAX_COMPAT_RUN"
OURS, THEIRS = "import relax_rt.transport.compat.transfer_queue as tq", "import transfer_queue as tq"
# Of torch's own, where a loader's worker is forked from a process with threads.
FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.fixture(scope="module")
def recorded() -> dict[str, Any]:
    return dict(json.loads(ANSWERS.read_text()))


@pytest.fixture(autouse=True)
def no_other_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAX_TRANSFER_QUEUE", raising=False)


@pytest.fixture(scope="module")
def queue() -> Iterator[Any]:
    ours.init({"controller": {"polling_mode": True}})
    yield ours
    ours.close()


def answered(function: cases.Case, tq: Any) -> Any:
    return json.loads(json.dumps([cases.seen(answer) for answer in function(tq)]))


@pytest.mark.parametrize("name", cases.CASES)
def test_our_interface_answers_as_the_package(name: str, queue: Any, recorded: dict[str, Any]) -> None:
    assert answered(cases.CASES[name], queue) == recorded[name]


@FORKS
@pytest.mark.parametrize("name", cases.SAMPLED)
def test_our_interface_samples_as_the_package(
    name: str, recorded: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, sampler, function = cases.SAMPLED[name]
    ours.close()
    monkeypatch.setattr(
        ours, "CONF", ours.init({"controller": {"sampler": sampler(ours), **controller}}), raising=False
    )
    try:
        assert answered(function, ours) == recorded[name]
    finally:
        ours.close()


def test_every_case_is_recorded(recorded: dict[str, Any]) -> None:
    assert set(recorded) == {*cases.CASES, *cases.SAMPLED}


def run_peer(*arguments: str) -> str:
    """Standard output of a script in the package's own environment; nothing that it starts is left behind."""
    mark = f"{os.getpid()}-{arguments[-1]}"
    env = {**os.environ, MARK: mark, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "TQ_LOGGING_LEVEL": "ERROR"}
    # Where the current folder is on the path, our tests would be found in place of the package's modules.
    process = subprocess.Popen(
        [str(PEER), "-P", *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=400)
    finally:
        process.kill()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"{MARK}={mark}\0".encode() in (folder / "environ").read_bytes() + b"\0":
                    os.kill(int(folder.name), signal.SIGKILL)
    assert process.returncode == 0, errors[-4000:]
    return output


@NEEDS_PEER
def test_the_package_answers_as_recorded(recorded: dict[str, Any]) -> None:
    assert json.loads(run_peer(cases.__file__, "transfer_queue")) == recorded


# --- programs

PROGRAMS = {
    "grpo": [
        "step 0: 12 samples, 12 scored, fields advantage, reward, text, tokens, why, loss -0.8874",
        "step 1: 12 samples, 12 scored, fields advantage, reward, text, tokens, why, loss -0.7929",
        "weights [0.037, -0.163, 0.113, -0.037, 0.063, 0.56, 0.546, -0.183, -0.013, -0.31], 0 samples left",
    ],
    "streaming": [
        "rank 0: 6 micro-batches, the same in all its processes: True",
        "rank 1: 6 micro-batches, the same in all its processes: True",
        "each sample once: True",
        "all consumed: True",
    ],
}


def program(name: str) -> Path:
    return ROOT / "examples" / "queue_compat" / f"{name}.py"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_on_our_interface(name: str) -> None:
    done = subprocess.run([sys.executable, program(name)], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == PROGRAMS[name], done.stderr[-4000:]


@NEEDS_PEER
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_program_runs_on_the_package(name: str, tmp_path: Path) -> None:
    source = program(name).read_text()
    assert source.count(OURS) == 1
    theirs, starter = tmp_path / "program.py", tmp_path / "starter.py"
    theirs.write_text(source.replace(OURS, THEIRS))
    # The package's processes ask for more cores than a small machine has, and would wait for them for ever.
    starter.write_text(
        "import runpy, sys, ray\n"
        "ray.init(num_cpus=8, log_to_driver=False, object_store_memory=200 << 20, include_dashboard=False)\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')\n"
    )
    lines = run_peer(str(starter), str(theirs)).splitlines()
    assert [line for line in lines if "WARNING" not in line and "INFO" not in line] == PROGRAMS[name]
