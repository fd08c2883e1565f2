"""Invalid settings are refused with the variable, the value and the rule."""

import subprocess
import sys

import pytest

from activator.app.settings import read_settings
from kelvin.contracts.setting_parser import BadSetting


def test_defaults_need_only_the_data_directory() -> None:
    """The defaults are the numbers in the documentation."""
    settings = read_settings({"KELVIN_DATA": "/x"})
    assert (settings.port, settings.host, settings.lifeline_fd) == (8443, "127.0.0.1", None)
    assert (settings.request.deadline_s, settings.request.hold_s) == (600.0, 1.0)


def test_a_check_of_the_settings_loads_no_http_client() -> None:
    """`kelvin doctor` reads the settings of every process, so that costs little."""
    program = "import sys, activator.app.settings; print('aiohttp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param("KELVIN_PORT", "99999", id="not a port"),
        pytest.param("KELVIN_CACHE_S", "0", id="a cache without a time"),
        pytest.param("KELVIN_ONCE_S", "86401", id="answers kept longer than a charge covers"),
        pytest.param("KELVIN_QUEUE_REQUESTS", "0", id="no queue at all"),
        pytest.param("KELVIN_DOMAIN", "a..b", id="not a domain"),
        pytest.param("KELVIN_HTTP2", "on", id="an unsupported protocol"),
        pytest.param("KELVIN_STALL_S", "nan", id="not a number"),
        pytest.param("KELVIN_FEED_MAX_AGE_S", "0", id="a feed that is always too old"),
        pytest.param("KELVIN_TRUSTED_ADDRESSES", "10.0.0.1/8", id="not a network"),
        pytest.param("KELVIN_CERTIFICATES", "here", id="no absolute path"),
        pytest.param("KELVIN_WAF_SOCKET", "here", id="no absolute path of a firewall"),
        pytest.param("KELVIN_WAF_SOCKET", "/" + "x" * 107, id="a socket that the kernel can't name"),
        pytest.param("KELVIN_WAF_MS", "0", id="a firewall without time"),
        pytest.param("KELVIN_WAF_UNANSWERED", "maybe", id="neither refuse nor allow"),
        pytest.param("KELVIN_ACTIVATOR_LISTEN", "8012", id="a port without an address"),
        pytest.param("KELVIN_AUTOSCALER", "http://autoscaler:8080", id="an autoscaler that is not a WebSocket"),
        pytest.param("KELVIN_AUTOSCALER", "ws://autoscaler", id="an autoscaler without a port"),
        pytest.param("KELVIN_AUTOSCALER", "ws://autoscaler:8080/x", id="an autoscaler with a path"),
        pytest.param("KELVIN_AUTOSCALER", "ws://autoscaler:no", id="an autoscaler with a bad port"),
        pytest.param("KELVIN_HEDGE_REQUESTS", "1", id="a switch that is neither on nor off"),
        pytest.param("KELVIN_SUBSETS", "on", id="subsets that are neither automatic nor off"),
    ],
)
def test_invalid_settings_are_refused_with_their_value(name: str, value: str) -> None:
    with pytest.raises(BadSetting, match=f"{name}={value}"):
        read_settings({"KELVIN_DATA": "/x", name: value})


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        pytest.param("secret", "", id="not a URL"),
        pytest.param("http://:secret@localhost", "", id="not a Redis URL"),
        pytest.param("redis://:secret@localhost:lots", "redis://", id="not a port"),
        pytest.param("redis://", "redis://", id="no host"),
    ],
)
def test_a_redis_is_a_url_whose_password_is_not_shown(value: str, shown: str) -> None:
    """The error shows the scheme only."""
    with pytest.raises(BadSetting) as refused:
        read_settings({"KELVIN_DATA": "/d", "KELVIN_REDIS": value})
    assert str(refused.value).startswith(f"KELVIN_REDIS={shown}...: must be redis://")
    assert read_settings({"KELVIN_DATA": "/d", "KELVIN_REDIS": "redis://:secret@h:1"}).redis == "redis://:secret@h:1"


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        pytest.param("KELVIN_REDIS", "must be redis://", id="a Redis"),
        pytest.param("KELVIN_AUTOSCALER", "must be ws://", id="an autoscaler"),
        pytest.param("KELVIN_CERTIFICATES", "must be an absolute path", id="certificates"),
    ],
)
def test_an_empty_value_is_refused_with_its_rule(name: str, rule: str) -> None:
    """No setting here is required, so an empty value is more likely a mistake than a choice."""
    with pytest.raises(BadSetting, match=rule):
        read_settings({"KELVIN_DATA": "/x", name: ""})
