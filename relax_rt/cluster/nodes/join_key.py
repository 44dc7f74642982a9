"""The CURVE key of a run over several nodes: its holder may join and call every role; others get no answer.

All processes of the run share one key pair. Its text is the secret half, 64 hexadecimal digits, from which the public
half follows. It is stored in the run directory (mode 0600), outlives a restart of the head, and is never sent.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

import zmq
import zmq.utils.z85

from relax_rt.transport.rpc.errors import Refused
from relax_rt.transport.rpc.identity import CurveKeys

FILE = "join.key"
ENVIRONMENT = "RELAX_JOIN_KEY"


def make_key(folder: Path) -> Path:
    """The key's file in this folder, made if it is not there. Raises Refused: it is there, and others than its owner
    can read or write it."""
    path = folder / FILE
    if not path.exists():
        write_key(path, zmq.utils.z85.decode(CurveKeys.make().secret).hex())
    else:
        _check_mode(path, "if anybody may have read it, remove it instead: a new one is made")
    return path


def _check_mode(path: Path, otherwise: str) -> None:
    """Refuse a key that others than its owner can read: it gives access to every role of the run."""
    if (mode := stat.S_IMODE(path.stat().st_mode)) & 0o077:
        hint = f"chmod 600 {path}; {otherwise}"
        raise Refused(f"key {path} is not for its owner alone", why=f"its mode is {mode:04o}", hint=hint)


def write_key(path: Path, text: str) -> None:
    """Write a key's text so that only its owner can read it, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text + "\n")
    temporary.rename(path)


def read_key(path: Path) -> str:
    """A key's text. Raises Refused: there is no such file, it holds no key, or others than its owner can read or write
    it."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        hint = f"copy {FILE} of the run directory on the head"
        raise Refused(f"key {path} cannot be read", why=str(error), hint=hint) from error
    curve_keys(text, str(path))
    _check_mode(path, "if anybody may have read it, have the head make a new one")
    return text


def curve_keys(text: str, where: str = "the key") -> CurveKeys:
    """A key in the form of the message layer. Raises Refused: the text is no key."""
    try:
        secret = zmq.utils.z85.encode(bytes.fromhex(text.strip()))
        if len(secret) != 40:
            raise ValueError(f"{len(text.strip())} digits instead of 64")
    except ValueError as error:
        hint = f"it is the text of {FILE} in the run directory on the head"
        raise Refused(f"{where} is no key", why=str(error), hint=hint) from error
    return CurveKeys(zmq.curve_public(secret), secret)
