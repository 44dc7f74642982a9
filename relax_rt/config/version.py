"""The version of this package: nodes that join compare it, and a run directory says which version wrote it."""

VERSION = "0.2.0"
RUN_FORMAT = 2
"""Format of a run directory: of run.json, the event log and the metrics. Grows when a name in them changes."""
