"""How many loaded chunks are written to NVMe at once. Pure."""

from typing import Final

WRITES_AT_ONCE: Final = 2  # of three threads or more that read and write: one is left for a load that comes


def may_begin(writing: int, *, loading: bool) -> bool:
    """Whether one more is written now. Loads from the same disk come first: beside them one at a time goes on, or a
    busy machine would never keep anything.
    """
    return writing < (1 if loading else WRITES_AT_ONCE)
