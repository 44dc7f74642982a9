"""How much dynamic sampling may cost: the table [algorithm.refill]."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_rt.config.schema import Table


class RefillOptions(Table):
    """How many groups a step may cost, with `filters`."""

    over_sample: Annotated[float, Field(ge=1, le=16)] = 1.0
    """Groups under way at once, by those still lacking; beside what the share of groups left out so far calls for."""
    most: Annotated[float, Field(ge=1, le=64)] = 10.0
    """A step is taken with what there is after this many times its groups were scored."""
    memory: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Weight of the past in the running share of groups that are kept."""
