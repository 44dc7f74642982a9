"""The tables of the torch backend."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from relax_rt.config.schema import Table


class LoraTable(Table):
    """Adapters (LoRA, Hu et al. 2021, arXiv 2106.09685) that are trained in place of the model's own weights."""

    rank: Annotated[int, Field(ge=1, le=4096)] = 16
    """Columns of B and rows of A in W + (alpha / rank) B A."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product counts alpha / rank times."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Ends of the names of linear layers, as ["q_proj", "v_proj"]; all-linear: every one but the output layer."""
