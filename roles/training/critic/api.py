"""What the trainer asks of the critic.

Both are one training: each call names the trainer's incarnation and its step, and a critic that is at another place
refuses it. So a policy is never trained with the values of a critic that lost, or is ahead of, a step of it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from relax_rt.transport.rpc.interface import idempotent

CRITIC_SLOT = "critic/0"


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A sample as the critic sees it: tokens int32 [T], mask uint8 [T], as bytes; and the number of its group.

    branches: tokens [start, end) of each, one behind the other, if there are several: none sees what lies before it.
    """

    group: int
    tokens: bytes
    mask: bytes
    branches: list[tuple[int, int]] = []


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a training is: the trainer's epoch, and the steps it has done."""

    epoch: int
    step: int


class CriticReport(msgspec.Struct, frozen=True):
    """One step of the critic, which has as many updates as the policy's.

    Attributes:
        applied: False when it was thrown away (a loss or gradient that is not finite); of several updates, when all
            were. thrown_away: how many were.
        loss: mean over the trained tokens. grad_norm: before clipping; the mean of the updates that were taken.
        value, returned: mean value before the step, and mean return. clipped: share of tokens whose gradient the
            clip stopped.
        explained: 1 - var(return - value) / var(return), of the values before the step.
    """

    applied: bool
    tokens: int
    loss: float
    grad_norm: float
    value: float
    returned: float
    clipped: float
    explained: float
    thrown_away: int = 0


class CriticApi(Protocol):
    """Every call may be sent twice. In the order of a step: values, returns, learn.

    Raises:
        StaleEpoch: a newer trainer has begun.
        Refused: the critic is not at the caller's place; go back to a checkpoint and `begin`.
    """

    @idempotent
    async def begin(self, at: Place, folder: str) -> None:
        """Start from a checkpoint's folder, or from the model's own weights if it is empty.

        Raises:
            Refused: the folder does not hold the critic's state.
        """

    @idempotent
    async def values(self, at: Place, first: int, pieces: list[Piece]) -> list[bytes]:
        """Values of these samples of the step, of which `first` is the number of the first one; float32 [T] each.

        The value of a token is that of the state before it; tokens under mask 0 have 0.
        """

    @idempotent
    async def returns(self, at: Place, first: int, returns: list[bytes]) -> None:
        """What those values should have been, float32 [T]; empty: the sample is not learnt from."""

    @idempotent
    async def learn(self, at: Place) -> CriticReport:
        """Take the updates of a step on what `values` and `returns` gave; the critic is at the next step then."""

    @idempotent
    async def snapshot(self, at: Place) -> None:
        """Copy the state aside."""

    @idempotent
    async def write(self, at: Place, folder: str) -> None:
        """Write the snapshot of that step into a folder."""
