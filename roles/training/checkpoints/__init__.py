"""Checkpoint folders: writing, digests, resuming, optimizer state, and those of the cold start."""
