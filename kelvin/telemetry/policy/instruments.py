"""Counters, histograms and callback metrics of one process. One thread writes and reads them.

Cheap enough for every request: one dictionary look-up and one addition. `exposition` renders them.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kelvin.telemetry.policy.labels import OTHER_VALUE

MAX_SERIES: Final = 2048  # per family, even if its labels are bounded
Labels = tuple[str, ...]


class MetricKind(StrEnum):
    """The type of a metric family."""

    COUNTER = "counter"  # never decreases during the process's life
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class HistogramState:
    """A histogram's state. `counts` has one count per interval up to each bound, and one above the last bound."""

    __slots__ = ("counts", "total")

    def __init__(self, intervals: int) -> None:
        self.counts = [0] * intervals
        self.total = 0.0


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """All series of one name. They are the instrument's live data: render them before they change."""

    name: str
    help: str
    kind: MetricKind
    labels: Labels
    values: Mapping[Labels, float]
    bounds: tuple[float, ...] = ()
    spreads: Mapping[Labels, HistogramState] | None = None  # for a histogram, instead of `values`


class Counter:
    """A metric that only grows."""

    def __init__(self, name: str, help: str, labels: Labels) -> None:
        self._name, self._help, self._labels = name, help, labels
        self._values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Add `amount` to the series with these label values, in the order of the label names."""
        values = self._values
        try:
            values[labels] += amount
        except KeyError:
            labels = _bounded_labels(values, labels)
            values[labels] = values.get(labels, 0) + amount

    def family(self) -> MetricFamily:
        """Return the counter's series."""
        return MetricFamily(self._name, self._help, MetricKind.COUNTER, self._labels, self._values)


class Histogram:
    """A metric that counts observations by interval."""

    def __init__(self, name: str, help: str, labels: Labels, bounds: tuple[float, ...]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds ascend"
        self._name, self._help, self._labels, self._bounds = name, help, labels, bounds
        self._series: dict[Labels, HistogramState] = {}

    def observe(self, labels: Labels, value: float) -> None:
        """Count `value`. A value equal to a bound belongs to the interval below it."""
        series = self._series.get(labels)
        if series is None:
            series = self._series.setdefault(
                _bounded_labels(self._series, labels), HistogramState(len(self._bounds) + 1)
            )
        series.counts[bisect_left(self._bounds, value)] += 1
        series.total += value

    def family(self) -> MetricFamily:
        """Return the histogram's series."""
        return MetricFamily(self._name, self._help, MetricKind.HISTOGRAM, self._labels, {}, self._bounds, self._series)


class CallbackMetric:
    """A metric whose values are read when the page is rendered."""

    def __init__(
        self, name: str, help: str, kind: MetricKind, labels: Labels, read: Callable[[], Mapping[Labels, float]]
    ) -> None:
        self._name, self._help, self._kind, self._labels, self._read = name, help, kind, labels, read

    def family(self) -> MetricFamily:
        """Read the series. `read` must bound its label values, or take them from closed sets."""
        return MetricFamily(self._name, self._help, self._kind, self._labels, self._read())


class MetricsPage:
    """The metric families of one process, in order of registration. `process` becomes a label of each series."""

    def __init__(self, process: str) -> None:
        self.process = process
        self._instruments: dict[str, Counter | Histogram | CallbackMetric] = {}

    def __repr__(self) -> str:
        return f"<MetricsPage {self.process} families={len(self._instruments)}>"

    def counter(self, name: str, help: str, labels: Labels = ()) -> Counter:
        """Add a counter. Raises ValueError if the name is taken."""
        made = Counter(name, help, labels)
        self._register(name, made)
        return made

    def histogram(self, name: str, help: str, labels: Labels, bounds: tuple[float, ...]) -> Histogram:
        """Add a histogram. Raises ValueError if the name is taken."""
        made = Histogram(name, help, labels, bounds)
        self._register(name, made)
        return made

    def callback(
        self, name: str, help: str, kind: MetricKind, labels: Labels, read: Callable[[], Mapping[Labels, float]]
    ) -> None:
        """Add a callback metric, read for each page. Raises ValueError if the name is taken."""
        self._register(name, CallbackMetric(name, help, kind, labels, read))

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """Add a gauge without labels. Raises ValueError if the name is taken."""
        self.callback(name, help, MetricKind.GAUGE, (), lambda: {(): read()})

    def families(self, on_error: Callable[[Exception, str], None] | None = None) -> list[MetricFamily]:
        """Return all families that can be read now. `on_error` gets the error and name of each other one. Without
        `on_error`, the first error is raised.
        """
        found: list[MetricFamily] = []
        for name, instrument in self._instruments.items():
            try:
                found.append(instrument.family())
            except Exception as error:
                if on_error is None:
                    raise
                on_error(error, name)
        return found

    def _register(self, name: str, made: Counter | Histogram | CallbackMetric) -> None:
        if name in self._instruments:
            raise ValueError(f"{name} is taken")
        self._instruments[name] = made


def series_by_label(values: Iterable[tuple[str, float]]) -> dict[Labels, float]:
    """Return the values as series with one label each."""
    return {(name,): value for name, value in values}


def _bounded_labels(present: Mapping[Labels, object], labels: Labels) -> Labels:
    return labels if len(present) < MAX_SERIES else (OTHER_VALUE,) * len(labels)
