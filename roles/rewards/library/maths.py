"""Mathematical answers, compared by value: math-verify."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.rewards.registry import reward

LONGEST = 20_000
"""Characters of a completion that are read, from its end: that is where the answer stands."""


class MathOptions(Table):
    """1 if the completion's final answer equals the right one as mathematics: fractions, sets, intervals, matrices,
    equations, LaTeX or plain."""

    digits: Annotated[int, Field(ge=1, le=15)] = 6
    """Decimal places to which numbers are compared."""
    strict: bool = True
    """Variables have names: x = 1 is not y = 1, and (1, 2) is no set."""
    boxed: bool = False
    """Read \\boxed{} alone: an answer that is not in a box is none."""


def _installed(options: MathOptions) -> list[tuple[str, str, str]]:
    if find_spec("math_verify") is None:
        return [("name", "math-verify is not installed", "pip install relax-rt[agentic]")]
    return []


# sympy may take for ever. math-verify's own timeouts are alarms: ours end the process, and need none.
@reward("math", options=MathOptions, place="worker", check=_installed)
def _math(options: MathOptions) -> Callable[..., Any]:
    import logging

    import math_verify

    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    latex, plain = math_verify.LatexExtractionConfig(boxed_match_priority=0), math_verify.ExprExtractionConfig()
    wanted = [latex] if options.boxed else [latex, plain]

    def read(text: str, configs: list[Any]) -> Any:
        return math_verify.parse(text, configs, parsing_timeout=None, raise_on_error=False)

    def math(completion: str, answer: str) -> float:
        if options.boxed and "\\boxed" not in completion:
            return 0.0
        said = read(completion[-LONGEST:], wanted)
        right = read(answer, [latex, plain]) or read(f"${answer}$", [latex, plain])
        if not right:
            raise ValueError(f"math-verify can read no value in the answer {answer!r:.80}")
        return float(
            math_verify.verify(
                right,
                said,
                float_rounding=options.digits,
                strict=options.strict,
                timeout_seconds=None,
                raise_on_error=False,
            )
        )

    return math
