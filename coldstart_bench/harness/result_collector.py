"""What came of a run until now: figures by size, state and system; what failed, and what no state could be made for."""

from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

from coldstart_bench.harness.installation import InstallationFailed
from coldstart_bench.harness.machine_state import PageCacheNotReady
from coldstart_bench.harness.program_runner import ProgramFailed
from coldstart_bench.report.bench_report import Key, MissingFigure

T = TypeVar("T")


class ResultCollector(Generic[T]):
    """A system that failed once from a state is not asked again, and has no figure there. `tell` hears of each gap."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._taken: dict[Key, list[T]] = defaultdict(list)
        self._failed: dict[Key, str] = {}
        self._unmade: dict[Key, str] = {}  # the last state of the page cache that could not be made

    def take(self, key: Key, measure: Callable[[], T]) -> None:
        """One figure. A round without the state that it stands on has none: nobody's failure, unless all are so."""
        if key in self._failed:
            return
        _, state, system = key
        try:
            self._taken[key].append(measure())
        except PageCacheNotReady as error:
            self._unmade[key] = str(error)
            self._tell(f"{system}, {state}: skipped: {error}")
        except (ProgramFailed, InstallationFailed) as error:
            self.fails(key, error)

    def fails(self, key: Key, why: object) -> None:
        """It has no figure in this run."""
        self._failed[key] = str(why)
        self._tell(f"{key[2]}, {key[1]}: {why}")

    @property
    def figures(self) -> dict[Key, list[T]]:
        """Of what did not fail, in the order of the first of each."""
        return {key: each for key, each in self._taken.items() if each and key not in self._failed}

    @property
    def failures(self) -> tuple[MissingFigure, ...]:
        """What was asked for and has no figure: for a failure, or for want of a state to measure from."""
        unmade = {key: why for key, why in self._unmade.items() if not self._taken[key]}
        return tuple(
            MissingFigure(system, why, size, state) for (size, state, system), why in (unmade | self._failed).items()
        )
