"""Errors of the interface. Each is also of the class that users of the interface catch."""

from __future__ import annotations

from relax_rt.transport.rpc.errors import Refused, RelaxError


class NotOffered(RelaxError, NotImplementedError):
    """The interface has this, and it is not offered here."""


class NotReady(RelaxError, RuntimeError):
    """There are not enough samples with the fields that were asked for."""


class SamplerRefused(Refused, RuntimeError):
    """The sampler cannot make such a batch."""


class ParserFailed(RelaxError, RuntimeError):
    """A data_parser changed more than the values."""


class StorageKeyNotFoundError(KeyError):
    """A sample of a batch was cleared."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class NotInitialized(RelaxError, AssertionError):
    """The interface was used before `init`, and no queue is running that this process could join."""
