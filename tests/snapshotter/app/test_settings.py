"""Settings are read once and typed, and a bad value is refused by name."""

from pathlib import Path

import pytest

from kelvin.contracts.setting_parser import BadSetting
from snapshotter.app.settings import read_settings


def test_only_the_data_directory_is_required() -> None:
    """Only the data directory is required."""
    found = read_settings({"KELVIN_DATA": "/var/lib/kel vin"})
    assert (found.run, found.staging) == (Path("/var/lib/kel vin/run"), Path("/var/lib/kel vin/staging"))
    assert found.store_url == "file:///var/lib/kel%20vin/store"
    assert (found.chunk_bytes, found.pack_bytes, found.lifeline_fd) == (8 << 20, 256 << 20, None)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        pytest.param("KELVIN_DATA", "", "is required", id="no data directory"),
        pytest.param("KELVIN_CHUNK_BYTES", "5000", "multiple of 4096", id="a chunk off the page"),
        pytest.param("KELVIN_CHUNK_BYTES", "0", "4096 or more", id="a chunk of nothing"),
        pytest.param("KELVIN_PUSH_PLANS", "-1", "1 or more", id="no pushes"),
        pytest.param("KELVIN_ENGINE", "run", "an absolute path", id="an engine that is somewhere"),
        pytest.param("KELVIN_SEAL_S", "soon", "a whole number", id="a word for a number"),
    ],
)
def test_invalid_setting_is_refused(name: str, value: str, rule: str) -> None:
    """The refusal names the variable, its value and the rule."""
    with pytest.raises(BadSetting, match=rule) as caught:
        read_settings({"KELVIN_DATA": "/d", name: value})
    assert str(caught.value).startswith(f"{name}={value}: ")
