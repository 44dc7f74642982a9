"""The rollout: one engine that samples groups of completions for the queue."""
