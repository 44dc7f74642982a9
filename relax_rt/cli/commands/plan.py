"""What a run will need, before it starts: on this machine, or on machines that need not be here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from relax_rt.cli.app import BAD_INPUT, BEFORE, DEFAULT_CONFIG, OK, Config, Json, Overrides, app


@app.command(group=BEFORE)
def plan(
    config: Config = DEFAULT_CONFIG,
    *,
    inventory: Annotated[
        Path | None, Parameter(help="A nodes.toml: plan for these machines instead of this one; none need be here.")
    ] = None,
    overrides: Overrides = None,
    json: Json = False,
) -> int:
    """What a run will need and do, before it starts: on this machine, or on the machines of an inventory."""
    from relax_rt.cli.display import show_json, show_plan
    from relax_rt.config.job import load_job
    from relax_rt.config.loader import load_config
    from relax_rt.config.problems import ConfigErrors

    try:
        if inventory is not None:
            return _on_inventory(config, overrides or (), inventory, as_json=json)
        loaded = load_config(config, overrides or (), inputs=True)
    except ConfigErrors as error:
        if not json:
            raise
        show_json({"ok": False, "problems": error.problems})
        return BAD_INPUT
    lines = load_job(loaded.run.job).plan(loaded)
    show_json(lines) if json else show_plan(lines)
    return OK


def _on_inventory(config: Path, overrides: Sequence[str], path: Path, *, as_json: bool) -> int:
    """Print the plan for an inventory's machines; loading tells every reason why the run does not fit on them."""
    from relax_rt.cli.display import say, show_json
    from relax_rt.config.inventory import load_inventory
    from relax_rt.config.job import Planner, load_job
    from relax_rt.config.loader import load_config
    from relax_rt.config.problems import BadInput

    nodes = load_inventory(path)
    loaded = load_config(config, overrides, inventory=nodes)
    job = load_job(loaded.run.job)
    if not isinstance(job, Planner):
        raise BadInput(f"job '{loaded.run.job}' does not plan for an inventory", hint="plan without --inventory")
    found = job.plan_on(loaded, nodes)
    assert not isinstance(found, list), "a config that was loaded for an inventory fits on it"
    show_json(found) if as_json else say(found.render())
    return OK
