"""The entry point of `relax-rt`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import CycloptsError

from relax_rt.cli.app import BAD_INPUT, FAILED, INTERRUPTED, OK, app
from relax_rt.config.problems import BadInput, ConfigErrors
from relax_rt.transport.rpc.errors import RelaxError

__all__ = ["app", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: one of those in app, or 128 + a signal for `up`."""
    try:
        result = app(argv, exit_on_error=False)
    except CycloptsError:
        return BAD_INPUT
    except ConfigErrors as error:
        print(error.render(), file=sys.stderr)
        return BAD_INPUT
    except RelaxError as error:
        print(f"relax-rt: {error.what}" + (f": {error.why}" if error.why else ""), file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        return BAD_INPUT if isinstance(error, BadInput) else FAILED
    except BrokenPipeError:
        # The reader closed the pipe (`| head`). Without this the interpreter fails again when it flushes at exit.
        sys.stdout = None
        return OK
    except KeyboardInterrupt:
        return INTERRUPTED
    return result if isinstance(result, int) else OK


if __name__ == "__main__":
    sys.exit(main())
