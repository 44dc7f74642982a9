"""The RL job: its interface to the runtime, slow checks before a start, samples and debugging without a run."""
