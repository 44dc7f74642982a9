"""How large a formula's numbers are, estimated on its parse tree: what is too large is refused before it is computed.

sympy evaluates numbers when expressions are compared, binomials and limits of intervals even while they are read.
9^{9^{9^9}} takes all memory in one call of C that no alarm interrupts.
"""

from __future__ import annotations

import math
from typing import Any

MOST_DIGITS = 10_000.0
"""Decimal digits of an integer that is computed: 2^{2024} has 610, 2024! has 5820."""
MOST_EXPONENT_DIGITS = 6.0
OPERATIONS = frozenset(
    {"gcd", "lcm", "arsinh", "arcosh", "artanh", "arcsinh", "arccosh", "arctanh", "floor", "ceil", "max", "min"}
)
"""Names in \\operatorname that may be evaluated. Others build matrices of a given size, or decompose them."""


class TooLarge(Exception):
    """A number has more digits than MOST_DIGITS, or an operation has no bound."""


def check_size(node: Any) -> float:
    """An upper estimate of log10 of the value of a parse tree of latex2sympy; 0 for symbols.

    Products and sequences add their estimates, sums take the largest. Denominators count as 1.

    Raises:
        TooLarge: an integer in it would have more than MOST_DIGITS digits.
    """
    children = list(node.getChildren()) if hasattr(node, "getChildren") else []
    if not children:
        return _of_token(node.getText())
    kind = type(node).__name__.removesuffix("Context")
    if kind in ("Func_operator_names_single_arg", "Func_operator_names_multi_arg") and node.getText() not in OPERATIONS:
        raise TooLarge(f"\\operatorname{{{node.getText()}}} is not computed")
    sizes = [check_size(child) for child in children]
    size = sum(sizes)
    text = [child.getText() for child in children]
    if kind in ("Exp", "Exp_nofunc") and "^" in text:
        size = _power(sizes[0], sum(sizes[1:]))
    elif kind in ("Atom_expr", "Atom_expr_no_supexpr"):
        raised = node.supexpr() if hasattr(node, "supexpr") else None
        size = _power(sizes[0], check_size(raised)) if raised is not None else sizes[0]
    elif kind in ("Postfix", "Postfix_nofunc") and "!" in "".join(text[1:]):
        size = _factorial(sizes[0])
    elif kind == "Binom":
        size = _power(math.log10(2), max(sizes))
    elif kind == "Frac":
        size = max(sizes) if "." in node.lower.getText() else check_size(node.upper)
    elif kind in ("Additive", "Comma_elements", "Semicolon_elements", "Matrix", "Matrix_row"):
        size = max(sizes) + (math.log10(2) if kind == "Additive" and len(sizes) > 1 else 0.0)
    elif kind == "Func":
        size = _function(node, sizes, text)
    return _bounded(size)


def _of_token(text: str) -> float:
    digits = text.replace(",", "").replace(" ", "").strip("\\%")
    if digits.replace(".", "", 1).isdecimal() and digits.isascii():
        whole, _, part = digits.partition(".")
        # Of 0.001 the estimate is that of its inverse, which it stands for below a fraction line.
        return _bounded(math.log10(max(2.0, float(whole or 0))) if float(whole or 0) >= 1 else float(len(part)))
    return {"e": math.log10(math.e), "\\pi": math.log10(math.pi)}.get(text.strip(), 0.0)


def _function(node: Any, sizes: list[float], text: list[str]) -> float:
    name = text[0].strip()
    if node.EXP_E() is not None or name == "\\exp":
        return _power(math.log10(math.e), sum(sizes[1:]))
    if name in ("\\Gamma", "\\gamma"):
        return _factorial(sum(sizes[1:]))
    if node.FUNC_PROD() is not None or node.FUNC_SUM() is not None:
        times = check_size(node.supexpr()) if node.supexpr() is not None else 0.0
        body = check_size(node.mp()) if node.mp() is not None else 0.0
        if node.FUNC_SUM() is not None:
            return max(times, 0.0) + body
        return _power(max(body, times, math.log10(2)), times) if times else body
    if node.supexpr() is not None:
        return _power(sum(sizes), check_size(node.supexpr()))
    return sum(sizes)


def _power(base: float, exponent: float) -> float:
    """The estimate of a power. Powers of symbols are not computed, and exponents without numbers neither."""
    if base <= 0:
        return 0.0
    if exponent > MOST_EXPONENT_DIGITS:
        raise TooLarge(f"an exponent has more than {MOST_EXPONENT_DIGITS:g} digits")
    return _bounded(base * 10**exponent if exponent > 0 else base)


def _factorial(of: float) -> float:
    if of > MOST_EXPONENT_DIGITS:
        raise TooLarge(f"a factorial of a number with more than {MOST_EXPONENT_DIGITS:g} digits")
    return _bounded(10**of * max(of, 0.3)) if of > 0 else 0.0


def _bounded(size: float) -> float:
    if size > MOST_DIGITS:
        raise TooLarge(f"a number has more than {MOST_DIGITS:g} digits")
    return size
