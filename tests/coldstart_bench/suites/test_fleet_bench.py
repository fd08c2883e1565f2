"""Claims of a fleet fail where they should, sizes are parsed strictly, and the generated fleet repeats."""

import msgspec
import pytest

from coldstart_bench.harness.synthetic_fleet import EACH, fleet_feed, registration_of, tenants_of
from coldstart_bench.suites.fleet_bench import FleetFigures, FleetSize, judge, sizes_of, table
from kelvin.contracts.names import require_dns_label

FEW = FleetSize(
    models=100,
    load_s=0.01,
    tick_median_s=0.003,
    tick_most_s=0.004,
    lookup_s=1e-6,
    key_s=1e-6,
    table_s=0.001,
    activator_start_s=0.5,
    controlplane_bytes=1_000_000,
    activator_bytes=50_000_000,
)
MANY = msgspec.structs.replace(FEW, models=10_100, controlplane_bytes=41_960_000, activator_bytes=90_960_000)


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        pytest.param({}, [], id="all holds, at the limits of memory"),
        pytest.param({"tick_most_s": 0.2001}, ["longest tick"], id="a slow tick"),
        pytest.param({"lookup_s": 5.1e-6}, ["look-up of a model's"], id="a slow look-up"),
        pytest.param({"activator_start_s": 2.1}, ["start of an activator"], id="a slow start"),
        pytest.param(
            {"controlplane_bytes": 42_000_000}, ["bytes of an idle model at the control"], id="a fat registry"
        ),
        pytest.param({"activator_bytes": 91_000_000}, ["bytes of an idle model at the activator"], id="a fat table"),
    ],
)
def test_bad_figure_fails_its_claim_alone(changes: dict[str, float], want: list[str]) -> None:
    """Only the changed figure's claim fails."""
    figures = FleetFigures(200, (FEW, msgspec.structs.replace(MANY, **changes)))
    found = [verdict.claim for verdict in judge(figures) if not verdict.passed]
    assert len(found) == len(want)
    assert all(claim.startswith(start) for claim, start in zip(found, want, strict=True))


def test_only_the_largest_fleet_is_judged() -> None:
    figures = FleetFigures(200, (msgspec.structs.replace(FEW, tick_most_s=9.0), MANY))
    assert all(verdict.passed for verdict in judge(figures))


def test_the_table_has_a_row_for_each_size() -> None:
    rows = [line.split() for line in table(FleetFigures(200, (FEW, MANY))).splitlines()[2:]]
    assert [row[0] for row in rows] == ["100", "10,100"]
    assert rows[1][1:4] == ["3.00ms", "4.00ms", "1.00us"]


@pytest.mark.parametrize("text", ["", "1,x", "100", "100,100", "0,100", f"1,{1000 * EACH + 1}", "-5,10"])
def test_invalid_fleet_sizes_are_refused(text: str) -> None:
    """The error names the value."""
    with pytest.raises(ValueError, match="must be") as error:
        sizes_of(text)
    assert repr(text) in str(error.value)


def test_sizes_are_put_in_order() -> None:
    """Sizes are sorted and unique."""
    assert sizes_of("300,100,300") == (100, 300)


def test_a_fleet_is_the_same_at_each_call() -> None:
    """Names are valid, each model is in the feed once, and registrations agree with the feed."""
    feed = fleet_feed(2 * EACH + 1)
    assert feed == fleet_feed(2 * EACH + 1)
    assert len({(row.tenant, row.model) for row in feed.models}) == 2 * EACH + 1
    assert [row.tenant for row in feed.tenants] == list(tenants_of(2 * EACH + 1))
    assert len(feed.tenants) == len({key.secret_sha256 for key in feed.keys}) == 3
    for number, row in enumerate(feed.versions):
        made = registration_of(number)
        assert (made.tenant, made.model, made.version, made.limits) == (row.tenant, row.model, row.version, row.limits)
        assert require_dns_label(made.model, "model") == made.model
