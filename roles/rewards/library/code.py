"""Programs that are run: what they print, or whether they pass their tests. Each run has a box of its own."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any

import msgspec
from pydantic import Field

from relax_rt.config.schema import Seconds, Table
from relax_rt.process.sandbox import Level, Sandbox, SandboxLimits, SandboxResult, require_level
from relax_rt.roles.rewards.library.forms import unfenced
from relax_rt.roles.rewards.library.functions import reward

Function = Callable[..., Awaitable[float]]
LONGEST = 1 << 20
"""Characters of a program."""


class SandboxOptions(Table):
    """Limits of a program with everything it starts."""

    tests: str = "tests"
    """Key of the item's metadata that holds its tests."""
    partial: bool = False
    """The share of the tests that pass; otherwise 1 if all do, else 0."""
    most_tests: Annotated[int, Field(ge=1, le=1000)] = 32
    """Maximum tests of one item; the first ones are run."""
    timeout_s: Seconds = 10.0
    """Wall-clock and processor time of one run."""
    memory_mib: Annotated[int, Field(ge=64)] = 1024
    """Address space of each process, and memory of all processes together."""
    disk_mib: Annotated[int, Field(ge=1)] = 64
    """Size of its folder, which is removed afterwards."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 32
    """Processes and threads at the same time."""
    output_kib: Annotated[int, Field(ge=1, le=16384)] = 256
    """Maximum output."""
    command: list[str] = Field(default_factory=list)
    """What runs the program, its file at the end: ["bash"]. Empty: this interpreter, with its packages. Tests of
    functions need a Python."""
    box: Level = "namespaces"
    """The least that closes it in. `limits`: where namespaces are not permitted it runs all the same, and sees the
    files, the network and the processes that the role sees."""


class CodeOptions(SandboxOptions):
    """The program in the completion (its last fenced block, else all of it) prints what it should for each input of
    metadata.tests: [{ input = "…", output = "…" }], or { inputs = […], outputs = […] }."""


class UnitTestOptions(SandboxOptions):
    """The functions in the completion (its last fenced block, else all of it) pass the item's tests: Python text, or an
    array of those, each run apart. With metadata.entry_point, `check(entry_point)` is called behind them, as in
    HumanEval."""


class ProgramRunner:
    """Runs programs in boxes, as many at a time as there are cores."""

    def __init__(self, options: SandboxOptions) -> None:
        self._options = options
        self._limits = SandboxLimits(
            wall_s=options.timeout_s,
            cpu_s=max(1, round(options.timeout_s)),
            memory_mib=options.memory_mib,
            disk_mib=options.disk_mib,
            processes=options.processes,
            output_kib=options.output_kib,
        )
        self._room = asyncio.Semaphore(max(1, len(os.sched_getaffinity(0))))

    async def run(self, name: str, text: str, stdin: str) -> SandboxResult:
        """Run a program's text, in a file of this name; see Sandbox.run.

        Raises:
            SandboxFailed: also where it could not be isolated as `box` asks.
        """
        argv = [*(self._options.command or [sys.executable, "-I", "-B"]), name]
        async with self._room:
            box = Sandbox(self._limits, await require_level(self._options.box, self._options.command))
            return await box.run(argv, {name: text}, stdin)


def share(passed: list[bool], options: SandboxOptions) -> float:
    """Return the reward for tests that passed or not."""
    return sum(passed) / len(passed) if options.partial else float(all(passed))


class ProgramTest(msgspec.Struct, frozen=True):
    """An input, and what is to be printed for it."""

    input: str
    output: str


def cases(given: Any) -> list[ProgramTest]:
    """Return the cases of an item.

    Raises:
        ValueError: they have no known form, or there are none.
    """
    if isinstance(given, str):
        given = json.loads(given)
    if isinstance(given, Mapping) and given.get("fn_name"):
        raise ValueError(
            f"tests call the function {given['fn_name']!r:.80}, and `code` gives programs text: use unit_tests"
        )
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= set(given):
        found = [ProgramTest(str(i), str(o)) for i, o in zip(given["inputs"], given["outputs"], strict=True)]
    elif isinstance(given, list) and all(isinstance(one, Mapping) and "output" in one for one in given):
        found = [ProgramTest(str(one.get("input", "")), str(one["output"])) for one in given]
    else:
        raise ValueError(f'tests {given!r:.80} are neither [{{"input", "output"}}] nor {{"inputs", "outputs"}}')
    if not found:
        raise ValueError("the item has no tests")
    return found


def same_text(said: bytes, wanted: str) -> bool:
    """Equal, white space at the end of lines and of the whole aside."""
    lines = [line.rstrip() for line in said.decode(errors="replace").rstrip().splitlines()]
    return lines == [line.rstrip() for line in wanted.rstrip().splitlines()]


@reward("code", options=CodeOptions)
def _code(options: CodeOptions) -> Function:
    runner = ProgramRunner(options)

    async def code(completion: str, answer: str, metadata: dict[str, Any]) -> float:
        wanted = cases(_tests(metadata, options))[: options.most_tests]
        program, passed = unfenced(completion)[:LONGEST], []
        for case in wanted:
            ran = await runner.run("program", program, case.input)
            passed.append(ran.code == 0 and same_text(ran.stdout, case.output))
            if not (passed[-1] or options.partial):
                return 0.0
        return share(passed, options)

    return code


def _tests(metadata: Mapping[str, Any], options: SandboxOptions) -> Any:
    if options.tests not in metadata:
        known = ", ".join(sorted(metadata)) or "nothing"
        raise ValueError(f"the item's metadata has no '{options.tests}' to test with; it has {known}")
    return metadata[options.tests]


HARNESS = """
import json, os, sys
def main():
    order = json.load(sys.stdin)
    said = os.dup(1)
    scope = {"__name__": "program"}
    exec(compile(order["program"], "program", "exec"), scope)
    exec(compile(order["test"], "test", "exec"), scope)
    os.write(said, order["word"].encode())
    os._exit(0)
main()
"""
"""The word that says that the tests were gone through comes in with them: a program that ends early does not know it.
One that looks for it in its caller finds it; nothing that shares a process with its tests is safe from that."""


@reward("unit_tests", options=UnitTestOptions)
def _unit_tests(options: UnitTestOptions) -> Function:
    runner = ProgramRunner(options)

    async def unit_tests(completion: str, answer: str, metadata: dict[str, Any]) -> float:
        given = _tests(metadata, options)
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            raise ValueError(f"tests {given!r:.80} are neither Python text nor an array of such")
        called = metadata.get("entry_point")
        end = f"\ncheck({called})\n" if isinstance(called, str) and called.isidentifier() else ""
        program, passed = unfenced(completion)[:LONGEST], []
        for text in texts[: options.most_tests]:
            word = secrets.token_hex(16)
            order = json.dumps({"program": program, "test": text + end, "word": word})
            ran = await runner.run("harness", HARNESS, order)
            passed.append(ran.code == 0 and ran.stdout.endswith(word.encode()))
            if not (passed[-1] or options.partial):
                return 0.0
        return share(passed, options)

    return unit_tests
