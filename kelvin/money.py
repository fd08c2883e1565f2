"""Amounts and times as a bill prints them: exact."""

from decimal import Decimal


def money(micros: int) -> str:
    """Micro-units of a currency, with at least two decimals."""
    amount = Decimal(micros).scaleb(-6).normalize()
    places = max(2, -int(amount.as_tuple().exponent))
    return f"{amount:,.{places}f}"


def seconds(microseconds: int) -> str:
    """To the millisecond."""
    return f"{Decimal(microseconds).scaleb(-6):,.3f}"
