"""Shared memory: slabs, blocks of columns, and payloads that cross nodes."""
