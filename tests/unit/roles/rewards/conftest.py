"""Boxes of these tests are told from others' on this machine."""

from __future__ import annotations

import os

import pytest

from relax_rt.process import sandbox


@pytest.fixture(autouse=True)
def own_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of boxes have a name of this process's, so that only what it leaves itself is found left."""
    monkeypatch.setattr(sandbox, "DIR_PREFIX", f"{sandbox.DIR_PREFIX}test-{os.getpid()}-")
