"""A key-value store with its own ledger, journal and broker: partitions of rows, put, listed and read by key."""
