"""The registry role: slots, leases, epochs and policy versions of a run."""
