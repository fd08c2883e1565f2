"""Collect the figures of a run by size, state and system, and the failures."""

from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar

from coldstart_bench.harness.installation import InstallationFailed
from coldstart_bench.harness.machine_state import PageCacheNotReady
from coldstart_bench.harness.program_runner import ProgramFailed
from coldstart_bench.report.bench_report import Key, MissingFigure

T = TypeVar("T")


class ResultCollector(Generic[T]):
    """Collects figures. A system that failed once in a state is not measured there again and has no figure. `tell` gets
    a text about each gap.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._taken: dict[Key, list[T]] = defaultdict(list)
        self._failed: dict[Key, str] = {}
        self._unmade: dict[Key, str] = {}  # why the page cache could not be prepared, the last time

    def measure(self, key: Key, measure: Callable[[], T]) -> None:
        """Take one figure. A round with an unprepared page cache is skipped; it is a failure only if all rounds are."""
        if key in self._failed:
            return
        _, state, system = key
        try:
            self._taken[key].append(measure())
        except PageCacheNotReady as error:
            self._unmade[key] = str(error)
            self._tell(f"{system}, {state}: skipped: {error}")
        except (ProgramFailed, InstallationFailed) as error:
            self.record_failure(key, error)

    def record_failure(self, key: Key, why: object) -> None:
        """Record that this system has no figure in this run."""
        self._failed[key] = str(why)
        self._tell(f"{key[2]}, {key[1]}: {why}")

    @property
    def figures(self) -> dict[Key, list[T]]:
        """Figures of systems that did not fail, in the order of their first figure."""
        return {key: each for key, each in self._taken.items() if each and key not in self._failed}

    @property
    def failures(self) -> tuple[MissingFigure, ...]:
        """Requested figures that are missing, because of a failure or an unprepared page cache."""
        unmade = {key: why for key, why in self._unmade.items() if not self._taken[key]}
        return tuple(
            MissingFigure(system, why, size, state) for (size, state, system), why in (unmade | self._failed).items()
        )
