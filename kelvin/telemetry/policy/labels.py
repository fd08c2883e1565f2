"""Label values from closed sets, or capped. So a family has a bounded number of series, whatever callers send."""

from typing import Final

from kelvin.contracts import artifact_errors, errors, traffic_errors

OTHER_VALUE: Final = "other"
OK: Final = "ok"
TIERS: Final = ("host", "nvme", "peer", "store")  # fastest first


_MODULE_MEMBERS: Final = [
    kind for module in (errors, artifact_errors, traffic_errors) for kind in vars(module).values()
]
_FAILURES: Final = [kind for kind in _MODULE_MEMBERS if isinstance(kind, type) and issubclass(kind, errors.Failure)]
REPEAT_OUTCOMES: Final = ("joined", "replayed", "cached")  # answered from another request's response
OUTCOMES: Final = frozenset(
    {OK, *REPEAT_OUTCOMES} | {kind.code for kind in _FAILURES if kind is not errors.RemoteFailure}
)


def outcome_of(code: str) -> str:
    """Return a failure's code or `ok`; `other` for a code that no Kelvin process defines."""
    return code if code in OUTCOMES else OTHER_VALUE


def slowest_tier(bytes_by_tier: dict[str, int]) -> str:
    """Return the slowest tier that a restore read from; `other` if the tiers are unknown."""
    found = [tier for tier, nbytes in bytes_by_tier.items() if nbytes]
    if not found or any(tier not in TIERS for tier in found):
        return OTHER_VALUE
    return max(found, key=TIERS.index)


class LabelCap:
    """A cap: the first `limit` distinct values keep their names, all others become `other`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._named: set[tuple[str, ...]] = set()

    def __repr__(self) -> str:
        return f"<LabelCap {len(self._named)}/{self._limit}>"

    def bounded(self, values: tuple[str, ...]) -> tuple[str, ...]:
        """Return the values, or `other` for each of them."""
        if values in self._named:
            return values
        if len(self._named) < self._limit:
            self._named.add(values)
            return values
        return (OTHER_VALUE,) * len(values)
