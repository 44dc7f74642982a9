"""Payloads across nodes: a server of the slabs of a node, and a reader with a cache of its own."""

from relax_rt.transport.memory.payload.cache import CacheStatistics, Fetched
from relax_rt.transport.memory.payload.fetcher import Fetcher, FetcherStatistics
from relax_rt.transport.memory.payload.server import PayloadServer, PayloadServerStatistics

__all__ = [
    "CacheStatistics",
    "Fetched",
    "Fetcher",
    "FetcherStatistics",
    "PayloadServer",
    "PayloadServerStatistics",
]
