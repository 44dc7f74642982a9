"""Access to a gateway: the run token, the keys of sessions, and where a run's gateway listens."""

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
"""Characters of a key; longer ones are not looked at."""


class Caller(msgspec.Struct, frozen=True):
    """Who has shown a key: of one session, and which of that name, or of the run as a whole (`session` is empty)."""

    session: str = ""
    nonce: str = ""


class Keys:
    """Makes and checks keys. A session's key is its name, its nonce, and a code of both under the run's token
    (HMAC-SHA256, RFC 2104): a gateway that was started again knows its keys, and nothing is looked up before a key has
    been checked."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    def of_session(self, name: str, nonce: str = "") -> str:
        """The key of a session."""
        encoded = base64.urlsafe_b64encode(name.encode()).decode().rstrip("=")
        return f"{PREFIX}{encoded}.{nonce}.{self._code(name, nonce)}"

    def check(self, key: str) -> Caller | None:
        """Whose key it is; None: nobody's. It takes as long for a key that is nearly right as for any other."""
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
        # No nonce has a line end.
        return hmac.new(self._token, f"{nonce}\n{name}".encode(), hashlib.sha256).hexdigest()


def run_token(run_dir: Path) -> str:
    """The run's token, made by whoever asks first; its file can be read by the run's user alone.

    Raises:
        Refused: the file is there and can be read by others, or holds no token.
    """
    path = run_dir / FILE
    made = secrets.token_urlsafe(32)
    # Written whole before it has its name: who finds it finds all of it.
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


class _Told(msgspec.Struct):
    """What a gateway writes into the run's folder while it serves."""

    url: str
    token_file: str
    models: list[str]


@dataclass(frozen=True)
class Endpoint:
    """What the client packages need; calls with this key are answered, and not trained on.

    Attributes:
        base_url: for clients of OpenAI's API. api_key: the run's token.
        models: names that the policy is called by.
    """

    base_url: str
    api_key: str = field(repr=False)
    models: tuple[str, ...]

    @property
    def anthropic_url(self) -> str:
        """For clients of Anthropic's API, which put the version into the path themselves."""
        return self.base_url.removesuffix("/v1")


def endpoint(run_dir: Path, slot: str = "gateway/0") -> Endpoint:
    """The gateway of a run on this machine.

    Raises:
        RelaxError: none serves there now.
    """
    path = run_dir / f"{slot.replace('/', '-')}.json"
    try:
        told = msgspec.json.decode(path.read_bytes(), type=_Told)
        key = Path(told.token_file).read_text().strip()
    except FileNotFoundError as error:
        hint = "a run with [roles.gateway] has one; while it is started again, ask a little later"
        raise RelaxError(f"{slot} of the run in {run_dir}", why=f"there is no {error.filename}", hint=hint) from error
    except (OSError, msgspec.DecodeError) as error:
        raise RelaxError(f"{slot} of the run in {run_dir}", why=f"{path} cannot be read: {error}") from error
    return Endpoint(told.url, key, tuple(told.models))
