"""An installation without a collector loads no telemetry library."""

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.installation_processes import mapped

pytestmark = pytest.mark.deep


def test_telemetry_library_is_not_loaded_if_disabled(kelvin: Installation) -> None:
    """No process has mapped protobuf. Control: `test_telemetry_library_is_loaded_if_enabled`."""
    found = mapped(kelvin, "google/_upb")
    assert found
    assert not any(found.values())
