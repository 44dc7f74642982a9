"""Checks what parts return: a user's own may return anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.training.algorithms.inputs import AdvantageInputs
from relax_rt.roles.training.algorithms.registry import BoundPart, describe
from relax_rt.roles.training.algorithms.tensors import Metrics, TokenTensors

if TYPE_CHECKING:
    import torch


def check_arrays(
    part: BoundPart, values: Any, inputs: AdvantageInputs, *, extra: str = ""
) -> list[NDArray[np.float32]]:
    """An array [T] for each trajectory, in float32.

    Args:
        extra: the further function of the part that returned them.

    Raises:
        UserPartFailed: the part is a user's own, and they are something else. Refused: another part's are.
    """
    wanted = f"{part.who(extra)} returns an array [T] for each of the {len(inputs.trajectories)} trajectories"
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise part.wrong(f"it returned {describe([values])}: {wanted}", inputs, extra=extra)
    if len(values) != len(inputs.trajectories):
        why = f"it returned {len(values)} arrays for {len(inputs.trajectories)} trajectories: {wanted}"
        raise part.wrong(why, inputs, extra=extra)
    return [
        check_array(part, found, one.mask, extra=extra) for found, one in zip(values, inputs.trajectories, strict=True)
    ]


def check_array(
    part: BoundPart, value: Any, like: NDArray[Any], *, extra: str = "", dtype: type[np.floating[Any]] = np.float32
) -> NDArray[Any]:
    """An array of the shape of `like`; for what is raised see `check_arrays`."""
    try:
        found = np.asarray(value, dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        why = f"it returned {describe([value])}, which is no array of numbers: {error}"
        raise part.wrong(why, like, extra=extra) from error
    if found.shape != like.shape:
        why = f"it returned shape {found.shape} for a sample of {len(like)} tokens"
        raise part.wrong(why, like, extra=extra)
    return found


def check_metrics(part: BoundPart, returned: Any, tokens: TokenTensors) -> tuple[torch.Tensor, Metrics]:
    """A tensor [m] and metrics, of a loss or a correction; for what is raised see `check_arrays`."""
    if not part.target:
        each, found = returned
        return each, found
    a = "loss" if part.part.kind == "loss" else "weight"
    if not isinstance(returned, Sequence) or isinstance(returned, str) or len(returned) != 2:
        why = (
            f"it returned {describe([returned])}: a {part.part.kind} returns ({a} [m], metrics), and m is {_m(tokens)}"
        )
        raise part.wrong(why, tokens)
    each, metrics = returned
    if not isinstance(metrics, Mapping):
        why = f"its metrics are {describe([metrics])}: they are a table of sums over tokens, or {{}}"
        raise part.wrong(why, tokens)
    told: Metrics = {}
    for name, value in metrics.items():
        try:
            told[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            why = f"its metric {name!r} is {describe([value])}, and no number, as a sum over tokens is: {error}"
            raise part.wrong(why, tokens) from error
    return check_tensor(part, each, tokens), told


def check_tensor(part: BoundPart, value: Any, tokens: TokenTensors, *, extra: str = "") -> torch.Tensor:
    """A tensor [m]; for what is raised see `check_arrays`."""
    import torch

    if part.target and not (isinstance(value, torch.Tensor) and value.shape == tokens.mask.shape):
        why = f"it returned {describe([value])}: a {part.part.kind} is of each token, a tensor [{_m(tokens)}]"
        raise part.wrong(why, tokens, extra=extra)
    found: torch.Tensor = value
    return found


def check_number(part: BoundPart, value: Any, *given: Any, extra: str = "") -> float:
    """A number; for what is raised see `check_arrays`."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise part.wrong(f"it returned {describe([value])}, and no number: {error}", *given, extra=extra) from error


def check_pair(part: BoundPart, value: Any, *given: Any) -> tuple[float, float]:
    """The coefficient that counts and the one that is carried on; for what is raised see `check_arrays`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise part.wrong(f"it returned {describe([value])}: it returns (coefficient, its next argument)", *given)
    return check_number(part, value[0], *given), check_number(part, value[1], *given)


def _m(tokens: TokenTensors) -> int:
    return len(tokens.mask)
