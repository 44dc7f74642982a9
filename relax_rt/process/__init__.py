"""Child processes: sandboxes for untrusted programs, and worker processes that run user code."""
