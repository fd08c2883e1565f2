"""Names in a request are DNS labels, and each reference has exactly one meaning."""

import pytest

from activator.routing.request_routes import ListModels, route
from kelvin.contracts.errors import InvalidRequest, Refused
from kelvin.contracts.names import (
    RESERVED_TENANTS,
    ModelReference,
    is_digest,
    parse_address,
    parse_reference,
    qualified_model_name,
    require_dns_label,
    require_model_name,
    require_tenant_name,
    split_qualified_name,
)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("m", ModelReference("m", "prod", None), id="a bare name means the alias prod"),
        pytest.param("m@staging", ModelReference("m", "staging", None), id="a word after @ is an alias"),
        pytest.param("m@0123456789ab", ModelReference("m", None, "0123456789ab"), id="twelve hex digits are a version"),
        pytest.param("m@0123456789a", ModelReference("m", "0123456789a", None), id="eleven hex digits are an alias"),
        pytest.param("m@" + "f" * 64, ModelReference("m", None, "f" * 64), id="a whole digest is a version"),
    ],
)
def test_parse_reference(text: str, want: ModelReference) -> None:
    """`M`, `M@alias` and `M@version` are distinguished by their form alone."""
    assert parse_reference(text) == want


@pytest.mark.parametrize("text", ["", "M", "-m", "m-", "m_x", "a" * 64, "m@", "m@UP", "m/../x", "m\n"])
def test_a_bad_name_is_refused_by_value_and_rule(text: str) -> None:
    """A name that is not a DNS label is refused with the rule."""
    with pytest.raises(Refused) as refused:
        parse_reference(text)
    assert isinstance(refused.value.failure, InvalidRequest)
    assert "DNS label" in refused.value.failure.message


def test_the_longest_label_is_63() -> None:
    """The limit of RFC 1123 is inclusive."""
    assert require_dns_label("a" * 63, "model") == "a" * 63


@pytest.mark.parametrize("name", [*sorted(RESERVED_TENANTS), "-x"])
def test_reserved_tenant_name_is_refused(name: str) -> None:
    """First segments of the product's own paths and names that aren't DNS labels are refused with the rule."""
    with pytest.raises(Refused, match=r"is reserved|DNS label"):
        require_tenant_name(name)
    assert require_tenant_name("v3") == "v3"


@pytest.mark.parametrize("name", sorted(RESERVED_TENANTS))
def test_reserved_tenant_prefix_is_never_a_model_owner(name: str) -> None:
    """A path that begins with a reserved name is never routed to a tenant of that name."""
    models_route = route("GET", f"/{name}/v1/v1/models".encode(), "localhost", "kelvin.localhost")
    assert not isinstance(models_route, ListModels)
    named = route("GET", b"/acme/v1/v1/models", "localhost", "kelvin.localhost")
    assert isinstance(named, ListModels)
    assert named.target.tenant == "acme"


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("m", ModelReference("m", "prod", None), id="one's own"),
        pytest.param("acme/m", ModelReference("m", "prod", None, "acme"), id="another tenant's"),
        pytest.param("acme/m@next", ModelReference("m", "next", None, "acme"), id="another tenant's alias"),
        pytest.param("acme/m@0123456789ab", ModelReference("m", None, "0123456789ab", "acme"), id="another's version"),
        *(
            pytest.param(text, None, id=f"refused: {text!r}")
            for text in ("/m", "acme/", "acme//m", "a/b/m", "Acme/m", "acme@x/m", "../m", "acme/m@", "/")
        ),
    ],
)
def test_parse_address(text: str, want: ModelReference | None) -> None:
    """`OWNER/` before a reference names the owner. A parsed address prints as text that parses to the same."""
    if want is None:
        with pytest.raises(Refused, match="DNS label"):
            parse_address(text)
        return
    assert parse_address(text) == want
    assert parse_address(str(want)) == want
    if want.owner is not None:
        with pytest.raises(Refused, match="DNS label"):
            parse_reference(text)


@pytest.mark.parametrize(
    ("owner", "want"),
    [pytest.param("acme", "m", id="one's own"), pytest.param("other", "other/m", id="another tenant's")],
)
def test_qualified_model_name_splits_back(owner: str, want: str) -> None:
    """A model's qualified name, as a tenant sees it, splits back into owner and model, and is a valid model name."""
    assert qualified_model_name("acme", owner, "m") == want
    assert split_qualified_name("acme", want) == (owner, "m")
    assert require_model_name(want, "models") == want


@pytest.mark.parametrize("value", ["", "/m", "a/", "a/b/c", "A/m", "a/m@x"])
def test_invalid_model_name_is_refused_with_the_value(value: str) -> None:
    """The refusal names the field, the whole value and the rule."""
    with pytest.raises(Refused, match=f"models='{value}': must be MODEL or OWNER/MODEL.*without the alias"):
        require_model_name(value, "models")


@pytest.mark.parametrize(
    ("text", "want"),
    [
        pytest.param("0123456789abcdef" * 4, True, id="64 digits"),
        pytest.param("a" * 63, False, id="one less"),
        pytest.param("a" * 65, False, id="one more"),
        pytest.param("A" * 64, False, id="upper case"),
        pytest.param("g" * 64, False, id="other letters"),
        pytest.param("٣" * 64, False, id="other digits"),
        pytest.param("a" * 64 + "\n", False, id="a line's end"),
        pytest.param("", False, id="nothing"),
    ],
)
def test_digest_is_64_lower_case_hex_digits(text: str, want: bool) -> None:
    assert is_digest(text) is want
