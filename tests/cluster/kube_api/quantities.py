"""Kubernetes quantities and Go durations, as far as fields and annotations use them."""

import re
from fractions import Fraction
from typing import Any, Final

NUMBER: Final = re.compile(r"([+-]?)(\d+(?:\.\d*)?|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+|)")
DECIMAL: Final = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
DURATION: Final = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?|\.\d+)(?:ns|us|µs|ms|s|m|h))+|[+-]?0")
PART: Final = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")
UNIT_S: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}


def amount(text: Any) -> Fraction | None:
    """Return the value of a quantity, or None for another text."""
    match = NUMBER.fullmatch(str(text))
    if match is None or isinstance(text, bool):
        return None
    sign, digits, suffix = match.groups()
    value = Fraction(digits if not digits.startswith(".") else f"0{digits}") * (-1 if sign == "-" else 1)
    if suffix in DECIMAL:
        return value * Fraction(10) ** DECIMAL[suffix]
    if suffix in BINARY:
        return value * Fraction(1024) ** BINARY.index(suffix)
    return value * Fraction(10) ** int(suffix[1:])


def canonical(text: Any) -> str:
    """Return a quantity as Go writes it: `8192Mi` becomes `8Gi`, `0.5` becomes `500m`."""
    value = amount(text)
    assert value is not None, text
    suffix = NUMBER.fullmatch(str(text))[3]  # type: ignore[index]
    if value == 0:
        return "0"
    if suffix in BINARY[1:] and value.denominator == 1 and abs(value) >= 1024:
        power = 0
        while power + 1 < len(BINARY) and value % 1024 == 0:
            value, power = value / 1024, power + 1
        return f"{value}{BINARY[power]}"
    for unit, exponent in sorted(DECIMAL.items(), key=lambda each: -each[1]):
        scaled = value / Fraction(10) ** exponent
        if scaled.denominator == 1:
            return f"{scaled}{unit}"
    return f"{-(-value // Fraction(1, 10**9))}n"


def seconds(text: str) -> float | None:
    """Return the length of a Go duration, or None for another text."""
    if not DURATION.fullmatch(text):
        return None
    length = sum(float(digits) * UNIT_S[unit] for digits, unit in PART.findall(text))
    return -length if text.startswith("-") else length
