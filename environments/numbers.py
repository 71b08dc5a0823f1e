"""Numbers in prose: what a verifier needs of "**7**.", "1,234" or "-3"."""

import re

# A minus (or U+2212, the typeset one) is a sign only where no operand ends: "5-3" holds 5 and 3, "is -3" holds -3.
# A comma groups digits only where the groups are well-formed: "7,000" is one number, "1,2,3" are three.
_NUMBER = re.compile(
    r"(?:(?<![\w)])(?P<sign>[-\u2212+]))?(?<![\w.])"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!,?\d)|\d+)(?:\.\d+)?|\.\d+)(?P<exponent>[eE][-+]?\d+)?",
    re.ASCII,
)


def numbers(text: str) -> list[float]:
    """Every number in `text`, in order."""
    return [_value(match) for match in _NUMBER.finditer(text)]


def last_number(text: str) -> float | None:
    """The last number in `text`, None when there is none: where a chat model puts its answer."""
    found = numbers(text)
    return found[-1] if found else None


def _value(match: re.Match[str]) -> float:
    value = float(match["digits"].replace(",", "") + (match["exponent"] or ""))
    return -value if match["sign"] in ("-", "\u2212") else value
