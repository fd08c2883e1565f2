"""`kelvin doctor` knows every setting: add a new one to `kelvin/doctor/configuration_policy.py`."""

from kelvin.doctor.configuration_policy import DEFAULTS, KNOWN_SETTINGS
from tests.consistency.documented_facts import differences, settings_of_code

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def test_names() -> None:
    """The doctor knows exactly the settings of the code. It reports any other name as a spelling mistake."""
    assert differences(KNOWN_SETTINGS, settings_of_code()) == []


def test_defaults() -> None:
    """The defaults that the doctor compares values with are those of the code."""
    real = {name: default for name, (default, _) in settings_of_code().items()}
    for name, default in DEFAULTS.items():
        if (text := real[name]) is not None:
            number, _, unit = text.partition(" ")
            assert float(number) * UNITS[unit] == default, name
