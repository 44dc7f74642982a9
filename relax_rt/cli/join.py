"""`relax-rt up --join`: this machine as a further node of a run that is up elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from relax_rt.cli.app import duration_of
from relax_rt.transport.rpc.errors import RelaxError

JOINING = Group("As a further node of a run", sort_key=2)


@Parameter(name="*", group=JOINING)
@dataclass(frozen=True)
class Joining:
    """What is given with --join."""

    join: Annotated[str | None, Parameter(help="HOST:PORT where the run's head listens: take part in its run.")] = None
    key: Annotated[
        Path | None, Parameter(help="join.key of the head's run directory; or its text in RELAX_JOIN_KEY.")
    ] = None
    name: Annotated[str, Parameter(help="What this node is called; the host's name if left out.")] = ""
    dir: Annotated[Path | None, Parameter(help="For its logs and events; RUN/nodes/NAME if left out.")] = None
    host: Annotated[str, Parameter(help="Address of this machine for the others; the way to the head tells.")] = ""
    wait: Annotated[
        float, Parameter(converter=duration_of, help="How long to try, as 5m, each time that the head is not there.")
    ] = 120.0


ALONE = Joining()
"""Nothing was given."""


def join(given: Joining) -> int:
    """Take part until the run ends; answers with the exit code.

    Raises:
        BadInput: the address or the key is none.
        RelaxError: the head was not reached, or refuses this node.
    """
    from relax_rt.cli.display import say
    from relax_rt.cluster.join import join as take_part
    from relax_rt.cluster.join import join_request
    from relax_rt.config.problems import BadInput

    try:
        wish = join_request(
            given.join or "", key=given.key, name=given.name, run_dir=given.dir, host=given.host, wait_s=given.wait
        )
    except RelaxError as error:
        raise BadInput(error.what, why=error.why, hint=error.hint) from error
    return take_part(wish, say=say)
