"""An installation without a collector loads no telemetry library."""

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.installation_processes import mapped

pytestmark = pytest.mark.deep


def test_nothing_of_it_is_loaded_where_it_is_off(kelvin: Installation) -> None:
    """No process has mapped protobuf. Control: `test_its_library_is_loaded_where_it_is_on`."""
    found = mapped(kelvin, "google/_upb")
    assert found
    assert not any(found.values())
