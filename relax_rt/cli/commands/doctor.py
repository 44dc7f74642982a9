"""Whether this machine will do."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import BEFORE, DEFAULT_CONFIG, FAILED, OK, Json, Overrides, app


@app.command(group=BEFORE)
def doctor(
    config: Annotated[
        Path | None, Parameter(help="A roles.toml: also check that its run fits; ./roles.toml if it is there.")
    ] = None,
    *,
    overrides: Overrides = None,
    json: Json = False,
) -> int:
    """Check this machine, and that a run fits on it: each line ok, warn or fail, with what to do. 1 if any failed."""
    from relax_rt.cli.display import show_findings, show_json
    from relax_rt.cli.doctor.fit import check_fit
    from relax_rt.cli.doctor.machine import check_limits, check_machine
    from relax_rt.cli.doctor.software import check_gpus, check_sandboxes, check_software
    from relax_rt.config.loader import load_config

    if config is None and DEFAULT_CONFIG.is_file():
        config = DEFAULT_CONFIG
    loaded = load_config(config, overrides or (), inputs=True) if config is not None else None
    of_gpus, gpus = check_gpus()
    findings = [*check_machine(), *check_limits(), *of_gpus, *check_software(gpus)]
    findings += check_sandboxes(loaded)
    if loaded is not None:
        findings += check_fit(loaded, gpus)
    show_json(findings) if json else show_findings(findings)
    return FAILED if any(finding.level == "fail" for finding in findings) else OK
