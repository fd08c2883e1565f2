"""The duration of a start is forecast by tier, and the error is shown afterwards."""

from typing import Any

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.commands import run
from tests.e2e.https_client import complete
from tests.e2e.tiny_models import prompt_of

pytestmark = pytest.mark.deep


def starts(kelvin: Installation) -> Any:
    """Return the start forecasts of the `prod` version."""
    found = kelvin.admin.request("GET", "/admin/v1/models/llama/starts")["versions"]
    return next(version for version in found if "prod" in version["aliases"])


def held(kelvin: Installation) -> set[str]:
    """Return the tiers that the next start would read from."""
    expected = starts(kelvin)["expected"]
    return {name for name, count in expected["bytes_by_tier"].items() if count} if expected else set()


def started(kelvin: Installation, tier: str) -> Any:
    """Start the model from this tier. Return the forecast, and the past start with its error."""
    for _ in range(10):
        kelvin.empty_tier("host") if tier == "nvme" else kelvin.scale_to_zero("llama")
        kelvin.wait(lambda: held(kelvin) == {tier}, f"all of it is in the tier '{tier}'")
        before = starts(kelvin)
        assert complete(kelvin, "llama", prompt_of([5, 9, 12]), max_tokens=1).status == 200
        after = starts(kelvin)["past"]
        if after and after != before["past"]:
            return before["expected"], after[-1]
    raise AssertionError("no start was foretold in time")


def test_start_forecast_names_its_tier_and_error(kelvin: Installation) -> None:
    """Starts from the host tier and from NVMe have forecasts from measured rates, and a recorded duration."""
    assert complete(kelvin, "llama", prompt_of([5, 9, 12]), max_tokens=1).status == 200
    total = kelvin.model("llama")["versions"][0]["total_bytes"]
    for tier in ("host", "nvme"):
        expected, past = started(kelvin, tier)
        assert 0 < expected["bytes_by_tier"][tier] <= total
        assert (expected["bytes_s"] > 0) == (tier == "nvme")
        longest = max(expected["process_s"], expected["bytes_s"])
        assert abs(expected["ready_s"] - longest - expected["lease_s"] - expected["bind_s"]) < 1e-6
        assert past["tier"] == tier
        assert past["predicted_s"] > 0
        assert past["actual_s"] > 0
        page = kelvin.admin.text("/admin/v1/metrics")
        assert f'kelvin_eta_ratio_count{{process="controlplane",tier="{tier}"}}' in page
    assert starts(kelvin)["expected"]["rates"]["nvme"]["loads"] > 0, "measured, not guessed"
    said = run(kelvin, "explain", "start", "llama")
    assert "first token in" in said
    assert "actual / predicted" in said
