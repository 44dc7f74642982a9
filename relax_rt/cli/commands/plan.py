"""What a run will need, before it starts."""

from __future__ import annotations

from relax_rt.cli.app import BEFORE, DEFAULT_CONFIG, OK, Config, Json, Overrides, app


@app.command(group=BEFORE)
def plan(config: Config = DEFAULT_CONFIG, *, overrides: Overrides = None, json: Json = False) -> int:
    """What a run will need and do, before it starts."""
    from relax_rt.cli.display import show_json, show_plan
    from relax_rt.config.job import load_job
    from relax_rt.config.loader import load_config

    loaded = load_config(config, overrides or ())
    lines = load_job(loaded.run.job).plan(loaded)
    show_json(lines) if json else show_plan(lines)
    return OK
