"""The reference: log-probabilities of a frozen model, put on samples as a column."""
