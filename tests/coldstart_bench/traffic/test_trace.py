"""Traces are read as they are published; what is none is refused by line; a load of one has its lengths and shares."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from coldstart_bench.traffic.trace import (
    BadTrace,
    Due,
    Row,
    Window,
    as_recorded,
    by_clients,
    plan_of,
    rows_of,
    window_at,
    windows_of,
    words,
)

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = f"{HEAD}2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:18:00,7,0\n"
SERVEGEN = "0,0,0,,0,0\n600,3.5,0.9,Gamma,1.2,0.06\n1200,2,4.5,Weibull,0.3,0.01\n"


def test_requests() -> None:
    """In order of time, to the microsecond; what was asked for nothing is no load."""
    first, second = rows_of(AZURE)
    assert (first.prompt, first.output) == (4808, 10)
    assert second.at_s - first.at_s == pytest.approx(0.052, abs=1e-6)
    assert as_recorded([first, second], 2.0) == [Due(0, 0, 4808, 10), Due(second_us(first, second), 0, 3180, 8)]


def second_us(first: Row, second: Row) -> int:
    """Twice as fast."""
    return int((second.at_s - first.at_s) / 2 * 1e6)


def test_windows() -> None:
    """Each with its rate; one that has begun holds until the next."""
    windows = windows_of(SERVEGEN)
    assert windows[1:] == [Window(600, 3.5, 0.9, "Gamma"), Window(1200, 2, 4.5, "Weibull")]
    assert [window_at(windows, at).at_s for at in (0, 599, 600, 5000)] == [0, 0, 600, 1200]
    assert window_at(windows[1:], 0).at_s == 600


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("a,b\n", "line 1: must be TIMESTAMP", id="no heading"),
        pytest.param(f"{HEAD}yesterday,1,2\n", "line 2: must be a time", id="no time"),
        pytest.param(f"{HEAD}2023-11-16 18:17:03,1\n", "line 2: must be a time", id="a column less"),
        pytest.param(f"{HEAD}2023-11-16 18:17:03,many,2\n", "line 2: must be a time", id="no number"),
        pytest.param(f"{HEAD}2023-11-16 18:17:03,1,2\n", "two requests", id="one request"),
    ],
)
def test_no_trace_of_requests(text: str, why: str) -> None:
    """Line and rule."""
    with pytest.raises(BadTrace, match=why):
        rows_of(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("", "must have a window", id="nothing"),
        pytest.param("0,1\n", "line 1: must be start", id="columns missing"),
        pytest.param("0,1,1,Pareto,0,0\n", "line 1: 'Pareto': must be Gamma or Weibull", id="another pattern"),
    ],
)
def test_no_windows(text: str, why: str) -> None:
    """Likewise."""
    with pytest.raises(BadTrace, match=why):
        windows_of(text)


def test_file_that_is_no_csv_is_named(tmp_path: Path) -> None:
    """Also where the reader of CSV itself gives up."""
    file = tmp_path / "trace.csv"
    file.write_text(f"{HEAD}{'9' * 200_000},1,2\n")
    with pytest.raises(BadTrace, match=r"trace\.csv: field larger"):
        plan_of(file, (), 0.0)


def test_clients_have_their_shares_and_both_lengths_of_one_row() -> None:
    """About as many as were asked for; no pair of lengths that the trace has not."""
    rows = [Row(0, 10, 1), Row(1, 2000, 90)]
    windows = [Window(0, 9, 1.0, "Gamma"), Window(0, 1, 1.0, "Weibull"), Window(0, 0, 0, "")]
    due = by_clients(rows, windows, 4000, 20, Random(1))
    counts = Counter(each.tenant for each in due)
    assert len(due) == pytest.approx(4000, rel=0.1)
    assert counts[0] / len(due) == pytest.approx(0.9, abs=0.03)
    assert counts[2] == 0
    assert {(each.prompt, each.output) for each in due} == {(10, 1), (2000, 90)}
    assert due == sorted(due, key=lambda each: each.at_us)
    assert max(each.at_us for each in due) < 20_000_000


def test_clients_that_ask_for_nothing() -> None:
    """Are no load."""
    with pytest.raises(BadTrace, match="no client asks"):
        by_clients([Row(0, 1, 1)], [Window(0, 0, 0, "")], 10, 1, Random(1))


@pytest.mark.parametrize("shared", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("prompt", [1, 2, 50])
def test_a_prompt_has_its_length_and_its_prefix(shared: float, prompt: int) -> None:
    """Of its tenant, and of nobody else."""
    one, again = words(Due(0, 1, prompt, 1), 1, shared), words(Due(0, 1, prompt, 1), 2, shared)
    other = words(Due(0, 2, prompt, 1), 3, shared)
    same = int(shared * prompt)
    assert len(one) == prompt
    assert one[:same] == again[:same]
    assert one[same : same + 1] != again[same : same + 1] or same == prompt
    assert one[:1] != other[:1]
