"""Metrics pages use Prometheus' text format, and pages of several processes can be merged."""

import pytest

from kelvin.telemetry.policy.exposition import merge, render
from kelvin.telemetry.policy.instruments import MAX_SERIES, MetricKind, MetricsPage, series_by_label


def page(process: str = "activator") -> MetricsPage:
    """Return a page with one instrument of each kind."""
    made = MetricsPage(process)
    made.counter("k_requests_total", "Requests.", ("tenant", "outcome"))
    made.histogram("k_wait_seconds", "Waiting.", ("start",), (0.1, 1.0))
    made.callback(
        "k_replicas", "Replicas.", MetricKind.GAUGE, ("state",), lambda: series_by_label((("ready", 2), ("parked", 0)))
    )
    return made


def test_a_page_is_rendered() -> None:
    """A page has names, help, types, labels and cumulative buckets. A family without series is left out."""
    made = MetricsPage("activator")
    requests = made.counter("k_requests_total", "Requests.", ("tenant", "outcome"))
    waits = made.histogram("k_wait_seconds", "Waiting.", ("start",), (0.1, 1.0))
    made.counter("k_never_total", "Never.")
    made.gauge("k_half", "Half.", lambda: 0.5)
    requests.add(("a", "ok"))
    requests.add(("a", "ok"), 2)
    for seconds in (0.1, 0.5, 7.0):
        waits.observe(("cold",), seconds)
    assert render(made.families(), made.process) == (
        "# HELP k_requests_total Requests.\n"
        "# TYPE k_requests_total counter\n"
        'k_requests_total{process="activator",tenant="a",outcome="ok"} 3\n'
        "# HELP k_wait_seconds Waiting.\n"
        "# TYPE k_wait_seconds histogram\n"
        'k_wait_seconds_bucket{process="activator",start="cold",le="0.1"} 1\n'
        'k_wait_seconds_bucket{process="activator",start="cold",le="1"} 2\n'
        'k_wait_seconds_bucket{process="activator",start="cold",le="+Inf"} 3\n'
        'k_wait_seconds_sum{process="activator",start="cold"} 7.6\n'
        'k_wait_seconds_count{process="activator",start="cold"} 3\n'
        "# HELP k_half Half.\n"
        "# TYPE k_half gauge\n"
        'k_half{process="activator"} 0.5\n'
    )


def test_values_of_labels_are_escaped() -> None:
    """A quote, a backslash or a newline stays within its value."""
    made = MetricsPage("p")
    made.counter("k_total", "K.", ("name",)).add(('a"b\\c\nd',))
    assert r'name="a\"b\\c\nd"' in render(made.families(), "p")


def test_a_value_may_be_no_number() -> None:
    """NaN and infinity are written as Go parses floats, as the format requires."""
    made = MetricsPage("p")
    made.gauge("k_unknown", "K.", lambda: float("nan"))
    made.gauge("k_endless", "K.", lambda: float("inf"))
    text = render(made.families(), "p")
    assert 'k_unknown{process="p"} nan\n' in text
    assert 'k_endless{process="p"} inf\n' in text
    assert merge([text]) == text


def test_pages_are_merged() -> None:
    """Each family is declared once. Equal series of two runtimes are added, those of other processes kept apart."""
    one, two, other = page("runtime"), page("runtime"), page("activator")
    merged = merge(render(each.families(), each.process) for each in (one, two, other))
    assert merged.count("# TYPE k_replicas gauge") == 1
    assert 'k_replicas{process="runtime",state="ready"} 4\n' in merged
    assert 'k_replicas{process="activator",state="ready"} 2\n' in merged


def test_a_family_never_outgrows_its_bound() -> None:
    """A family has at most MAX_SERIES series, and one more for the rest."""
    made = MetricsPage("p")
    counter, histogram = made.counter("k_total", "K.", ("x",)), made.histogram("k_seconds", "K.", ("x",), (1.0,))
    for number in range(MAX_SERIES + 500):
        counter.add((str(number),))
        histogram.observe((str(number),), 0.5)
    counted, timed = made.families()
    assert len(counted.values) == MAX_SERIES + 1
    assert counted.values[("other",)] == 500
    assert sum(counted.values.values()) == MAX_SERIES + 500
    assert timed.spreads is not None
    assert len(timed.spreads) == MAX_SERIES + 1
    assert timed.spreads[("other",)].counts == [500, 0]


def test_a_reading_that_fails_takes_no_other_along() -> None:
    """A failing reading is left out, and its error is reported."""

    def fail() -> float:
        raise OSError("a disk that is gone")

    made, errors = MetricsPage("p"), list[str]()
    made.gauge("k_broken", "Broken.", fail)
    made.gauge("k_whole", "Whole.", lambda: 1)
    families = made.families(lambda error, name: errors.append(f"{name}: {error}"))
    assert [family.name for family in families] == ["k_whole"]
    assert errors == ["k_broken: a disk that is gone"]


def test_a_name_is_taken_once() -> None:
    """Two instruments of one name would be one series with two writers."""
    made = page()
    with pytest.raises(ValueError, match="k_replicas is taken"):
        made.gauge("k_replicas", "Again.", lambda: 1)
