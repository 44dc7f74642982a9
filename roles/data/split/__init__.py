"""The held-out split of questions, which the tiny model's warm start respects too. Below the other modules of data."""
