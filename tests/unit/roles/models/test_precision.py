"""Which dtype a device computes fast: by what it says of itself, and in doubt by time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_rt.roles.models import precision
from relax_rt.roles.models.precision import (
    ABORT_RATIO,
    LEAST_ROUNDS,
    MAX_BFLOAT16_RATIO,
    ROUNDS,
    DtypeTiming,
    choose_for_cpu,
    choose_for_gpu,
    computes_bfloat16,
    cpu_dtype,
    processor_name,
    time_products,
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RELAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never() -> DtypeTiming:
    raise AssertionError("nothing is to be measured")


def test_a_cpu_without_instructions_is_not_timed() -> None:
    found = choose_for_cpu(False, never, name="an EPYC")
    assert found.dtype == "float32" and "an EPYC has no instructions" in found.why


@pytest.mark.parametrize("instructions", [True, None])
@pytest.mark.parametrize(
    ("ratio", "dtype"),
    [
        (0.2, "bfloat16"),
        (MAX_BFLOAT16_RATIO, "bfloat16"),
        (MAX_BFLOAT16_RATIO + 0.01, "float32"),
        (1.0, "float32"),
        (40.0, "float32"),
    ],
)
def test_flags_alone_do_not_choose_bfloat16(instructions: bool | None, ratio: float, dtype: str) -> None:
    found = choose_for_cpu(instructions, lambda: DtypeTiming(1.0, ratio))
    assert found.dtype == dtype and f"{ratio:.2g} times" in found.why


@pytest.mark.parametrize(("instructions", "dtype"), [(True, "bfloat16"), (None, "float32")])
def test_without_torch_the_flags_decide(instructions: bool | None, dtype: str) -> None:
    found = choose_for_cpu(instructions, lambda: None)
    assert found.dtype == dtype and "not timed" in found.why


@pytest.mark.parametrize(
    ("capabilities", "dtype", "says"),
    [
        ([], "bfloat16", "taken to have"),
        ([8.0], "bfloat16", "8.0"),
        ([9.0, 9.0], "bfloat16", "9.0"),
        ([7.5], "float32", "7.5"),
        ([9.0, 7.0], "float32", "7.0"),
    ],
)
def test_a_gpu_is_asked_for_its_capability(capabilities: list[float], dtype: str, says: str) -> None:
    found = choose_for_gpu(capabilities)
    assert found.dtype == dtype and says in found.why


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("flags\t\t: fpu avx2 avx512f avx512_vnni\n", False),
        ("flags\t\t: fpu avx2\nflags\t\t: fpu amx_bf16\n", False),
        ("flags\t\t: fpu avx2 amx_bf16 amx_tile\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("something else\n", None),
    ],
)
def test_what_the_system_says_of_the_processor(tmp_path: Path, text: str, known: bool | None) -> None:
    (cpuinfo := tmp_path / "cpuinfo").write_text(f"model name\t: A Processor\n{text}")
    assert computes_bfloat16(cpuinfo) is known
    assert processor_name(cpuinfo) == "A Processor"
    assert computes_bfloat16(tmp_path / "absent") is None and processor_name(tmp_path / "absent") == "this CPU"


def clock_of(float32: list[float], bfloat16: list[float]) -> Iterator[float]:
    """A clock by which the rounds of both dtypes take so long, one after the other."""
    now = 0.0
    for pair in zip(float32, bfloat16, strict=True):
        for seconds in pair:
            yield now
            now += seconds
            yield now


def test_a_disturbed_round_does_not_count() -> None:
    pytest.importorskip("torch")
    # The machine is busy in all rounds but one, and not in the same one for both.
    busy = clock_of([7.0, 2.0, 7.0, 7.0, 7.0], [7.0, 7.0, 7.0, 1.0, 7.0])
    assert time_products(lambda: next(busy)) == DtypeTiming(2.0, 1.0)
    assert next(busy, None) is None, f"{ROUNDS} rounds"


def test_hopeless_products_are_not_waited_for() -> None:
    pytest.importorskip("torch")
    slow = clock_of([1.0] * ROUNDS, [ABORT_RATIO + 1] * ROUNDS)
    assert time_products(lambda: next(slow)) == DtypeTiming(1.0, ABORT_RATIO + 1)
    assert len(list(slow)) == 4 * (ROUNDS - LEAST_ROUNDS)


def test_timing_leaves_torch_as_it_was() -> None:
    torch = pytest.importorskip("torch")
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    found = time_products()
    assert min(found) > 0
    assert torch.get_num_threads() == threads and torch.equal(torch.get_rng_state(), state)


@pytest.fixture
def with_instructions(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(precision, "computes_bfloat16", lambda: True)
    for name in precision.ISA_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_all_processes_of_a_machine_decide_alike(with_instructions: pytest.MonkeyPatch, cache: Path) -> None:
    with_instructions.setattr(precision, "time_products", lambda: DtypeTiming(1.0, 0.5))
    assert cpu_dtype().dtype == "bfloat16"
    with_instructions.setattr(precision, "time_products", never)
    assert cpu_dtype().dtype == "bfloat16" == cpu_dtype(measured=False).dtype
    # But where something is hidden from the libraries, it is another machine to them.
    with_instructions.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    with_instructions.setattr(precision, "time_products", lambda: DtypeTiming(1.0, 12.0))
    assert cpu_dtype().dtype == "float32"
    assert len(list(cache.glob("cpu-dtype-*.json"))) == 2


@pytest.mark.parametrize(
    "kept",
    ["", "{", "[]", '{"float32_s": 1}', '{"float32_s": 1, "bfloat16_s": null}', '{"float32_s": 0, "bfloat16_s": 0}'],
)
def test_a_kept_answer_that_cannot_be_read_is_measured_anew(
    with_instructions: pytest.MonkeyPatch, cache: Path, kept: str
) -> None:
    with_instructions.setattr(precision, "time_products", lambda: DtypeTiming(1.0, 0.5))
    cpu_dtype()
    (path,) = cache.glob("cpu-dtype-*.json")
    path.write_text(kept)
    with_instructions.setattr(precision, "time_products", lambda: DtypeTiming(1.0, 3.0))
    assert cpu_dtype().dtype == "float32" and json.loads(path.read_text())["bfloat16_s"] == 3.0


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(
    with_instructions: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with_instructions.setenv("RELAX_CACHE", str(tmp_path / "file" / "cache"))
    with_instructions.setattr(precision, "time_products", lambda: DtypeTiming(1.0, 0.5))
    assert cpu_dtype().dtype == "bfloat16"


def test_unmeasured_it_answers_by_the_flags(with_instructions: pytest.MonkeyPatch) -> None:
    with_instructions.setattr(precision, "time_products", never)
    assert cpu_dtype(measured=False).dtype == "bfloat16"


class Log:
    def __init__(self) -> None:
        self.said: list[str] = []

    def warning(self, text: str, **_: object) -> None:
        self.said.append(text)


@pytest.mark.parametrize(
    ("device", "dtype", "flags", "warned"),
    [
        ("cpu", "bfloat16", False, True),
        ("cpu", "bfloat16", True, False),
        ("cpu", "float32", False, False),
        ("cuda", "bfloat16", False, False),
    ],
)
def test_a_role_says_that_its_node_is_slow_with_what_another_chose(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: str, flags: bool, warned: bool
) -> None:
    pytest.importorskip("torch")
    from relax_rt.roles.models.device import warn_if_slow

    monkeypatch.setattr(precision, "computes_bfloat16", lambda: flags)
    monkeypatch.setattr(precision, "time_products", lambda: DtypeTiming(1.0, 0.5))
    ctx: Any = SimpleNamespace(log=Log())
    warn_if_slow(ctx, device, dtype)
    assert [("float32 would be faster" in text) for text in ctx.log.said] == [True] * warned


DECIDE = """
import json
from relax_rt.roles.models import precision
taken = []
measure = precision.time_products
precision.time_products = lambda: taken.append(measure()) or taken[-1]
precision.computes_bfloat16 = lambda: True     # what the flags say, whatever is hidden
found = precision.cpu_dtype()
print(json.dumps([found.dtype, taken[0].ratio]))
"""


@pytest.mark.parametrize("hidden", [{}, {"ONEDNN_MAX_CPU_ISA": "AVX2"}])
def test_the_decision_follows_what_was_measured_here(hidden: dict[str, str]) -> None:
    """Where instructions are hidden from the library, the flags still say that they are there."""
    pytest.importorskip("torch")
    out = subprocess.run(
        [sys.executable, "-c", DECIDE], env={**os.environ, **hidden}, capture_output=True, text=True, check=True
    ).stdout
    dtype, ratio = json.loads(out)
    assert (dtype == "bfloat16") == (ratio <= MAX_BFLOAT16_RATIO)
    if hidden and os.uname().machine == "x86_64":
        # Each product is then converted to float32, computed in it and converted back, which cannot be faster.
        assert dtype == "float32"
