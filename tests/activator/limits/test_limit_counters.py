"""Errors of a KELVIN_REDIS that can't be used."""

import re
import sys
from importlib.metadata import metadata

import pytest

from activator.limits.limit_counters import open_limit_counters
from kelvin.contracts.setting_parser import BadSetting
from kelvin.telemetry.policy.instruments import MetricsPage


async def _open(url: str) -> None:
    async with open_limit_counters(url, "one", MetricsPage("activator")):
        pass


@pytest.mark.parametrize(
    "url",
    [
        pytest.param("redis://:secret@localhost?db=first", id="a database that is not a number"),
        pytest.param("redis://:secret@localhost?socket_timeout=long", id="a timeout that is not a number"),
        pytest.param("redis://:secret@localhost?nosuch=1", id="an unknown option"),
    ],
)
async def test_redis_url_with_a_wrong_option_is_a_bad_setting(url: str) -> None:
    """The error names the variable and shows no password."""
    with pytest.raises(BadSetting, match=r"^KELVIN_REDIS=redis://\.\.\.: ") as refused:
        await _open(url)
    assert "secret" not in str(refused.value)


async def test_missing_redis_library_names_an_extra_that_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its command installs this package with an extra that exists."""
    monkeypatch.setitem(sys.modules, "activator.limits.redis_store", None)
    with pytest.raises(BadSetting) as refused:
        await _open("redis://localhost")
    command = re.search(r"pip install '([a-z-]+)\[([a-z]+)\]'", str(refused.value))
    assert command is not None
    assert command[2] in (metadata(command[1]).get_all("Provides-Extra") or [])
