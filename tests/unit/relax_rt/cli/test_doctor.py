"""What the doctor makes of a machine, of GPUs and packages, and of a run on it."""

from __future__ import annotations

import json
import re
import resource
import socket
import stat
from pathlib import Path

import pytest

from relax_rt.cli import doctor
from relax_rt.cli.doctor import (
    Finding,
    Gpu,
    check_gpus,
    check_sandboxes,
    check_software,
    judge_gpus,
    judged,
    parse_gpus,
)
from relax_rt.cli.main import main
from relax_rt.config.loader import load_config
from relax_rt.observe.text import byte_size
from relax_rt.process import sandbox
from relax_rt.process.sandbox import SandboxFailed, SandboxMode

SMI = "0, NVIDIA H200, 143771, 512, 580.65, 9.0\n1, NVIDIA H200, 143771, 90000, 580.65, 9.0\nbroken line\n"
CONFIG = '[run]\nname = "a"\n[model]\npath = "m"\n[data]\ntask = "chain_sum"\n[reward]\nfunction = "a:b"\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty machine."""
    for folder in ("proc/self", "proc/sys/net/ipv4", "sys/fs/cgroup", "sys/kernel/mm/transparent_hugepage"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sys/devices/system/clocksource/clocksource0").mkdir(parents=True)
    return tmp_path


def test_levels_and_sizes() -> None:
    assert [judged("a", "b", "c", fail=f, warn=w).level for f, w in (("x", "y"), ("", "y"), ("", ""))] == [
        "fail",
        "warn",
        "ok",
    ]
    assert (byte_size(1 << 29), byte_size(3 << 29)) == ("512 MiB", "1.5 GiB")


def test_limits_of_both_kinds_of_cgroup(root: Path) -> None:
    assert doctor.cgroup_limits(root) == {}
    v1 = root / "sys/fs/cgroup"
    for name, value in (
        ("cpu/cpu.cfs_quota_us", "150000"),
        ("cpu/cpu.cfs_period_us", "100000"),
        ("memory/memory.limit_in_bytes", str(1 << 33)),
        ("memory/memory.usage_in_bytes", str(1 << 30)),
        ("pids/pids.max", "max"),
    ):
        (v1 / name).parent.mkdir(exist_ok=True)
        (v1 / name).write_text(value)
    assert doctor.cgroup_limits(root) == {"cores": 1.5, "memory": float(1 << 33), "memory_used": float(1 << 30)}
    own = root / "sys/fs/cgroup/box"
    own.mkdir()
    (root / "proc/self/cgroup").write_text("0::/box\n")
    (own / "cgroup.controllers").write_text("cpu memory pids")
    (own / "cpu.max").write_text("max 100000")
    (own / "memory.max").write_text("max")
    (own / "memory.current").write_text("77")
    (own / "pids.max").write_text("100")
    assert doctor.cgroup_limits(root) == {"pids": 100.0}
    assert doctor.check_processes(root).level == "warn"
    assert "100 processes" in doctor.check_container(root, doctor.cgroup_limits(root)).value


def test_clock_and_huge_pages(root: Path) -> None:
    clock = root / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    for source, level in (("tsc\n", "ok"), ("hpet\n", "warn")):
        clock.write_text(source)
        assert doctor.check_clock(root).level == level
    assert "not offered" in doctor.check_huge_pages(root).value
    (root / "sys/kernel/mm/transparent_hugepage/enabled").write_text("always [madvise] never\n")
    assert "madvise" in doctor.check_huge_pages(root).value


def test_memory_and_shared_memory(tmp_path: Path) -> None:
    assert doctor.check_memory({"memory": float(1 << 30), "memory_used": 0.0}).level == "warn"
    assert doctor.check_shared_memory(tmp_path / "nothing").level == "fail"
    assert doctor.check_cores({"cores": 1.0}).level == "warn"


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for soft, level in ((100, "fail"), (1024, "warn"), (resource.RLIM_INFINITY, "ok")):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        found = doctor.check_files()
        assert found.level == level
        assert ("ulimit -n 4096" in found.advice) == (level != "ok")


def test_gpus_of_nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answer(code: int, text: str) -> tuple[list[Finding], list[Gpu]]:
        tool.write_text(f"#!/bin/sh\ncat <<'E'\n{text}E\nexit {code}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
        return check_gpus()

    found, gpus = answer(0, SMI)
    assert [gpu.total_mib for gpu in gpus] == [143771, 143771]
    assert [f.level for f in found] == ["ok", "ok", "warn"]
    assert "in use" in found[2].advice
    found, gpus = answer(9, "NVIDIA-SMI has failed because it couldn't communicate with the driver\n")
    assert (found[0].level, gpus) == ("fail", [])
    assert judge_gpus(parse_gpus(""))[0].level == "ok"


def test_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    have = {"msgspec": "1", "pydantic": "2", "pyzmq": "3", "uvloop": "4", "torch": "2.9+cpu", "cupy-cuda13x": "14"}
    gpus = parse_gpus(SMI)
    found = {f.name: f for f in check_software(gpus, have.get)}
    assert found["psutil"].level == "fail"
    assert found["torch"].level == "warn" and "GPUs" in found["torch"].advice
    assert found["cupy"].value == "14"
    assert "relax-rt[sglang]" in found["sglang"].value
    assert found["ray"].value == "not installed; not needed"
    assert {f.name: f for f in check_software([], have.get)}["torch"].level == "ok"


@pytest.mark.parametrize(
    ("mode", "level", "value", "advice"),
    [
        (SandboxMode("namespaces"), "ok", "a network without any connection are their own", ""),
        (
            SandboxMode("limits", "unshare: no"),
            "warn",
            "not isolated.*unshare: no",
            "permit namespaces.*box = ",
        ),
        (
            SandboxFailed("a box", why="no python", hint="do so"),
            "warn",
            "no program can be run: no python",
            "do so",
        ),
    ],
)
def test_the_isolation_of_reward_programs_is_reported(
    monkeypatch: pytest.MonkeyPatch,
    mode: SandboxMode | SandboxFailed,
    level: str,
    value: str,
    advice: str,
) -> None:
    async def probe(command: list[str]) -> SandboxMode:
        assert command == []
        if isinstance(mode, SandboxFailed):
            raise mode
        return mode

    monkeypatch.setattr(sandbox, "probe", probe)
    (found,) = check_sandboxes()
    assert found.level == level and re.search(value, found.value) and re.search(advice, found.advice)


def test_the_sandbox_is_tried_with_what_the_rewards_of_a_config_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    async def probe(command: list[str]) -> SandboxMode:
        tried.append(command)
        if command == ["node"]:
            raise SandboxFailed("node", why="/root (mode 0700) is closed to user nobody", hint="chmod o+rx /root")
        return SandboxMode("namespaces", backend="bubblewrap")

    monkeypatch.setattr(sandbox, "probe", probe)
    path = tmp_path / "roles.toml"
    components = [
        "[[reward.components]]\nname = 'code'\ncommand = ['bash']\n",
        "[[reward.components]]\nname = 'code'\nlabel = 'b'\ncommand = ['node']\n",
        "[[reward.components]]\nname = 'unit_tests'\n",
        "[[reward.components]]\nname = 'code'\nlabel = 'c'\ncommand = ['bash']\n",
    ]
    path.write_text(CONFIG.replace('[reward]\nfunction = "a:b"\n', "".join(components)))
    found = {finding.name: finding for finding in check_sandboxes(load_config(path))}
    assert tried == [["bash"], ["node"], []]
    assert {name: finding.level for name, finding in found.items()} == {
        "sandbox of bash": "ok",
        "sandbox of node": "warn",
        "sandbox": "ok",
    }
    assert found["sandbox of node"].advice == "chmod o+rx /root" and "bubblewrap sandbox" in found["sandbox"].value


def test_a_run_that_does_not_fit(tmp_path: Path) -> None:
    path = tmp_path / "roles.toml"
    tables = "[queue]\ncapacity_mib = 1048576\n[roles.rollout]\ncount = 64\ngpus = 2\n[run2]\n"
    path.write_text(CONFIG.replace("[model]", f'dir = "{tmp_path}/run"\n[model]') + tables.replace("[run2]\n", ""))
    found = {f.name: f for f in doctor.check_fit(load_config(path), [])}
    assert found["gpus"].level == "fail" and "128 wanted, 0 here" in found["gpus"].value
    assert found["shared memory"].level == "fail"
    assert found["cores"].level == "warn"
    assert found["run.dir"].value.startswith(str(tmp_path / "run"))


def test_ports_that_settings_name_must_be_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        table = {"gateway": {"port": port, "other_port": 0}, "x": {"report": 3}}
        assert list(doctor._named_ports(table)) == [("gateway.port", port)]


def test_an_interpreter_without_the_package_is_reported(tmp_path: Path) -> None:
    bad = tmp_path / "python"
    bad.write_text("#!/bin/sh\necho 'ModuleNotFoundError: no relax_rt' >&2\nexit 1\n")
    bad.chmod(0o700)
    assert "no relax_rt" in doctor._cannot_import(str(bad))


def test_both_forms_and_exit_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["doctor", "--json"])
    lines = json.loads(capsys.readouterr().out)
    assert code == int(any(line["level"] == "fail" for line in lines))
    assert {"machine", "limits", "gpu", "software"} == {line["section"] for line in lines}
    assert "sandbox" in {line["name"] for line in lines}
    (tmp_path / "roles.toml").write_text(CONFIG.replace('"m"', '"package:tiny"') + "[queue]\ncapacity_mib = 1048576\n")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "fail shared memory" in out and "queue.capacity_mib" in out
    assert main(["doctor", "nothing.toml"]) == 2
