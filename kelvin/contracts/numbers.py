"""Parse whole numbers from outside: ASCII digits and nothing else.

`int` also accepts signs, spaces, underscores and the digits of every script, and raises for thousands of digits.
"""

DIGITS = 15  # digits of a number that a float holds exactly
MAX_LIMIT = 1 << 50  # the largest limit of a tenant or of a degradation step; 16 digits


def parse_whole_number(text: str | bytes, max_digits: int = DIGITS) -> int | None:
    """Return the number, or None unless `text` is 1 to `max_digits` ASCII digits."""
    if text.isascii() and text.isdigit() and len(text) <= max_digits:
        return int(text)
    return None
