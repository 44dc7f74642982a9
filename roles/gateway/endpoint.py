"""Where a run's gateway listens and what it takes for a key, for programs beside the run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from relax_rt.transport.rpc.errors import RelaxError


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
