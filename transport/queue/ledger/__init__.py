"""The ledger of the TransferQueue: a pure state machine over journaled events (no I/O, no clock, no tasks)."""
