"""Feed broken blocks to the decoder for some time: it may say Corrupt and nothing else.

    pip install atheris
    python tools/soak/fuzz_block.py --seconds 60 [--corpus FOLDER]

With atheris (coverage-guided) if it is installed, else with random mutations. Any other exception, a view that leaves
the block, or memory taken on the word of a broken length ends it with the input that did it.
"""

from __future__ import annotations

import argparse
import pathlib
import random
import resource
import subprocess
import sys
import tempfile
import time
import types
import warnings
from typing import Any

import numpy as np

from relax_rt.transport.memory import blocks, values
from relax_rt.transport.memory.blocks import Block, BlockPlan, ColumnSource
from relax_rt.transport.rpc.errors import Corrupt, Refused

MAX_ROWS_LOOKED_AT = 64
MEMORY_LIMIT_BYTES = 4 << 30
"""Of address space: a length of 2^40 that is believed ends in a MemoryError."""


def examples() -> list[bytes]:
    """Whole blocks with columns of every kind."""
    arrays: dict[str, list[Any]] = {
        "tokens": [np.arange(5 + i, dtype=np.int32) for i in range(4)],
        "image": [np.full((2, 1 + i, 3), i, np.uint8) for i in range(4)],
        "fixed": [np.ones((2, 3), np.float16)] * 4,
        "scalar": [np.float64(i) for i in range(4)],
        "text": ["", "a", "größer", "x" * 40],
        "raw": [b"", b"\0", b"ab", b"abc"],
        "meta": [1, None, {"a": [1.5]}, "s"],
    }
    sources = []
    for name, rows in arrays.items():
        pairs = [values.encoded(name, value) for value in rows]
        sources.append(ColumnSource(name, pairs[0][0], [data for _, data in pairs]))
    blob = ColumnSource("shared", ("blob", -1), [bytes([i]) * 16 for i in range(4)])
    plans = [
        BlockPlan([*sources, blob]),
        BlockPlan(sources[:1]),
        BlockPlan(sources[1:2]),
        BlockPlan(sources[4:]),
        BlockPlan([blob]),
    ]
    one = values.encoded("text", "alone")
    return [plan.to_bytes() for plan in [*plans, BlockPlan([ColumnSource("text", one[0], [one[1]])])]]


def look_at_all(data: bytes) -> bool:
    """Decode everything in what may be a block; True if it was one.

    Raises:
        AssertionError: a view is writable or lies outside the block.
    """
    memory = np.frombuffer(data, np.uint8)
    try:
        found = Block(memory)
    except Corrupt:
        return False
    whole = True
    for name in found.names:
        for look in (found.column, found.packed, found.dtype, found.ragged):
            try:
                view = look(name)
            except Corrupt:
                whole = False
            except Refused:
                continue
            else:
                _check(view[0] if isinstance(view, tuple) else view, memory)
        for row in range(min(found.rows, MAX_ROWS_LOOKED_AT)):
            try:
                value = found.value(name, row)
            except Corrupt:
                whole = False
                break
            _check(value, memory)
    return whole


def _check(view: object, memory: np.ndarray[Any, Any]) -> None:
    # An array without a base is a copy, of Python numbers.
    if not isinstance(view, np.ndarray) or not view.size or view.base is None:
        return
    assert not view.flags.writeable
    low, high = np.lib.array_utils.byte_bounds(view)
    first, end = np.lib.array_utils.byte_bounds(memory)
    assert first <= low <= high <= end, f"a view of {low}..{high} in a block at {first}..{end}"


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The block with a few bytes, or a length, changed, cut off or put in."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) or 1)
        match rng.randrange(5):
            case 0:
                changed[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                changed[at : at + 8] = rng.choice([0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]).to_bytes(8, "little")
            case 2:
                changed[at : at + 8] = rng.choice([0, 1, 2**31, 2**63 - 1, 2**64 - 64]).to_bytes(8, "big")
            case 3:
                del changed[at : at + rng.randint(1, 16)]
            case _:
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
    return bytes(changed)


def fuzz_at_random(seconds: float) -> None:
    rng, blocks = random.Random(time.time_ns()), examples()
    until, tried, whole = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        data = mutated(rng.choice(blocks), rng)
        try:
            whole += look_at_all(data)
        except Exception:
            print("failed on", data.hex())
            raise
        tried += 1
    print(f"{tried} inputs without atheris, {whole} of them still whole: nothing but Corrupt")


def fuzz_with_atheris(seconds: float, corpus: str) -> None:
    import atheris

    for type_ in vars(blocks).values():
        if isinstance(type_, type) and type_.__module__ == blocks.__name__:
            for name, method in list(vars(type_).items()):
                if isinstance(method, types.FunctionType):
                    setattr(type_, name, atheris.instrument_func(method))
    for i, data in enumerate(examples()):
        (pathlib.Path(corpus) / f"whole-{i}").write_bytes(data)
    options = [f"-max_total_time={int(seconds)}", "-max_len=4096", "-rss_limit_mb=2048", f"-artifact_prefix={corpus}/"]
    atheris.Setup([sys.argv[0], *options, corpus], lambda data: look_at_all(data) and None)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--corpus", default="", help="folder of inputs to begin with and to add to")
    parser.add_argument("--random", action="store_true", help="random mutations even if atheris is there")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    warnings.simplefilter("error")
    try:
        import atheris  # noqa: F401
    except ImportError:
        arguments.random = True
    if arguments.random:
        fuzz_at_random(arguments.seconds)
        return
    if arguments.corpus:
        pathlib.Path(arguments.corpus).mkdir(parents=True, exist_ok=True)
        fuzz_with_atheris(arguments.seconds, arguments.corpus)
        return
    # libFuzzer ends its process without cleaning up.
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, __file__, "--seconds", str(arguments.seconds), "--corpus", scratch]
        failed = subprocess.run(command, check=False).returncode
        for crash in pathlib.Path(scratch).glob("crash-*"):
            print("failed on", crash.read_bytes().hex())
    sys.exit(failed)


if __name__ == "__main__":
    main()
