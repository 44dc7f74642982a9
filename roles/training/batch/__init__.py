"""Micro-batches of every backend, the critic and the reference: rows, packing, collation, budget, log-probabilities."""
