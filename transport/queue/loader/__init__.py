"""Streaming loader for trainers: which rank gets which samples, micro-batches, prefetch."""
