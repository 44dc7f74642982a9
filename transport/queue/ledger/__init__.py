"""The ledger of the TransferQueue: a pure state machine over journaled events (no I/O, no clock, no tasks)."""

from relax_rt.transport.queue.ledger.events import Entry
from relax_rt.transport.queue.ledger.machine import Ledger, Outcome
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits, SamplerSpec

__all__ = ["Entry", "Ledger", "LedgerPolicy", "Outcome", "QueueLimits", "SamplerSpec"]
