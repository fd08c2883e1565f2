"""A start drawn in the terminal: one bar per stage, from where the one before it ended, beside the floor. Pure."""

from collections.abc import Sequence
from typing import Final

from contracts.timeline import Stage, Stamp

WIDTH: Final = 48


def waterfall(stamps: Sequence[Stamp], floor_us: int | None = None, width: int = WIDTH) -> str:
    """One line per stage: name, bar at its place, its own milliseconds, milliseconds since arrival.

    The picture ends with the first token; how long the answer then took is a line of words. `floor_us` draws a last
    bar for the frozen floor of this machine, where it is known.
    """
    if not stamps:
        return "(no stages were stamped)"
    begun = [stamp for stamp in stamps if stamp.stage is not Stage.DONE] or list(stamps)
    total_us = max(begun[-1].at_us, floor_us or 0, 1)
    lines, before_us = [], 0
    for stamp in begun:
        lines.append(_line(str(stamp.stage), before_us, stamp.at_us, total_us, width, "█"))
        before_us = stamp.at_us
    if floor_us is not None:
        lines.append(_line("floor", 0, floor_us, total_us, width, "░"))
    if stamps[-1] is not begun[-1]:
        lines.append(f"{'done':>12}   {(stamps[-1].at_us - before_us) / 1000:.1f} ms after that")
    return "\n".join(lines)


def _line(name: str, begin_us: int, end_us: int, total_us: int, width: int, ink: str) -> str:
    left = round(begin_us / total_us * width)
    length = max(1, round(end_us / total_us * width) - left)
    bar = (" " * min(left, width - 1) + ink * length)[:width].ljust(width)
    return f"{name:>12} │{bar}│ {(end_us - begin_us) / 1000:8.1f} ms  {end_us / 1000:8.1f}"
