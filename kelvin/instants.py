"""Instants as people read them."""

from datetime import UTC, datetime


def instant(at_s: int | None, never: str = "") -> str:
    """Seconds since 1970 as UTC to the minute."""
    return never if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
