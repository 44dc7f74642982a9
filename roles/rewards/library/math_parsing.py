"""Parse a mathematical answer as a whole, LaTeX or plain, with its unit; partial parses are refused.

The grammar is latex2sympy's, which math-verify uses. It refuses what it cannot parse, but misreads some notations or
drops a part of them: those are rewritten or refused here.
"""

from __future__ import annotations

import math
import re
import unicodedata
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, lru_cache
from typing import Any

from relax_rt.roles.rewards.library.final_answer import MATH, boxed, closing_brace, listed

LONGEST = 1000
"""Characters of one answer."""
DEEPEST, DEEPEST_PARENTHESES = 24, 8
"""Levels of braces, and of parentheses and brackets: the time to parse those doubles with each."""
MAX_CELLS = 100
MAX_LITERAL_DIGITS = 1000


MAX_DIGITS = 10_000.0
"""Decimal digits of an integer that is computed: 2^{2024} has 610, 2024! has 5820."""
MAX_EXPONENT_DIGITS = 6.0
OPERATIONS = frozenset(
    {"gcd", "lcm", "arsinh", "arcosh", "artanh", "arcsinh", "arccosh", "arctanh", "floor", "ceil", "max", "min"}
)
"""Names in \\operatorname that may be evaluated. Others build matrices of a given size, or decompose them."""


class TooLarge(Exception):
    """A number has more digits than MAX_DIGITS, or an operation has no bound."""


class ParseFailed(ValueError):
    """An answer, or the part of it that the message names, cannot be parsed."""


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer that was read whole.

    Attributes:
        writing: its canonical writing; equal writings are equal answers.
        value: as math-verify compares it; None: a text, or a number that is too large to compute: the writing decides.
        parts: of a ratio or a time of day, as 3:15; empty for anything else.
        unit: canonical; "%" and "degree" have a meaning, others are compared. Empty: none.
        count: number of members of a list; 1 for anything else.
        text: whether it is text. timelike: whether its parts may be hours and minutes.
        decimal: whether it has decimals, so that it may be rounded.
    """

    writing: str
    value: Any = None
    parts: tuple[Any, ...] = ()
    unit: str = ""
    count: int = 1
    text: bool = False
    timelike: bool = False
    decimal: bool = False


CHARACTERS = {
    "−": "-", "–": "-", "﹣": "-", "－": "-", "×": "\\times ", "⋅": "\\cdot ", "·": "\\cdot ", "∙": "\\cdot ",
    "÷": "\\div ",
    "π": "\\pi ", "∞": "\\infty ", "∪": "\\cup ", "∩": "\\cap ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\neq ",
    "≈": "\\approx ",
    "±": "\\pm ", "∓": "\\mp ", "°": "^{\\circ}", "º": "^{\\circ}", "∈": "\\in ", "∅": "\\emptyset ",
    "ℝ": "\\mathbb{R}",
    "ℤ": "\\mathbb{Z}", "ℕ": "\\mathbb{N}", "ℚ": "\\mathbb{Q}", "ℂ": "\\mathbb{C}", "…": "\\ldots ", "′": "'", "’": "'",
    "α": "\\alpha ", "β": "\\beta ", "γ": "\\gamma ", "θ": "\\theta ", "λ": "\\lambda ", "μ": "\\mu ", "φ": "\\phi ",
    "ω": "\\omega ", "σ": "\\sigma ", "δ": "\\delta ", "ε": "\\epsilon ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    "％": "%", "∶": ":", "：": ":", "，": ",", "（": "(", "）": ")", "＝": "=", "＋": "+", "。": ".",
}  # fmt: skip
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
NUMBER = r"\d+(?:\.\d+)?"
PLAIN_NUMBER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d+)?(\.\d+)?")
FRACTION = re.compile(r"([+-]?)\s*(?:\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+)\s*/\s*(\d+))")
WRAPPED = re.compile(
    r"\\(?:text|mathrm|mathbf|textbf|mathit|textit|textrm|mathsf|textsf|mbox|hbox|operatorname|bf|rm)\s*\*?\{"
)
SPACES = re.compile(
    r"\\[,;:!> ]|~|\\(?:q?quad|displaystyle|textstyle|limits|nolimits)(?![a-zA-Z])"
    r"|\\(?:hspace|hskip|phantom)\{[^{}]*\}"
)
FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "log", "ln", "exp")
) | {"sqrt", "max", "min", "gcd", "lcm", "det"}
JOINING = frozenset({"or", "and", "in"})
PRODUCTS = re.compile(r"(?=[abcdkmnpqrstuvwxyz]{3,4}$)a?b?c?d?k?m?n?p?q?r?s?t?u?v?w?x?y?z?")
"""Letters that are a product of variables, as abc or xyz, not a word."""
WORD = re.compile(r"(?<![a-zA-Z\\])[a-zA-Z]{2,}")
TEXT = re.compile(r"\(?[^\W\d_](?:[^\W\d_]|[\s,.'’/&()-])*[.!]?")
UNREAD = re.compile(
    r"\\[lc]?dots|\.\.\.|!!|\\mid|\\colon|\\begin\{(?!.?matrix|array)|\\(?:sum|prod|int|lim)\b.*\\[lc]?dots"
)
"""Notations with an open end (dots), or that the grammar misreads."""


def gold_text(answer: Any) -> str:
    """The answer itself where the data gives a whole solution: behind the last ####, or in the last box.

    Raises:
        NotRead: it is empty.
    """
    text = listed(answer)
    if "####" in text:
        text = text.rpartition("####")[2]
    if (inside := boxed(text)) is not None:
        text = inside
    if not text.strip():
        raise ParseFailed("the answer is empty")
    return text


@lru_cache(maxsize=512)
def read(text: str) -> ParsedAnswer:
    """Read an answer.

    Raises:
        NotRead: it is not understood as a whole.
    """
    if len(text) > LONGEST:
        raise ParseFailed(f"it has {len(text)} characters; at most {LONGEST} are read")
    text = _opened(_characters(text))
    if not text:
        raise ParseFailed("it is empty")
    if (number := _plain(text)) is not None:
        return ParsedAnswer(str(number), _rational(number), decimal="." in text)
    if (words := _words(text)) is not None:
        return ParsedAnswer(words, text=True)
    if (based := re.fullmatch(r"\(?([0-9A-Fa-f]+)\)?_(?:\{\s*(\d+)\s*\}|(\d))", text)) is not None:
        return ParsedAnswer(f"{based[1].lower()} base {based[2] or based[3]}")
    value, unit = _split_unit(text)
    found = _read_value(value)
    if not unit:
        return found
    return replace(found, writing=f"{found.writing} {unit}", unit=unit)


def _characters(text: str) -> str:
    """Characters that have a spelling in LaTeX, in it; full-width ones in ASCII."""
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda m: f"^{{{m[0].translate(SUPERSCRIPTS)}}}", text)
    text = re.sub("[₀₁₂₃₄₅₆₇₈₉]+", lambda m: f"_{{{m[0].translate(SUBSCRIPTS)}}}", text)
    text = re.sub("√\\s*(\\d+|[a-z]|\\([^()]*\\)|\\{[^{}]*\\})", lambda m: f"\\sqrt{{{m[1].strip('(){}')}}}", text)
    text = re.sub("(\\d)\\s*([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", r"\1 \2", text)
    out = []
    for character in text:
        if character in CHARACTERS:
            out.append(CHARACTERS[character])
        elif unicodedata.decomposition(character).startswith("<fraction>"):
            number = Fraction(unicodedata.numeric(character)).limit_denominator(100)
            out.append(f"\\frac{{{number.numerator}}}{{{number.denominator}}}")
        elif ord(character) < 128:
            out.append(character)
        else:
            out.append(unicodedata.normalize("NFKC", character))
    return "".join(out)


def _opened(text: str) -> str:
    """Without dollars, boxes and emphasis around it or in it, white space and a full stop at its end."""
    while True:
        before = text
        text = text.strip().strip("*").strip()
        text = re.sub(r"(?<!\\)\s*[.,;:]$", "", text) if not text.endswith("...") else text
        text = re.sub(r"\\\\$|\\$", "", text).strip()
        formula = MATH.fullmatch(text)
        if formula is not None:
            text = next(group for group in formula.groups() if group is not None)
        elif MATH.search(text) is not None:
            text = MATH.sub(lambda m: next(group for group in m.groups() if group is not None), text)
        if (inside := boxed(text)) is not None and re.fullmatch(r"\\(?:boxed|fbox)\s*\{.*\}", text, re.DOTALL):
            text = inside
        # Outer braces, and \text{} around something other than text.
        if text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
            text = text[1:-1]
        if (wrap := WRAPPED.match(text)) is not None and closing_brace(text, wrap.end() - 1) == len(text) - 1:
            text = text[wrap.end() : -1]
        if text == before:
            return text


def _plain(text: str) -> Fraction | None:
    """The value of an integer, a decimal number or a fraction of integers, by far the most frequent answers."""
    text = text.replace("{,}", ",").replace("\\!", "")
    text = re.sub(r"(?<=\d)\\,(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d ])", lambda m: m[0].replace(" ", ""), text)
    if len(text) > MAX_LITERAL_DIGITS:
        return None
    if text and (number := PLAIN_NUMBER.fullmatch(text)) is not None and (number[2] or number[3]):
        return Fraction(f"{number[1]}{(number[2] or '0').replace(',', '')}{number[3] or ''}")
    if (fraction := FRACTION.fullmatch(text)) is not None:
        above, below = int(fraction[2] or fraction[4]), int(fraction[3] or fraction[5])
        return Fraction(-above if fraction[1] == "-" else above, below) if below else None
    return None


def _rational(number: Fraction) -> Any:
    import sympy

    return sympy.Rational(number.numerator, number.denominator)


def word_key(text: str) -> str:
    """Words to compare: without case, LaTeX, punctuation and white space."""
    text = WRAPPED.sub("", SPACES.sub(" ", text))
    return re.sub(r"[\W_]+", " ", text.casefold()).strip()


def _words(text: str) -> str | None:
    """Comparison key of an answer that is only text; None if it is not."""
    inside = re.sub(WRAPPED.pattern + r"([^{}]*)\}", r"\1", SPACES.sub(" ", text)).strip()
    if TEXT.fullmatch(inside) is None:
        return None
    words = re.findall(r"[^\W\d_]+", inside)
    known = FUNCTIONS | {"pi", "inf", "infinity"}
    wordy = [word for word in words if len(word) > 2 and word not in known and PRODUCTS.fullmatch(word) is None]
    single = [word for word in words if len(word) == 1 and word not in "aAI"]
    if not wordy:
        # Short words alone, as "no", and words that LaTeX sets as text, as \\text{up}.
        set_as_text = inside != text.strip() and any(len(word) > 1 for word in words)
        if single or not (set_as_text or any(word.lower() in WORDS for word in words)):
            return None
    if single and ("(" in inside or "/" in inside):
        return None
    return word_key(inside)


UNITS = {
    "percent": "%", "percentage": "%", "pct": "%", "%": "%", "degree": "degree", "degrees": "degree", "deg": "degree",
    "centimeter": "cm", "centimetre": "cm", "meter": "m", "metre": "m", "kilometer": "km", "kilometre": "km",
    "millimeter": "mm", "millimetre": "mm", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd",
    "mile": "mi", "gram": "g", "kilogram": "kg", "milligram": "mg", "pound": "lb", "ounce": "oz", "second": "s",
    "sec": "s", "minute": "min", "hour": "h", "hr": "h", "dollar": "$", "usd": "$", "liter": "l", "litre": "l",
    "milliliter": "ml",
    "millilitre": "ml", "euro": "€", "newton": "n", "joule": "j", "watt": "w", "volt": "v", "p m": "pm", "a m": "am",
}  # fmt: skip
"""Spellings of a unit, without the s of the plural. Units that are not here are compared as they are written."""
ATTACHED = re.compile(
    r"(?:mm|cm|dm|km|mg|kg|lb|lbs|oz|ft|yd|mi|in|min|hr|hrs|ml|mL|mph|kmh|km/h|m/s|cm/s|g/mol|kWh|Hz|kHz|MHz|GHz|kPa|Pa|eV|"
    r"rpm|[ap]\.?m\.?|nm|kJ|kW|kN|kV|mA|mV|ms|ns|cc|sq|deg|rad|usd|USD)(?:\^\{?-?\d\}?|/[a-zA-Z]{1,3}(?:\^\{?-?\d\}?)?)?"
)
"""Units recognised directly after a number, without a space."""
WRAPPED_UNIT = re.compile(
    WRAPPED.pattern + r"([^{}]*)\}\s*((?:\^\s*(?:\{-?\d\}|-?\d)|/|\\cdot|\\text\{[^{}]*\}|\\mathrm\{[^{}]*\})*)\s*$"
)
PERCENT = re.compile(r"\s*(?:\\?%|\\text\{\s*\\?%\s*\})$")
DEGREE = re.compile(
    r"\s*\^?\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z])|\\degree(?![a-zA-Z]))\s*(?:\\(?:text|mathrm)\{\s*([CFK])\s*\}|([CFK]))?$|\s*\\degree$"
)
CURRENCY = re.compile(r"^\s*([+-]?)\s*(?:\\\$|\$|\\text\{\s*\\?\$\s*\}|([£€¥₹]))\s*(?=[\d.])")


def _split_unit(text: str) -> tuple[str, str]:
    """Split an answer into value and canonical unit; the unit is empty if there is none."""
    if (money := CURRENCY.match(text)) is not None:
        return money[1] + text[money.end() :], money[2] or "$"
    if (percent := PERCENT.search(text)) is not None:
        return text[: percent.start()], "%"
    if (
        (degree := DEGREE.search(text)) is not None
        and degree.start() > 0
        and not re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text)
    ):
        return text[: degree.start()], "degree" + (degree[1] or degree[2] or "").lower()
    if (wrapped := WRAPPED_UNIT.search(text)) is not None and wrapped.start() > 0:
        value = text[: wrapped.start()]
        # A word between two parts of an answer is not a unit.
        if word_key(wrapped[1]) not in JOINING and re.search(r"[\w})\]]\s*$", SPACES.sub("", value)):
            return value, unit_key(wrapped[1] + wrapped[2])
    plain = re.fullmatch(r"(.*?[\d})\]])(\s*)([a-zA-Z][a-zA-Z.\s/^0-9{}-]*)", text, re.DOTALL)
    if plain is not None and "\\" not in plain[3]:
        words = re.findall(r"[a-zA-Z]+", plain[3])
        attached = ATTACHED.fullmatch(plain[3].strip()) is not None
        if not set(words) & (FUNCTIONS | JOINING) and (
            attached or (plain[2] and len(words[0]) > 2 and PRODUCTS.fullmatch(words[0]) is None)
        ):
            return plain[1], unit_key(plain[3])
    return text, ""


def unit_key(unit: str) -> str:
    """The canonical spelling of a unit."""
    unit = re.sub(WRAPPED.pattern, "", SPACES.sub(" ", unit)).replace("\\cdot", " ").replace("{", "").replace("}", "")
    unit = re.sub(r"\b([ap])\s*\.?\s*m\b\.?", r"\1m", unit.strip().strip("."))
    unit = re.sub(r"^(?:square|sq\.?)\s+(\w+)", r"\1^2", unit)
    unit = re.sub(r"^(?:cubic|cu\.?)\s+(\w+)", r"\1^3", unit)
    unit = re.sub(r"\s+per\s+", "/", unit)

    def spelled(match: re.Match[str]) -> str:
        word = match[0] if len(match[0]) <= 2 else match[0].lower()
        single = word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word
        return UNITS.get(word) or UNITS.get(single, single)

    return " ".join(re.sub(r"[a-zA-Z]+|\\?%", spelled, unit).split())


def _read_value(text: str) -> ParsedAnswer:
    text = _opened(text)
    if (number := _plain(text)) is not None:
        return ParsedAnswer(str(number), _rational(number), decimal="." in text)
    if ":" in text and (parts := _ratio(text)) is not None:
        return parts
    _refuse(text)
    latex = _latex(text)
    writing = _writing(latex)
    try:
        value = _parse(latex)
    except TooLarge:
        return ParsedAnswer(writing)
    except RecursionError:
        raise ParseFailed("it is nested too deep") from None
    return ParsedAnswer(writing, value, count=_members(value, text), decimal=re.search(r"\.\d", text) is not None)


def _ratio(text: str) -> ParsedAnswer | None:
    """A ratio or a time of day; None if it is neither."""
    parts = re.split(r"\s*:\s*", text)
    if any(not part or re.search(r"[={}\[\]()|<>,]", re.sub(r"\\(?:sqrt|frac|pi)|[{}]", "", part)) for part in parts):
        return None
    read_parts = [_read_value(part) for part in parts]
    if any(part.value is None for part in read_parts):
        return None
    timelike = re.fullmatch(r"\d{1,2}(?::[0-5]\d){1,2}", text.replace(" ", "")) is not None
    values = tuple(part.value for part in read_parts)
    return ParsedAnswer(":".join(part.writing for part in read_parts), parts=values, timelike=timelike)


def _refuse(text: str) -> None:
    """Refuse what the grammar would misread, or parse only after a very long time.

    Raises:
        NotRead: the text contains such a notation.
    """
    depth = most = parentheses = most_parentheses = 0
    for mark in re.findall(r"\\.|[{}()\[\]]", text):
        depth += (mark == "{") - (mark == "}")
        parentheses += (mark in "([") - (mark in ")]") if len(mark) == 1 else 0
        most, most_parentheses = max(most, depth), max(most_parentheses, parentheses)
    if most > DEEPEST or most_parentheses > DEEPEST_PARENTHESES:
        raise ParseFailed(f"it is nested deeper than {DEEPEST} braces or {DEEPEST_PARENTHESES} parentheses")
    if text.count("&") + text.count("\\\\") > MAX_CELLS:
        raise ParseFailed(f"it is a table of more than {MAX_CELLS} cells")
    if re.search(rf"\d{{{MAX_LITERAL_DIGITS},}}", text):
        raise ParseFailed(f"it has a number of {MAX_LITERAL_DIGITS} digits or more")
    if (unread := UNREAD.search(text)) is not None:
        raise ParseFailed(f"'{unread[0]}' is not understood")
    if re.search(r"\{[^{}]*:[^{}]*\}", text.replace("\\{", "{").replace("\\}", "}")):
        raise ParseFailed("a set that is given by a condition is not understood")
    if re.search(r"\d\s+\d", re.sub(r"\\q?quad", " ", re.sub(r"\\frac\s*\d\s*\d|_\s*\d", "", text))):
        raise ParseFailed("numbers stand side by side")
    bare = re.sub(
        WRAPPED.pattern + r"[^{}]*\}|\\begin\{[a-z]*\}(?:\{[^{}]*\})?|\\end\{[a-z]*\}|\\mathbb\{.\}|\\[a-zA-Z]+",
        " ",
        text,
    )
    for word in WORD.findall(bare):
        known = word.lower() in FUNCTIONS | JOINING | {"pi", "inf", "infinity"}
        if not known and (word.lower() in WORDS or (len(word) > 2 and PRODUCTS.fullmatch(word.lower()) is None)):
            if re.fullmatch(r"[A-Z]{3,4}", word):  # names of points
                continue
            raise ParseFailed(f"the word '{word}' is not understood")


WORDS = frozenset({"if", "is", "to", "of", "no", "at", "by", "an", "as", "we", "it", "so", "be", "on", "do", "ok"})


def _latex(text: str) -> str:
    """The answer in the LaTeX that the grammar reads."""
    from latex2sympy2_extended import NormalizationConfig, normalize_latex

    text = SPACES.sub(lambda m: "" if m[0] == "\\!" else " ", text.replace("{,}", ","))
    text = re.sub(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d ])", lambda m: m[0].replace(" ", ""), text)
    text = (
        text.replace("\\langle", "(")
        .replace("\\rangle", ")")
        .replace("**", "^")
        .replace("\\lvert", "|")
        .replace("\\rvert", "|")
    )
    text = re.sub(r"(?<![<>!=\\])>=", r"\\ge ", re.sub(r"<=(?![=>])", r"\\le ", text)).replace("!=", "\\neq ")
    text = re.sub(r"\\leqslant", r"\\le ", re.sub(r"\\geqslant", r"\\ge ", text))
    # Decimals with a period that repeats, as 0.1\overline{6}.
    text = re.sub(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?", _repeating, text)
    # 1e5 and 1.5E-3.
    text = re.sub(r"(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?![\w.])", r"\1 \\times 10^{\2}", text)
    text = re.sub(r"(?<![\\a-zA-Z])(?:sqrt)\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(
        r"(?<![\\a-zA-Z])(arcsin|arccos|arctan|sin|cos|tan|cot|sec|csc|log|ln|exp|max|min|gcd|lcm|pi)(?![a-zA-Z])",
        r"\\\1 ",
        text,
    )
    text = re.sub(r"\^\s*(-?\d\d+|-\d|\+\d)(?![\d.])", r"^{\1}", text)
    text = re.sub(r"\^\s*\(([^()]*)\)", r"^{\1}", text)
    # An integer before a group is a factor, not the whole of a mixed number.
    text = re.sub(r"(?<=[\d)])\s*(?=\()|(?<=\d)\s*(?=\\(?:[dt]?binom|Gamma|left\s*\())", r"\\cdot ", text)
    text = re.sub(r"(?<![a-zA-Z\\])([a-zA-Z])\\cdot \(", r"\1(", text)
    text = text.replace("'", "^{\\prime}").replace('"', "")
    config = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=False, boxed="none")
    return str(normalize_latex(text, config)).strip()


def _repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match[1] or "0", match[2], match[3]
    shift = 10 ** len(fixed)
    value = Fraction(int(whole + fixed), shift) + Fraction(int(period), shift * (10 ** len(period) - 1))
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"


def _writing(latex: str) -> str:
    """The LaTeX without what does not change its meaning."""
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\s+", "", latex)
    return re.sub(r"\{(\w)\}", r"\1", text)


def _parse(latex: str) -> Any:
    """The value of an answer, not evaluated.

    Raises:
        NotRead: the grammar does not understand it. TooLarge: it is not to be computed.
    """
    import sympy

    try:
        found = _converter()(is_real=True, convert_degrees=True).parse(latex)
    except (TooLarge, RecursionError):
        raise
    except Exception as error:  # noqa: BLE001
        # The converter raises whatever its parts raise; its own messages are three lines.
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ParseFailed(f"'{latex:.60}' is not understood: {why:.120}") from None
    if not isinstance(found, sympy.Basic | sympy.MatrixBase) or found in (sympy.nan, sympy.zoo):
        raise ParseFailed(f"'{latex:.60}' has no value")
    return found


@cache
def _converter() -> Any:
    """latex2sympy's converter, which checks each parse tree before it evaluates a part of it.

    It parses the arguments of functions by itself, so that the check has to be inside.
    """
    from latex2sympy2_extended.latex2sympy2 import _Latex2Sympy

    class Bounded(_Latex2Sympy):  # type: ignore[misc]
        def create_parser(self, latex_str: str) -> Any:
            parser = super().create_parser(latex_str)
            math = parser.math

            def checked() -> Any:
                tree = math()
                check_size(tree)
                return tree

            parser.math = checked
            return parser

    return Bounded


def _members(value: Any, text: str) -> int:
    """How many members a list has as written (sympy's sets drop equal ones); of a set, the distinct ones."""
    import sympy

    if not isinstance(value, sympy.FiniteSet):
        return 1
    return len(value.args) if text.startswith("\\{") else len(getattr(value, "_unsorted_args", value.args))


# --- bounds
#
# sympy evaluates numbers when expressions are compared, binomials and limits of intervals even while they are parsed.
# 9^{9^{9^9}} takes all memory in one C call that no alarm interrupts. So the size of a formula's numbers is estimated
# on its parse tree, and what is too large is refused before it is computed.


def check_size(node: Any) -> float:
    """An upper estimate of log10 of the value of a parse tree of latex2sympy; 0 for symbols.

    Products and sequences add their estimates, sums take the largest. Denominators count as 1.

    Raises:
        TooLarge: an integer in it would have more than MAX_DIGITS digits.
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
    if exponent > MAX_EXPONENT_DIGITS:
        raise TooLarge(f"an exponent has more than {MAX_EXPONENT_DIGITS:g} digits")
    return _bounded(base * 10**exponent if exponent > 0 else base)


def _factorial(of: float) -> float:
    if of > MAX_EXPONENT_DIGITS:
        raise TooLarge(f"a factorial of a number with more than {MAX_EXPONENT_DIGITS:g} digits")
    return _bounded(10**of * max(of, 0.3)) if of > 0 else 0.0


def _bounded(size: float) -> float:
    if size > MAX_DIGITS:
        raise TooLarge(f"a number has more than {MAX_DIGITS:g} digits")
    return size
