"""Published traces are parsed, invalid ones refused by line, and loads have their lengths and shares."""

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from coldstart_bench.suites.trace_bench import (
    BadTrace,
    ClientWindow,
    DueRequest,
    TraceRow,
    draw_by_clients,
    make_prompt,
    parse_trace,
    parse_windows,
    plan_of,
    replay_rows,
    window_at,
)

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
AZURE = f"{HEAD}2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:18:00,7,0\n"
SERVEGEN = "0,0,0,,0,0\n600,3.5,0.9,Gamma,1.2,0.06\n1200,2,4.5,Weibull,0.3,0.01\n"


def test_trace_rows_are_parsed_in_time_order() -> None:
    """Rows are sorted by time, to the microsecond. Requests without output are left out."""
    first, second = parse_trace(AZURE)
    assert (first.prompt, first.output) == (4808, 10)
    assert second.at_s - first.at_s == pytest.approx(0.052, abs=1e-6)
    assert replay_rows([first, second], 2.0) == [
        DueRequest(0, 0, 4808, 10),
        DueRequest(second_us(first, second), 0, 3180, 8),
    ]


def second_us(first: TraceRow, second: TraceRow) -> int:
    """Return the second arrival at double speed, in microseconds."""
    return int((second.at_s - first.at_s) / 2 * 1e6)


def test_client_windows_are_parsed() -> None:
    """Each window has its rate and lasts until the next one starts."""
    windows = parse_windows(SERVEGEN)
    assert windows[1:] == [ClientWindow(600, 3.5, 0.9, "Gamma"), ClientWindow(1200, 2, 4.5, "Weibull")]
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
def test_invalid_trace_is_refused_with_its_line(text: str, why: str) -> None:
    with pytest.raises(BadTrace, match=why):
        parse_trace(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("", "must have a window", id="nothing"),
        pytest.param("0,1\n", "line 1: must be start", id="columns missing"),
        pytest.param("0,1,1,Pareto,0,0\n", "line 1: 'Pareto': must be Gamma or Weibull", id="another pattern"),
    ],
)
def test_invalid_windows_are_refused_with_their_line(text: str, why: str) -> None:
    with pytest.raises(BadTrace, match=why):
        parse_windows(text)


def test_file_that_is_no_csv_is_named(tmp_path: Path) -> None:
    """The error names the file, also if the CSV reader itself fails."""
    file = tmp_path / "trace.csv"
    file.write_text(f"{HEAD}{'9' * 200_000},1,2\n")
    with pytest.raises(BadTrace, match=r"trace\.csv: field larger"):
        plan_of(file, (), 0.0)


def test_clients_have_their_shares_and_both_lengths_of_one_row() -> None:
    """Clients send in proportion to their rates. Each pair of lengths comes from one row."""
    rows = [TraceRow(0, 10, 1), TraceRow(1, 2000, 90)]
    windows = [ClientWindow(0, 9, 1.0, "Gamma"), ClientWindow(0, 1, 1.0, "Weibull"), ClientWindow(0, 0, 0, "")]
    due = draw_by_clients(rows, windows, 4000, 20, Random(1))
    counts = Counter(each.tenant for each in due)
    assert len(due) == pytest.approx(4000, rel=0.1)
    assert counts[0] / len(due) == pytest.approx(0.9, abs=0.03)
    assert counts[2] == 0
    assert {(each.prompt, each.output) for each in due} == {(10, 1), (2000, 90)}
    assert due == sorted(due, key=lambda each: each.at_us)
    assert max(each.at_us for each in due) < 20_000_000


def test_idle_clients_are_no_load() -> None:
    with pytest.raises(BadTrace, match="no client sends"):
        draw_by_clients([TraceRow(0, 1, 1)], [ClientWindow(0, 0, 0, "")], 10, 1, Random(1))


@pytest.mark.parametrize("shared", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("prompt", [1, 2, 50])
def test_a_prompt_has_its_length_and_its_prefix(shared: float, prompt: int) -> None:
    """The prefix is shared within a tenant only."""
    one, again = (
        make_prompt(DueRequest(0, 1, prompt, 1), 1, shared),
        make_prompt(DueRequest(0, 1, prompt, 1), 2, shared),
    )
    other = make_prompt(DueRequest(0, 2, prompt, 1), 3, shared)
    same = int(shared * prompt)
    assert len(one) == prompt
    assert one[:same] == again[:same]
    assert one[same : same + 1] != again[same : same + 1] or same == prompt
    assert one[:1] != other[:1]
