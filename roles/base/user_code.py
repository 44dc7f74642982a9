"""Finds the line of the user's own code in a traceback or a stack, for errors."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path

import relax_rt

RUNTIME_FOLDERS = (str(Path(relax_rt.__file__).parent), str(Path(relax_rt.__file__).parent.resolve().parent / "roles"))
"""Folders of the runtime's own files."""


def user_line(error: BaseException) -> str:
    """Return `file:line` of the innermost frame of an error that is the user's own, else of a library."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    return innermost_user_line(
        [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    )


def innermost_user_line(lines: Sequence[tuple[str, int]]) -> str:
    """Return the innermost of some files and lines, outermost first, that is the user's own, else of a library.

    The deepest frame in a library says less than the line of the user's code that called it.
    """
    outside = [(file, line) for file, line in lines if not file.startswith(("<frozen", *RUNTIME_FOLDERS))]
    own = [(file, line) for file, line in outside if "site-packages" not in file and "/lib/python" not in file]
    file, line = (own or outside or [("an unknown line", 0)])[-1]
    return f"{file}:{line}" if line else file
