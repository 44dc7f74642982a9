"""Training: the trainer role and its backends, the critic, the reference, the cold start, and publication."""
