"""Leaves an event loop open when it is imported: seen only once all is imported."""

import asyncio

LOOP = asyncio.new_event_loop()
