"""The samplers, as users name them in the configuration. The broker runs them (`store.samplers`)."""

from __future__ import annotations

from typing import Any

from relax_rt.transport.compat.store.api import Sampler
from relax_rt.transport.compat.transfer_queue.errors import NotOffered


class BaseSampler:
    """What the samplers have in common. One's own are not offered: the broker runs no code of its callers."""

    def spec(self) -> Sampler:
        """What the broker is told.

        Raises:
            NotOffered: it is a sampler of the user's own.
        """
        raise NotOffered(
            f"sampler {type(self).__name__}",
            why="samplers of one's own are not offered",
            hint="SequentialSampler, RankAwareSampler, GRPOGroupNSampler and SeqlenBalancedSampler are",
        )


def _positive(name: str, value: int) -> int:
    if value <= 0:
        raise ValueError(f"{name} must be positive, got {value}")
    return value


class SequentialSampler(BaseSampler):
    """The oldest samples first, each once."""

    def spec(self) -> Sampler:
        """What the broker is told."""
        return Sampler("sequential")


class RankAwareSampler(BaseSampler):
    """Each batch of a data-parallel rank is chosen once; all that ask with the same rank and index get the same one."""

    def spec(self) -> Sampler:
        """What the broker is told."""
        return Sampler("ranked")


class GRPOGroupNSampler(BaseSampler):
    """Whole groups of samples that were put one after the other.

    Args:
        n_samples_per_prompt: size of a group.
    """

    def __init__(self, n_samples_per_prompt: int = 1) -> None:
        self.n_samples_per_prompt = _positive("n_samples_per_prompt", n_samples_per_prompt)

    def spec(self) -> Sampler:
        """What the broker is told."""
        return Sampler("groups", self.n_samples_per_prompt)


class SeqlenBalancedSampler(GRPOGroupNSampler):
    """Whole groups, dealt to the data-parallel ranks so that the sums of the tag ``total_lengths`` are alike.

    Args:
        n_samples_per_prompt: size of a group.
        dp_size: number of ranks; a rank asks for its own share only.
    """

    def __init__(self, n_samples_per_prompt: int = 1, dp_size: int = 1) -> None:
        super().__init__(n_samples_per_prompt)
        self.dp_size = _positive("dp_size", dp_size)

    def spec(self) -> Sampler:
        """What the broker is told."""
        return Sampler("balanced", self.n_samples_per_prompt, self.dp_size)


_BY_NAME: dict[str, type[BaseSampler]] = {
    kind.__name__: kind for kind in (SequentialSampler, RankAwareSampler, GRPOGroupNSampler, SeqlenBalancedSampler)
}


def spec_of(sampler: Any) -> Sampler:
    """What the broker is told of a sampler, its class, or its name.

    Raises:
        ValueError: there is no sampler of this name.
        TypeError: it is neither of these.
        NotOffered: it is a sampler of the user's own.
    """
    if isinstance(sampler, str):
        if sampler not in _BY_NAME:
            raise ValueError(f"Could not find sampler {sampler}")
        sampler = _BY_NAME[sampler]
    if isinstance(sampler, type) and issubclass(sampler, BaseSampler):
        sampler = sampler()
    if not isinstance(sampler, BaseSampler):
        raise TypeError(f"sampler {sampler!r} is neither a sampler nor the class or name of one")
    if type(sampler) not in _BY_NAME.values():
        return BaseSampler.spec(sampler)
    return sampler.spec()
