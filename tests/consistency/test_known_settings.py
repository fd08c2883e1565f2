"""`kelvin doctor` knows every setting: a new one has its name in `kelvin/doctor/configuration_policy.py`."""

from kelvin.doctor.configuration_policy import DEFAULTS, KNOWN_SETTINGS
from tests.consistency.documented_facts import differences, settings_of_code

UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def test_names() -> None:
    """Those of the code, and no others: what it does not know it calls misspelt."""
    assert differences(KNOWN_SETTINGS, settings_of_code()) == []


def test_defaults() -> None:
    """Those that values are compared with are the code's."""
    real = {name: default for name, (default, _) in settings_of_code().items()}
    for name, default in DEFAULTS.items():
        if (text := real[name]) is not None:
            number, _, unit = text.partition(" ")
            assert float(number) * UNITS[unit] == default, name
