"""Access to a gateway: the run's token, the keys of sessions, and the address of a run's gateway."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from relax_rt.transport.rpc.errors import Refused, RelaxError

PREFIX = "rls-"
FILE = "gateway.token"
LONGEST = 512
"""Maximum characters of a key; longer ones are not checked."""


class Caller(msgspec.Struct, frozen=True):
    """Owner of a key: a session, by name and nonce, or the whole run (`session` is empty)."""

    session: str = ""
    nonce: str = ""


class Keys:
    """Makes and checks keys. A session's key is its name, its nonce, and a code of both under the run's token
    (HMAC-SHA256, RFC 2104): a restarted gateway can check old keys, and nothing is looked up before a key was
    checked."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def of_session(self, name: str, nonce: str = "") -> str:
        """Return the key of a session."""
        encoded = base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")
        return f"{PREFIX}{encoded}.{nonce}.{self._code(name, nonce)}"

    def check(self, key: str) -> Caller | None:
        """Return the owner of a key, or None. Takes as long for a key that is nearly right as for any other."""
        if not key or len(key) > LONGEST:
            return None
        if hmac.compare_digest(key.encode(), self._token):
            return Caller()
        name, _, rest = key.removeprefix(PREFIX).partition(".")
        nonce, _, code = rest.partition(".")
        try:
            session = base64.urlsafe_b64decode(name + "=" * (-len(name) % 4)).decode()
        except (binascii.Error, ValueError):
            return None
        right = hmac.compare_digest(code.encode(), self._code(session, nonce).encode())
        return Caller(session, nonce) if right and session and key.startswith(PREFIX) else None

    def _code(self, name: str, nonce: str) -> str:
        # A nonce has no line end.
        return hmac.new(self._token, f"{nonce}\n{name}".encode(), hashlib.sha256).hexdigest()


def run_token(run_dir: Path) -> str:
    """Return the run's token; the first call creates it. Only the run's user can read its file.

    Raises:
        Refused: others can read the file, or it holds no token.
    """
    path = run_dir / FILE
    made = secrets.token_urlsafe(32)
    # Written completely before it gets its name, so that nobody reads a part of it.
    draft = path.with_name(f"{FILE}.{os.getpid()}")
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as out:
        out.write(made + "\n")
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()
    if (mode := path.stat().st_mode & 0o077) != 0:
        why = f"others on this machine may read it (mode {mode:03o} for them)"
        raise Refused(f"the token in {path}", why=why, hint=f"rm {path}: the next start makes another")
    token = path.read_text().strip()
    if len(token) < 32:
        hint = f"rm {path}: the next start makes another"
        raise Refused(f"the token in {path}", why=f"{len(token)} characters are too few", hint=hint)
    return token


class _AddressFile(msgspec.Struct):
    """The file that a gateway writes into the run's folder while it serves."""

    url: str
    token_file: str
    models: list[str]


@dataclass(frozen=True)
class Endpoint:
    """Address and key for client packages; calls with this key are not trained on.

    Attributes:
        base_url: for clients of OpenAI's API. api_key: the run's token.
        models: names of the policy.
    """

    base_url: str
    api_key: str = field(repr=False)
    models: tuple[str, ...]

    @property
    def anthropic_url(self) -> str:
        """For clients of Anthropic's API, which add the version to the path."""
        return self.base_url.removesuffix("/v1")


def endpoint(run_dir: Path, slot: str = "gateway/0") -> Endpoint:
    """Return the gateway of a run on this machine.

    Raises:
        RelaxError: none serves there now.
    """
    path = run_dir / f"{slot.replace('/', '-')}.json"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_AddressFile)
        key = Path(found.token_file).read_text().strip()
    except FileNotFoundError as error:
        hint = "a run with [roles.gateway] has one; while it is started again, ask a little later"
        raise RelaxError(f"{slot} of the run in {run_dir}", why=f"there is no {error.filename}", hint=hint) from error
    except (OSError, msgspec.DecodeError) as error:
        raise RelaxError(f"{slot} of the run in {run_dir}", why=f"{path} cannot be read: {error}") from error
    return Endpoint(found.url, key, tuple(found.models))
