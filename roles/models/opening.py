"""Opening the model that a role computes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relax_rt.config.problems import BadInput
from relax_rt.transport.rpc.errors import Refused


@contextmanager
def refused_for_good() -> Iterator[None]:
    """Around what loads a model: what it refuses of model or settings, the next incarnation would refuse as well.

    Raises:
        BadInput: in place of Refused; it ends the run at once, with the reason.
    """
    try:
        yield
    except Refused as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error
