"""A keyed store beside the ledger: partitions of rows that are put, listed, read and cleared by key, and sampled."""
