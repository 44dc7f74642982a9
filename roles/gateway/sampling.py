"""What callers may ask of sampling, and what of it cannot be done without changing what is trained on. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from relax_rt.roles.gateway.calls import MOST_CHOICES, Unsupported
from relax_rt.roles.gateway.errors import bad

TRUNCATES = "it changes the distribution that is sampled from, and tokens would have no behaviour log-probability"
CONSTRAINED = "answers are sampled freely, without a grammar: nothing can force it"
NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "top_p": ((None, 1, 1.0), TRUNCATES),
    "top_k": ((None, 0, -1), TRUNCATES),
    "min_p": ((None, 0, 0.0), TRUNCATES),
    "frequency_penalty": ((None, 0, 0.0), TRUNCATES),
    "presence_penalty": ((None, 0, 0.0), TRUNCATES),
    "repetition_penalty": ((None, 1, 1.0), TRUNCATES),
    "logit_bias": ((None, {}), TRUNCATES),
}
"""Options of samplers: the values that leave the distribution as it is, and why others cannot be."""


def unneutral(given: Mapping[str, Any]) -> Iterator[Unsupported]:
    """Options that would change the distribution."""
    for name, (neutral, why) in NEUTRAL.items():
        if given.get(name) not in neutral:
            yield Unsupported(name, why)


def forced_tool(given: Any) -> Iterator[Unsupported]:
    """A choice of tools that would have to be forced upon the model; `auto` and `none` are none."""
    if given not in (None, "auto", "none"):
        yield Unsupported("tool_choice", CONSTRAINED)


def one_call_at_a_time(asked: bool | None, tools: bool) -> Iterator[Unsupported]:
    """That an answer is not to call several tools."""
    if asked is False and tools:
        yield Unsupported("parallel_tool_calls", CONSTRAINED)


def formatted(given: Any, name: str) -> Iterator[Unsupported]:
    """A format of the answer other than text."""
    kind = given.get("type", "text") if isinstance(given, Mapping) else "text"
    if kind != "text":
        yield Unsupported(name, CONSTRAINED)


def choices(n: int | None) -> int:
    """How many answers.

    Raises:
        CallError: none, or too many.
    """
    n = 1 if n is None else n
    if not 1 <= n <= MOST_CHOICES:
        raise bad(f"n = {n}: 1 to {MOST_CHOICES} answers can be had at once", "n")
    return n


def length(given: int | None, name: str) -> int | None:
    """Tokens at most.

    Raises:
        CallError: not even one.
    """
    if given is not None and given < 1:
        raise bad(f"{name} = {given}: at least one token", name)
    return given


def temperature(given: float | None) -> float | None:
    """0 is greedy.

    Raises:
        CallError: it is none.
    """
    if given is not None and not 0 <= given <= 10:
        raise bad(f"temperature = {given}: 0 to 10", "temperature")
    return given


def top_logprobs(given: int | None, name: str = "top_logprobs") -> Iterator[Unsupported]:
    """Log-probabilities of tokens that were not sampled."""
    if given:
        yield Unsupported(name, "the log-probability of the sampled token is kept, no others")
