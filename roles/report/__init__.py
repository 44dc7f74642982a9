"""What remains of a run: its history, summary.json, plots, and the lines printed at the end."""
