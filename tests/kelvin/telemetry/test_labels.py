"""Metric labels come from closed sets, or from a limited number of values."""

import pytest

from kelvin.contracts.serving.stream_frames import NoCredit
from kelvin.telemetry.policy.labels import LabelCap, outcome_of, slowest_tier


@pytest.mark.parametrize(
    ("code", "want"),
    [
        ("ok", "ok"),
        ("overloaded", "overloaded"),
        ("chunk_corrupt", "chunk_corrupt"),
        pytest.param("made_up", "other", id="an unknown code"),
        pytest.param(NoCredit.code, "other", id="a code that no caller sees"),
        ("", "other"),
    ],
)
def test_unknown_outcome_code_is_other(code: str, want: str) -> None:
    """Only codes that callers see are used as labels."""
    assert outcome_of(code) == want


@pytest.mark.parametrize(
    ("bytes_by_tier", "want"),
    [
        pytest.param({"host": 5, "nvme": 0, "store": 0}, "host", id="all in memory"),
        pytest.param({"host": 5, "nvme": 1, "store": 0}, "nvme", id="a byte from nvme"),
        pytest.param({"store": 1, "host": 5, "nvme": 7}, "store", id="a byte from the store"),
        pytest.param({}, "other", id="nothing known"),
        pytest.param({"host": 0}, "other", id="nothing read"),
        pytest.param({"host": 1, "moon": 1}, "other", id="an unknown tier"),
    ],
)
def test_slowest_tier_of_a_restore_is_named(bytes_by_tier: dict[str, int], want: str) -> None:
    """The label is the slowest tier that a restore read from."""
    assert slowest_tier(bytes_by_tier) == want


def test_values_beyond_the_cap_share_one_label() -> None:
    """The first two names keep their labels. All later ones share `other`."""
    cap = LabelCap(2)
    assert [cap.bounded(("a", "m")), cap.bounded(("b", "m"))] == [("a", "m"), ("b", "m")]
    assert {cap.bounded((f"t{number}", "m")) for number in range(1000)} == {("other", "other")}
    assert cap.bounded(("a", "m")) == ("a", "m")
