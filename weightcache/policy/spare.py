"""How many slabs to make now, so that restores find memory ready and never more than the budget's is made. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stock:
    """Slabs by what they are doing, and how many are waited for."""

    used: int
    free: int
    making: int
    waiting: int


def slabs_to_make(stock: Stock, limit: int, spare: int, at_once: int) -> int:
    """How many more to begin. Who waits is served by as many as can be made at once; the spare ones, for whom nobody
    waits yet, are made one after another, so that they take one core at the most from whoever computes.
    """
    room = limit - stock.used - stock.free - stock.making
    missing = stock.waiting - stock.free - stock.making
    if stock.waiting:
        return max(0, min(missing, room, at_once - stock.making))
    return max(0, min(1 - stock.making, spare - stock.free, room))


def spare_of(host_bytes: int, slab_bytes: int, spare_bytes: int) -> int:
    """Slabs that are kept ready: whole ones, at least one, at most the budget's."""
    return max(1, min(spare_bytes, host_bytes) // slab_bytes)
