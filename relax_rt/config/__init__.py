"""roles.toml: its tables, how it is read and checked, and what a job adds to it."""
