"""What `kelvin bench load` has to show, judged from its rows. Pure."""

from collections.abc import Sequence
from typing import Final

from coldstart_bench.contenders import KELVIN, TENSORIZER_VERIFY
from coldstart_bench.load_rows import VERIFYING, LoadRow, State, is_floor
from coldstart_bench.verdicts import Verdict, held, ratio

LARGE_BYTES: Final = 1_900_000_000  # a model of "2 GB" comes as close as its layers allow
FLOOR_SHARE: Final = 0.90
TENSORIZER_TIMES: Final = 2.0
UNVERIFIED_TIMES: Final = 1.6
BOUND_S: Final = 0.050
FROM_DISK: Final[tuple[State, ...]] = ("cold", "hot")


def judge(rows: Sequence[LoadRow]) -> tuple[Verdict, ...]:
    """The lines of every size that was measured, whether they hold or not."""
    sizes = sorted({row.size_bytes for row in rows})
    return tuple(verdict for size in sizes for verdict in _Size(rows, size).verdicts())


class _Size:
    """The rows of one size."""

    def __init__(self, rows: Sequence[LoadRow], size_bytes: int) -> None:
        self._size = size_bytes
        self._rows = [row for row in rows if row.size_bytes == size_bytes]
        self._ours = {row.state: row for row in self._rows if row.system == KELVIN.name}

    def verdicts(self) -> list[Verdict]:
        """In the order in which they are stated."""
        peers = frozenset(row.system for row in self._rows if not is_floor(row)) - {KELVIN.name}
        verifying, unverified = peers & VERIFYING, peers - VERIFYING
        floor = min((row.total_s for row in self._rows if is_floor(row) and row.state == "cold"), default=None)
        found = [
            self._say(
                "rate of the verified restore to the disk's O_DIRECT rate",
                "cold",
                ratio(floor, self._load("cold")),
                FLOOR_SHARE,
                asked=self._size >= LARGE_BYTES,
            )
        ]
        for state in FROM_DISK:
            beside = ratio(self._least(state, verifying), self._total(state))
            found.append(self._say("time of the fastest verifying loader to ours", state, beside, 1.0))
        for state in FROM_DISK:
            beside = ratio(self._least(state, {TENSORIZER_VERIFY.name}), self._total(state))
            found.append(self._say("time of tensorizer with verify_hash to ours", state, beside, TENSORIZER_TIMES))
        from_disk = ratio(self._least("cold", peers), self._total("cold"))
        from_memory = ratio(self._least("hot", peers), self._total("host"))
        beside_hot = ratio(self._total("hot"), self._least("hot", unverified))
        bound_s = self._load("host")
        return [
            *found,
            self._say("time of the fastest loader to ours", "cold", from_disk, 1.0),
            self._say("time of the fastest loader, page cache hot, to ours", "host", from_memory, 1.0),
            self._most("our time to the fastest unverified loader's", "hot", beside_hot, UNVERIFIED_TIMES),
            self._most("seconds until tensors are bound to verified bytes", "host", bound_s, BOUND_S),
        ]

    def _say(self, claim: str, state: State, value: float | None, limit: float, *, asked: bool = True) -> Verdict:
        return held(claim, self._size, state, value, limit, at_least=True, asked=asked)

    def _most(self, claim: str, state: State, value: float | None, limit: float) -> Verdict:
        return held(claim, self._size, state, value, limit, at_least=False)

    def _least(self, state: State, systems: frozenset[str] | set[str]) -> float | None:
        return min((row.total_s for row in self._rows if row.state == state and row.system in systems), default=None)

    def _total(self, state: State) -> float | None:
        return self._ours[state].total_s if state in self._ours else None

    def _load(self, state: State) -> float | None:
        return self._ours[state].load_s if state in self._ours else None
