"""A cold start: supervised or preference training in the same trainer, before the first RL step."""
