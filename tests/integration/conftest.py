"""Real processes: the toys of the supervision tests are importable, and a job is a few files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_run import Make, TinyRun

sys.path.insert(0, str(Path(__file__).parent / "supervision_toys"))


@pytest.fixture
def make(tmp_path: Path, runs: list[TinyRun]) -> Make:
    """Makes a run of the job that is in these files, `roles.toml` among them. It is not started yet."""

    def made(files: dict[str, str], **overrides: Any) -> TinyRun:
        job = tmp_path / "job"
        job.mkdir(exist_ok=True)
        for name, text in files.items():
            (job / name).write_text(text)
        runs.append(TinyRun(tmp_path / f"run-{len(runs)}", job / "roles.toml", **overrides))
        return runs[-1]

    return made
