"""Settings for other processes and this process's certificate: parsing, and refusals with value and rule."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kelvin.contracts.roles import Role
from kelvin.contracts.setting_parser import BadSetting
from kelvin.ipc.peer_settings import LOCAL_ONLY, listener_url, read_peer_settings
from tests.kelvin.crypto.pki import PREFIX, Authority, write

ONE = Authority("one")
LISTEN = "KELVIN_CONTROL_LISTEN"


def test_defaults_are_local_only(tmp_path: Path) -> None:
    """Without settings, a process talks to its own host only. A missing certificate directory is no error."""
    assert read_peer_settings({"KELVIN_INNER_TLS": str(tmp_path / "none")}, Role.ACTIVATOR, LISTEN) == LOCAL_ONLY


def test_every_peer_setting_is_read(tmp_path: Path) -> None:
    """With one directory per host, a role's pair is in its subdirectory. Authorities may be in another file."""
    write(tmp_path / "activator", ONE.sign("https://x/activator"), ONE)
    (tmp_path / "bundle").write_bytes(ONE.pem)
    env = {
        "KELVIN_INNER_TLS": str(tmp_path), "KELVIN_INNER_CA": str(tmp_path / "bundle"),
        "KELVIN_INNER_ID": "https://x/", "KELVIN_CONTROL": "https://c:1", "KELVIN_SNAPSHOTTER": "https://[::1]:2",
        LISTEN: "[::1]:7000",
    }  # fmt: skip
    found = read_peer_settings(env, Role.ACTIVATOR, LISTEN)
    assert found.files is not None
    assert (found.files.key, found.files.authorities) == (tmp_path / "activator" / "tls.key", tmp_path / "bundle")
    assert (found.listen, found.control, found.snapshotter) == (("::1", 7000), "https://c:1", "https://[::1]:2")


def _expire(place: Path) -> None:
    (place / "tls.key").write_bytes(ONE.of(Role.RUNTIME).key)


@pytest.mark.parametrize(
    ("env", "harm", "error"),
    [
        pytest.param({"KELVIN_INNER_TLS": ""}, None, "KELVIN_INNER_TLS=: is required", id="no certificate"),
        pytest.param({"KELVIN_INNER_TLS": "here"}, None, "KELVIN_INNER_TLS=here: must be an abs", id="a relative path"),
        pytest.param({"KELVIN_INNER_CA": "here"}, None, "KELVIN_INNER_CA=here: must be an abs", id="relative CA path"),
        pytest.param({"KELVIN_INNER_CA": "/none"}, None, "/none can't be read: No such file", id="no authorities"),
        pytest.param({"KELVIN_INNER_ID": "kelvin"}, None, "KELVIN_INNER_ID=kelvin: must be SCHEME", id="no prefix"),
        pytest.param({"KELVIN_INNER_ID": "spiffe://x"}, None, "must be SCHEME://NAME/", id="a prefix without its end"),
        pytest.param({"KELVIN_INNER_ID": "spiffe://x/"}, None, "not spiffe://x/runtime", id="another's certificate"),
        pytest.param({"KELVIN_CONTROL": "http://c:1"}, None, "KELVIN_CONTROL=http://c:1: must be https", id="no TLS"),
        pytest.param({"KELVIN_CONTROL": "https://c"}, None, "must be https://HOST:PORT", id="no port"),
        pytest.param({"KELVIN_SNAPSHOTTER": "https://c:1/x"}, None, "KELVIN_SNAPSHOTTER=", id="a path"),
        pytest.param({LISTEN: "7000"}, None, f"{LISTEN}=7000: must be ADDRESS:PORT", id="no address"),
        pytest.param({LISTEN: "@a:1"}, None, f"{LISTEN}=@a:1: must be ADDRESS:PORT", id="an address with @"),
        pytest.param({LISTEN: "a:0"}, None, f"{LISTEN}=a:0: must be ADDRESS:PORT", id="no port to listen at"),
        pytest.param({}, _expire, "KELVIN_INNER_TLS=", id="a key of another certificate"),
        pytest.param({}, lambda place: (place / "tls.crt").unlink(), "tls.crt can't be read", id="no file"),
        pytest.param({}, lambda place: write(place, ONE.of(Role.AGENT), ONE), "the role agent, not", id="another role"),
    ],
)
def test_bad_peer_settings_are_refused(
    env: dict[str, str], harm: Callable[[Path], object] | None, error: str, tmp_path: Path
) -> None:
    """The refusal names variable and rule, and contains nothing of a key."""
    write(tmp_path, ONE.sign(PREFIX + "runtime"), ONE)
    if harm is not None:
        harm(tmp_path)
    whole = {"KELVIN_INNER_TLS": str(tmp_path), "KELVIN_CONTROL": "https://c:1", **env}
    with pytest.raises(BadSetting) as bad:
        read_peer_settings(whole, Role.RUNTIME, LISTEN)
    assert error in str(bad.value)
    assert "PRIVATE" not in str(bad.value)


def test_a_port_of_the_kernels_choice(tmp_path: Path) -> None:
    """Port 0 is allowed where the setting permits it. Its host must be one that others can reach, so not 0.0.0.0."""
    write(tmp_path, ONE.of(Role.RUNTIME), ONE)
    env = {"KELVIN_INNER_TLS": str(tmp_path)}
    assert read_peer_settings(env | {LISTEN: "10.0.0.1:0"}, Role.RUNTIME, LISTEN, any_port=True).listen == (
        "10.0.0.1",
        0,
    )
    for host in ("0.0.0.0", "[::]"):
        with pytest.raises(BadSetting, match="must be an address that other hosts reach"):
            read_peer_settings(env | {LISTEN: f"{host}:0"}, Role.RUNTIME, LISTEN, any_port=True)
    assert listener_url("10.0.0.1", 7) == "https://10.0.0.1:7"
    assert listener_url("fd00::1", 7) == "https://[fd00::1]:7"
