"""Held-out evaluation: the evaluator role, its sets, sampling and scores."""
