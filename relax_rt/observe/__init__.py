"""What a run records of itself (events, metrics, logs), and what shows it to people."""
