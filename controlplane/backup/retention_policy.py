"""Which backups are kept: all of the last hour, then the newest of each hour for a day, then of each day. Pure."""

from collections.abc import Iterable
from typing import Final

HOUR_S: Final = 3_600
DAY_S: Final = 86_400
MIN_BACKUPS: Final = 3  # always kept: where the newest is damaged, the journal reaches back to the one before


def choose_kept_backups(made_at_s: Iterable[int], now_s: int, days: int) -> frozenset[int]:
    """Of the moments of all backups those that stay; a clock that went back loses none."""
    ascending = sorted(set(made_at_s))
    kept = set(ascending[-MIN_BACKUPS:])
    buckets: dict[tuple[str, int], int] = {}
    for moment in ascending:
        age_s = now_s - moment
        if age_s < HOUR_S:
            kept.add(moment)
        elif age_s < DAY_S:
            buckets["hour", moment // HOUR_S] = moment
        elif age_s < days * DAY_S:
            buckets["day", moment // DAY_S] = moment
    return frozenset(kept | set(buckets.values()))
