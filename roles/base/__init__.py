"""What all RL roles have in common: samples and their columns, leases of a task, reports of lost work."""
