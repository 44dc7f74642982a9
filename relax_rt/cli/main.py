"""The entry point of `relax-rt`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import CycloptsError

from relax_rt.cli import before, chaos, look, run, steer
from relax_rt.cli.app import BAD_INPUT, FAILED, INTERRUPTED, OK, app
from relax_rt.config.problems import BadInput, ConfigErrors
from relax_rt.supervision.control import NoRun
from relax_rt.transport.rpc.errors import RelaxError

__all__ = ["app", "main"]
COMMANDS = (before, run, look, steer, chaos)
"""Modules that register their commands on import."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        0 done, 1 the run failed or does not answer, 2 the input is wrong; `up` also 130 and the like, for signals.
    """
    try:
        found = app(argv, exit_on_error=False)
    except CycloptsError:
        return BAD_INPUT
    except RelaxError as error:
        return _explain(error)
    except BrokenPipeError:
        # The reader has seen enough (`| head`); what is still buffered has nowhere to go.
        sys.stdout = None
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    return found if isinstance(found, int) else OK


def _explain(error: RelaxError) -> int:
    if isinstance(error, ConfigErrors):
        print(error.render(), file=sys.stderr)
        return BAD_INPUT
    print(f"relax-rt: {error.what}" + (f": {error.why}" if error.why else ""), file=sys.stderr)
    if error.hint:
        print(f"  {error.hint}", file=sys.stderr)
    return BAD_INPUT if isinstance(error, NoRun | BadInput) else FAILED


if __name__ == "__main__":
    sys.exit(main())
