"""The issuers file: each field has a rule, and the error names it."""

from pathlib import Path

import pytest

from activator.app.settings import read_settings
from kelvin.contracts.serving.control_messages import Scope
from kelvin.contracts.setting_parser import BadSetting

GOOD = """
[[issuer]]
issuer = "https://idp.example.com/"
audience = "kelvin"
jwks = "https://idp.example.com/keys"
algorithms = ["RS256", "ES256"]
tenant_claim = "tenant"
tenants = ["acme"]
scopes = ["push", "infer"]
"""


def _read(path: Path, text: str) -> object:
    path.write_text(text)
    return read_settings({"KELVIN_DATA": "/x", "KELVIN_OIDC": str(path)}).issuers


def test_valid_issuers_file_is_read(tmp_path: Path) -> None:
    """Missing fields have defaults. Without a file no issuer is trusted."""
    path = tmp_path / "issuers.toml"
    path.write_text(GOOD)
    (trusted,) = read_settings({"KELVIN_DATA": "/x", "KELVIN_OIDC": str(path)}).issuers
    issuer, source = trusted.issuer, trusted.source
    assert (issuer.name, issuer.audience) == ("https://idp.example.com/", "kelvin")
    assert issuer.tenants == {"acme"}
    assert (issuer.scopes, issuer.scope_claim) == ((Scope.INFER, Scope.PUSH), None)
    assert (issuer.leeway_s, source.refresh_s, source.max_age_s) == (30, 300, 86_400)
    assert source.tls.verify_mode.name == "CERT_REQUIRED"
    assert read_settings({"KELVIN_DATA": "/x"}).issuers == ()


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        pytest.param('"RS256"', '"HS256"', "algorithms: HS256: must be some of RS256", id="a shared secret"),
        pytest.param('"RS256"', '"none"', "algorithms: none", id="no signature"),
        pytest.param('["RS256", "ES256"]', "[]", "algorithms", id="no algorithm"),
        pytest.param('"infer"', '"operator"', "scopes: operator", id="an operator"),
        pytest.param('"infer"', '"root"', "scopes", id="an unknown scope"),
        pytest.param("https://idp.example.com/keys", "http://idp.example.com/keys", "must be an https", id="no TLS"),
        pytest.param("https://idp.example.com/keys", "https:///keys", "must be an https", id="no host"),
        pytest.param("https://idp.example.com/keys", "/etc/keys", "must be an https", id="a file"),
        pytest.param('["acme"]', "[]", "tenants", id="no tenant"),
        pytest.param('["acme"]', '["*"]', "must be DNS labels", id="every tenant"),
        pytest.param('audience = "kelvin"\n', "", "audience", id="no audience"),
        pytest.param('"kelvin"', '""', "audience", id="an empty audience"),
        pytest.param("tenant_claim", "claim", "claim", id="a misspelt field"),
        pytest.param("scopes", "leeway_s = 301\nscopes", "leeway_s", id="a leeway that is too long"),
        pytest.param("scopes", "one_time = true\nscopes", "one_time", id="an unknown field"),
        pytest.param("scopes", "refresh_s = 1\nscopes", "refresh_s", id="a refresh that is too frequent"),
        pytest.param("scopes", 'ca = "none.pem"\nscopes', "ca: ", id="a missing root"),
        pytest.param(
            "scopes", 'ca = "issuers.toml"\nscopes', "holds no certificate", id="a root that is not a certificate"
        ),
        pytest.param("[[issuer]]", "[[issuer", "line 2", id="not TOML"),
        pytest.param("[[issuer]]", "[issuer]", "array", id="a table for the list"),
        pytest.param(GOOD, GOOD + GOOD, "twice", id="an issuer twice"),
        pytest.param(GOOD, "", "issuer", id="an empty file"),
    ],
)
def test_invalid_issuers_file_is_refused(tmp_path: Path, before: str, after: str, says: str) -> None:
    """The error names the setting, the file and the rule."""
    assert before in GOOD
    path = tmp_path / "issuers.toml"
    with pytest.raises(BadSetting) as caught:
        _read(path, GOOD.replace(before, after))
    assert str(caught.value).startswith(f"KELVIN_OIDC={path}: ")
    assert says in str(caught.value)


def test_missing_issuers_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadSetting, match="No such file"):
        read_settings({"KELVIN_DATA": "/x", "KELVIN_OIDC": str(tmp_path / "no.toml")})
