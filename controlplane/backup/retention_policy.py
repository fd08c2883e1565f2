"""Choose which backups are kept: all of the last hour, then the newest of each hour of a day, then of each day."""

from collections.abc import Iterable
from typing import Final

HOUR_S: Final = 3_600
DAY_S: Final = 86_400
MIN_BACKUPS: Final = 3  # always kept: if the newest is damaged, an older one and the journal restore everything


def choose_kept_backups(made_at_s: Iterable[int], now_s: int, days: int) -> frozenset[int]:
    """Return the backup times that are kept. Backups with a time in the future, after a clock went back, are kept."""
    ascending = sorted(set(made_at_s))
    kept_moments = set(ascending[-MIN_BACKUPS:])
    buckets: dict[tuple[str, int], int] = {}
    for moment in ascending:
        age_s = now_s - moment
        if age_s < HOUR_S:
            kept_moments.add(moment)
        elif age_s < DAY_S:
            buckets["hour", moment // HOUR_S] = moment
        elif age_s < days * DAY_S:
            buckets["day", moment // DAY_S] = moment
    return frozenset(kept_moments | set(buckets.values()))
