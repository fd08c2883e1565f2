"""Verification of token claims against the issuer: a valid token, and every way in which a token can be invalid."""

import base64
import json
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.auth.claims_policy import (
    Identity,
    Issuer,
    Token,
    TokenRefusal,
    derive_key_id,
    parse_token,
    verify_claims,
)
from kelvin.contracts.serving.control_messages import Scope

NOW_S = 1_800_000_000.0
LONG_AGO_S = 0.0
ISSUER = Issuer(
    name="https://idp/",
    audience="kelvin",
    algorithms=frozenset({"RS256"}),
    tenant_claim="tenant",
    tenants=frozenset({"acme", "globex"}),
    scopes=(Scope.INFER, Scope.PUSH),
)
CLAIMS: dict[str, object] = {
    "iss": "https://idp/", "aud": "kelvin", "sub": "s", "exp": NOW_S + 60, "tenant": "acme", "jti": "1", "iat": NOW_S,
}  # fmt: skip


def _judged(
    others: Mapping[str, object] | None = None,
    *,
    issuer: Issuer = ISSUER,
    algorithm: str = "RS256",
) -> Identity | TokenRefusal:
    made = {name: value for name, value in (CLAIMS | dict(others or {})).items() if value is not None}
    return verify_claims(Token("k", algorithm, made), issuer, NOW_S)


def _replaced(**fields: object) -> Issuer:
    return replace(ISSUER, **fields)  # type: ignore[arg-type]


def test_valid_token_names_its_principal() -> None:
    """The principal has the token's tenant, the issuer's scopes and a stable key id. It expires with the token."""
    found = _judged()
    assert isinstance(found, Identity)
    assert (found.principal.tenant, found.principal.scopes) == ("acme", (Scope.INFER, Scope.PUSH))
    assert found.expires_at_s == NOW_S + 60
    assert found.principal.key_id == derive_key_id("https://idp/", "s")
    assert (len(found.principal.key_id), found.principal.key_id[0]) == (12, "j")
    assert derive_key_id("a", "b") != derive_key_id("b", "a")


@pytest.mark.parametrize(
    ("others", "want"),
    [
        pytest.param({"iss": "https://idp"}, TokenRefusal.ISSUER, id="an issuer without the slash"),
        pytest.param({"iss": None}, TokenRefusal.ISSUER, id="no issuer"),
        pytest.param({"iss": ["https://idp/"]}, TokenRefusal.ISSUER, id="a list of issuers"),
        pytest.param({"aud": "other"}, TokenRefusal.AUDIENCE, id="another audience"),
        pytest.param({"aud": None}, TokenRefusal.AUDIENCE, id="no audience"),
        pytest.param({"aud": ["other", "KELVIN"]}, TokenRefusal.AUDIENCE, id="two other audiences"),
        pytest.param({"aud": {"kelvin": 1}}, TokenRefusal.AUDIENCE, id="an audience that is an object"),
        pytest.param({"exp": NOW_S - 30}, TokenRefusal.EXPIRED, id="expired beyond the leeway"),
        pytest.param({"exp": None}, TokenRefusal.EXPIRED, id="no expiry"),
        pytest.param({"exp": "9999999999"}, TokenRefusal.EXPIRED, id="an expiry that is text"),
        pytest.param({"exp": True}, TokenRefusal.EXPIRED, id="an expiry that is true"),
        pytest.param({"exp": 10**400}, TokenRefusal.EXPIRED, id="an expiry beyond a float"),
        pytest.param({"exp": float("inf")}, TokenRefusal.EXPIRED, id="an infinite expiry"),
        pytest.param({"exp": float("nan")}, TokenRefusal.EXPIRED, id="an expiry that is NaN"),
        pytest.param({"nbf": NOW_S + 31}, TokenRefusal.EARLY, id="not valid yet"),
        pytest.param({"nbf": "0"}, TokenRefusal.EARLY, id="nbf that is text"),
        pytest.param({"iat": NOW_S + 31}, TokenRefusal.EARLY, id="issued in the future"),
        pytest.param({"sub": None}, TokenRefusal.SUBJECT, id="no subject"),
        pytest.param({"sub": ""}, TokenRefusal.SUBJECT, id="an empty subject"),
        pytest.param({"sub": "s" * 256}, TokenRefusal.SUBJECT, id="a subject too long"),
        pytest.param({"tenant": None}, TokenRefusal.TENANT, id="no tenant"),
        pytest.param({"tenant": "initech"}, TokenRefusal.TENANT, id="a tenant of another issuer"),
        pytest.param({"tenant": "ACME"}, TokenRefusal.TENANT, id="a tenant in upper case"),
        pytest.param({"tenant": ["acme"]}, TokenRefusal.TENANT, id="a list of tenants"),
        pytest.param({"tenant": {}}, TokenRefusal.TENANT, id="a tenant that is an object"),
    ],
)
def test_invalid_claim_is_refused(others: dict[str, object], want: TokenRefusal) -> None:
    """Each case changes one claim of a valid token."""
    assert _judged(others) == want


@pytest.mark.parametrize("algorithm", ["none", "None", "HS256", "ES256", "rs256", ""])
def test_issuer_decides_allowed_algorithms(algorithm: str) -> None:
    """The token's own `alg` is not trusted."""
    assert _judged(algorithm=algorithm) == TokenRefusal.ALGORITHM


@pytest.mark.parametrize(
    "others",
    [
        pytest.param({"exp": NOW_S - 29.9}, id="an end within the leeway"),
        pytest.param({"nbf": NOW_S + 30, "iat": NOW_S + 30}, id="a beginning within the leeway"),
        pytest.param({"aud": ["other", "kelvin"]}, id="one of two audiences"),
        pytest.param({"nbf": None, "iat": None, "jti": None}, id="required claims only"),
        pytest.param({"scope": "operator admin"}, id="scopes that the issuer ignores"),
    ],
)
def test_claims_at_their_bounds_are_accepted(others: dict[str, object]) -> None:
    assert isinstance(_judged(others), Identity)


@pytest.mark.parametrize(
    ("said", "want"),
    [
        pytest.param("infer", (Scope.INFER,), id="one"),
        pytest.param("openid push infer", (Scope.INFER, Scope.PUSH), id="among others"),
        pytest.param(["push"], (Scope.PUSH,), id="a list"),
        pytest.param("admin", (), id="more than the issuer may give"),
        pytest.param("operator", (), id="an operator"),
        pytest.param("inferx pushy", (), id="names with a matching prefix"),
        pytest.param(None, (), id="none at all"),
        pytest.param({"infer": 1}, (), id="another form"),
    ],
)
def test_token_scopes_are_limited_to_the_issuers(said: object, want: tuple[Scope, ...]) -> None:
    """The token gets those of its scopes that the issuer may give."""
    found = _judged({"scope": said}, issuer=_replaced(scope_claim="scope"))
    assert isinstance(found, Identity)
    assert found.principal.scopes == want


def test_token_never_grants_operator_scope() -> None:
    """The operator scope is dropped even if the issuer has it."""
    for claim in (None, "scope"):
        issuer = _replaced(scopes=(Scope.OPERATOR, Scope.INFER), scope_claim=claim)
        found = _judged({"scope": "operator infer"}, issuer=issuer)
        assert isinstance(found, Identity)
        assert found.principal.scopes == (Scope.INFER,)


def _part(value: object) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _text(header: object, claims: object = CLAIMS, signature: str = "c2ln") -> str:
    return f"{_part(header)}.{_part(claims)}.{signature}"


HEADER = {"alg": "RS256", "kid": "k", "typ": "JWT"}


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("", id="nothing"),
        pytest.param("..", id="two dots"),
        pytest.param(_text(HEADER, signature=""), id="no signature"),
        pytest.param(_text(HEADER) + ".x", id="four parts"),
        pytest.param(_text(HEADER).replace(".", ".=", 1), id="padding"),
        pytest.param(_text(HEADER) + "\n", id="a newline"),
        pytest.param(_text(b"\xff"), id="bytes that are not JSON"),
        pytest.param(_text([HEADER]), id="a header that is a list"),
        pytest.param(_text(HEADER, "acme"), id="claims that are text"),
        pytest.param(_text(HEADER, b"[" * 4000), id="nested without end"),
        pytest.param(_text({"alg": "RS256"}), id="no kid"),
        pytest.param(_text(HEADER | {"kid": 1}), id="a kid that is a number"),
        pytest.param(_text(HEADER | {"kid": "k" * 256}), id="a kid too long"),
        pytest.param(_text({"kid": "k"}), id="no algorithm"),
        pytest.param(_text(HEADER | {"alg": ["RS256"]}), id="two algorithms"),
        pytest.param(_text(HEADER | {"crit": ["exp"]}), id="a critical header"),
        pytest.param(_text(HEADER | {"crit": ["b64"], "b64": False}), id="an unencoded payload"),
        pytest.param(_text(HEADER | {"typ": "logout+jwt"}), id="a token of another use"),
        pytest.param(_text(HEADER | {"typ": 1}), id="a kind that is a number"),
    ],
)
def test_malformed_token_is_not_parsed(text: str) -> None:
    assert parse_token(_text(HEADER)) == Token("k", "RS256", CLAIMS)
    assert parse_token(text) is None


@pytest.mark.parametrize("kind", [{"typ": "at+JWT"}, {"typ": "application/at+jwt"}, {}])
def test_token_type_header_is_checked(kind: dict[str, str]) -> None:
    """The access-token types of RFC 9068, or no type, are accepted."""
    assert parse_token(_text({"alg": "RS256", "kid": "../../etc/passwd"} | kind)) is not None


@given(st.text() | st.binary().map(_part).map(lambda part: f"{part}.{part}.{part}"))
def test_parsing_arbitrary_text_never_raises(text: str) -> None:
    assert not isinstance(parse_token(text), Exception)


_values = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.text(), max_size=2)


@given(st.dictionaries(st.sampled_from([*CLAIMS, "nbf", "scope"]), _values))
def test_arbitrary_claims_never_exceed_the_issuer(others: dict[str, object]) -> None:
    """The identity has a tenant and scopes of the issuer, and always expires."""
    found = verify_claims(Token("k", "RS256", CLAIMS | others), _replaced(scope_claim="scope"), NOW_S)
    if isinstance(found, Identity):
        assert found.principal.tenant in ISSUER.tenants
        assert set(found.principal.scopes) <= set(ISSUER.scopes)
        assert NOW_S - 30 < found.expires_at_s < float("inf")
