"""The RL job: the tables of roles.toml put together, and the checks before anything starts."""
