"""The child's side of a worker process: its framed link to the pool (worker_pool.py)."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

import msgspec

LENGTH = struct.Struct("<I")
MAX_REQUEST_BYTES = 256 << 20


def encode_frame(message: Any, max_bytes: int | None = None, enc_hook: Callable[[Any], Any] | None = None) -> bytes:
    """Encode a message with its length. Raises ValueError: it has more than `max_bytes`."""
    body = msgspec.msgpack.encode(message, enc_hook=enc_hook)
    if max_bytes is not None and len(body) > max_bytes:
        raise ValueError(f"a message of {len(body)} bytes, {max_bytes} at most")
    return LENGTH.pack(len(body)) + body


class WorkerLink:
    """A worker's socket to its pool. Any thread may send; one receives. Both block.

    Args:
        fd: the socket that the pool passed as argument.
        max_bytes: largest message that may be sent.
    """

    def __init__(self, fd: int, max_bytes: int) -> None:
        self._socket, self._max_bytes, self._pid = socket.socket(fileno=fd), max_bytes, os.getpid()
        self._lock = threading.Lock()
        # Programs that user code starts must not hold the link open.
        self._socket.set_inheritable(False)

    def send(self, message: Any) -> None:
        """Send a message. Raises ValueError: it is too large."""
        data = encode_frame(message, self._max_bytes, str)
        if os.getpid() != self._pid:
            # User code forked, and the child returned here beside its parent: two answers would confuse the pool.
            os._exit(0)
        with self._lock:
            self._socket.sendall(data)

    def receive(self) -> bytes | None:
        """Return the next message, encoded; None once the other end is closed or announces more than it may send."""
        head = self._read(LENGTH.size)
        if head is None or (size := LENGTH.unpack(head)[0]) > MAX_REQUEST_BYTES:
            return None
        return self._read(size)

    def _read(self, size: int) -> bytes | None:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(min(size - len(data), 1 << 20))
            except ConnectionError:
                return None
            if not part:
                return None
            data += part
        return bytes(data)
