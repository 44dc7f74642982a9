"""Megatron-Core in bfloat16 on one rank, resharded to Hugging Face names, against transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


def test_the_resharded_model_is_as_close_to_float32_as_transformers_own(tmp_path: Path) -> None:
    program = Path(__file__).with_name("megatron_far_end.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert not found["missing"] and not found["unexpected"]
    # Both round to bfloat16, in another order: neither may be further from the exact result than twice the other.
    assert found["megatron"] < max(2 * found["torch"], 0.02), found
