"""roles.toml: its tables, how it is read and checked, and what a job adds to it. No imports: the keeper loads this."""

RESOLVED_CONFIG = "config.json"
"""File in the run directory with the resolved config, see loader.write_resolved."""
