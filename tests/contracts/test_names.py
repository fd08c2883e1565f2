"""Names in a request are DNS labels, and a reference means exactly one thing."""

import pytest

from contracts.errors import InvalidRequest, Refused
from contracts.names import ModelReference, dns_label, parse_reference


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
    """`M`, `M@alias` and `M@version` are told apart by form alone."""
    assert parse_reference(text) == want


@pytest.mark.parametrize("text", ["", "M", "-m", "m-", "m_x", "a" * 64, "m@", "m@UP", "m/../x", "m\n"])
def test_a_bad_name_is_refused_by_value_and_rule(text: str) -> None:
    """What is no DNS label is refused, and the error says which value broke which rule."""
    with pytest.raises(Refused) as refused:
        parse_reference(text)
    assert isinstance(refused.value.failure, InvalidRequest)
    assert "DNS label" in refused.value.failure.message


def test_the_longest_label_is_63() -> None:
    """RFC 1123's limit is inclusive."""
    assert dns_label("a" * 63, "model") == "a" * 63
