"""Checkpoints of a run: what is written, kept, and resumed from."""
