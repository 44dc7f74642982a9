"""Writes a run's trace to a file."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from relax_rt.observe.events import read_events
from relax_rt.observe.metrics import read_metrics
from relax_rt.observe.trace import Trace
from relax_rt.supervision.rundir import read_run
from relax_rt.transport.rpc.errors import RelaxError


def write_trace(run_dir: Path, path: Path) -> int:
    """Write the trace; answers with the number of its records. The file is whole or absent.

    Raises:
        RelaxError: there are no events, or the file cannot be written.
    """
    first = next((t for event in read_events(run_dir) if isinstance(t := event.get("t"), int | float)), None)
    if first is None:
        raise RelaxError(f"no event in {run_dir / 'events'}", hint="a run that has not begun leaves no trace")
    record = read_run(run_dir) or {}
    about = {"run": record.get("name", ""), "run_id": record.get("run_id", ""), "began": first}
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    encode = msgspec.json.Encoder(enc_hook=str).encode
    count = 0
    try:
        with fresh.open("wb") as file:
            file.write(b'{"displayTimeUnit":"ms","otherData":' + encode(about) + b',"traceEvents":[')
            for made in Trace(float(first)).records(read_events(run_dir), read_metrics(run_dir)):
                file.write((b",\n" if count else b"\n") + encode(made))
                count += 1
            file.write(b"\n]}\n")
        fresh.replace(path)
    except OSError as error:
        raise RelaxError(f"{path} cannot be written", why=error.strerror or str(error)) from error
    finally:
        fresh.unlink(missing_ok=True)
    return count
