"""Child processes: start, watch, log, limit and fork them; sandboxes and worker pools. Knows no role and supervisor."""
