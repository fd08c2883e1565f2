"""An installation that tells nobody anything has loaded nothing for it."""

import pytest

from coldstart_bench.harness.installation import Installation
from tests.e2e.installation_processes import mapped

pytestmark = pytest.mark.deep


def test_nothing_of_it_is_loaded_where_it_is_off(kelvin: Installation) -> None:
    """Protobuf's library is mapped in none of its processes. The control: in another installation's it is, in
    `test_its_library_is_loaded_where_it_is_on`.
    """
    found = mapped(kelvin, "google/_upb")
    assert found
    assert not any(found.values())
