"""Checks what parts return: a user's own may return anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.training.algorithms.inputs import AdvantageInputs
from relax_rt.roles.training.algorithms.registry import Bound, described
from relax_rt.roles.training.algorithms.tensors import Metrics, TokenTensors

if TYPE_CHECKING:
    import torch


def arrays(part: Bound, values: Any, inputs: AdvantageInputs, *, extra: str = "") -> list[NDArray[np.float32]]:
    """An array [T] for each trajectory, in float32.

    Args:
        extra: the further function of the part that returned them.

    Raises:
        OwnPartFailed: the part is a user's own, and they are something else. Refused: another part's are.
    """
    wanted = f"{part.who(extra)} returns an array [T] for each of the {len(inputs.trajectories)} trajectories"
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise part.wrong(f"it returned {described([values])}: {wanted}", inputs, extra=extra)
    if len(values) != len(inputs.trajectories):
        why = f"it returned {len(values)} arrays for {len(inputs.trajectories)} trajectories: {wanted}"
        raise part.wrong(why, inputs, extra=extra)
    return [array(part, found, one.mask, extra=extra) for found, one in zip(values, inputs.trajectories, strict=True)]


def array(
    part: Bound, value: Any, like: NDArray[Any], *, extra: str = "", dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """An array of the shape of `like`; for what is raised see `arrays`."""
    try:
        found = np.asarray(value, dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        why = f"it returned {described([value])}, which is no array of numbers: {error}"
        raise part.wrong(why, like, extra=extra) from error
    if found.shape != like.shape:
        why = f"it returned shape {found.shape} for a sample of {len(like)} tokens"
        raise part.wrong(why, like, extra=extra)
    return found


def with_metrics(part: Bound, returned: Any, tokens: TokenTensors) -> tuple[torch.Tensor, Metrics]:
    """A tensor [m] and metrics, of a loss or a correction; for what is raised see `arrays`."""
    if not part.target:
        each, found = returned
        return each, found
    a = "loss" if part.part.kind == "loss" else "weight"
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 2:
        why = (
            f"it returned {described([returned])}: a {part.part.kind} returns ({a} [m], metrics), and m is {_m(tokens)}"
        )
        raise part.wrong(why, tokens)
    each, metrics = returned
    if not isinstance(metrics, Mapping):
        why = f"its metrics are {described([metrics])}: they are a table of sums over tokens, or {{}}"
        raise part.wrong(why, tokens)
    told: Metrics = {}
    for name, value in metrics.items():
        try:
            told[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            why = f"its metric {name!r} is {described([value])}, and no number, as a sum over tokens is: {error}"
            raise part.wrong(why, tokens) from error
    return flat(part, each, tokens), told


def flat(part: Bound, value: Any, tokens: TokenTensors, *, extra: str = "") -> torch.Tensor:
    """A tensor [m]; for what is raised see `arrays`."""
    import torch

    if part.target and not (isinstance(value, torch.Tensor) and value.shape == tokens.mask.shape):
        why = f"it returned {described([value])}: a {part.part.kind} is of each token, a tensor [{_m(tokens)}]"
        raise part.wrong(why, tokens, extra=extra)
    found: torch.Tensor = value
    return found


def number(part: Bound, value: Any, *given: Any, extra: str = "") -> float:
    """A number; for what is raised see `arrays`."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise part.wrong(f"it returned {described([value])}, and no number: {error}", *given, extra=extra) from error


def two_numbers(part: Bound, value: Any, *given: Any) -> tuple[float, float]:
    """The coefficient that counts and the one that is carried on; for what is raised see `arrays`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise part.wrong(f"it returned {described([value])}: it returns (coefficient, its next argument)", *given)
    return number(part, value[0], *given), number(part, value[1], *given)


def _m(tokens: TokenTensors) -> int:
    return len(tokens.mask)
