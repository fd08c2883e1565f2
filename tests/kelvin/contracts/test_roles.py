"""The role in a certificate's URIs, and which paths a role may call."""

import pytest

from kelvin.contracts.roles import Role, role_may_call, role_of

HERE = "spiffe://kelvin/"


@pytest.mark.parametrize(
    ("uris", "prefix", "want"),
    [
        pytest.param(["spiffe://kelvin/runtime"], HERE, Role.RUNTIME, id="the prefix, then the role"),
        pytest.param(["https://a/b/agent"], "https://a/b/", Role.AGENT, id="a prefix of the operator's"),
        pytest.param(
            ["spiffe://cluster.local/ns/kelvin/sa/activator"], "spiffe://cluster.local/ns/kelvin/sa/", Role.ACTIVATOR,
            id="a service account of that name",
        ),
        pytest.param(["urn:x", "spiffe://kelvin/runtime"], HERE, Role.RUNTIME, id="another URI beside it"),
        pytest.param([], HERE, None, id="none"),
        pytest.param(["spiffe://kelvin/"], HERE, None, id="the prefix alone"),
        pytest.param(["spiffe://kelvin/Runtime"], HERE, None, id="in capitals"),
        pytest.param(["spiffe://kelvin/runtime/"], HERE, None, id="a slash behind it"),
        pytest.param(["spiffe://kelvin/runtime", "spiffe://kelvin/agent"], HERE, None, id="two roles"),
        pytest.param(["spiffe://kelvin/runtime", "spiffe://kelvin/x"], HERE, None, id="a role and something else"),
        pytest.param(["spiffe://kelvin.org/runtime"], HERE, None, id="another installation"),
    ],
)  # fmt: skip
def test_role_needs_exactly_one_uri(uris: list[str], prefix: str, want: Role | None) -> None:
    """A role needs exactly one URI of this installation."""
    assert role_of(uris, prefix) == want


RULES = {
    "/a": frozenset({Role.ACTIVATOR}),
    "/a/b": frozenset({Role.RUNTIME, Role.AGENT}),
    "/a/b/none": frozenset[Role](),
    "/1/2/3/4/5/6": frozenset({Role.AGENT}),
}


@pytest.mark.parametrize(
    ("path", "want"),
    [
        pytest.param("/a", {"activator"}, id="a rule's own path"),
        pytest.param("/a/x/y", {"activator"}, id="a path below it"),
        pytest.param("/a/b", {"runtime", "agent"}, id="a nearer rule"),
        pytest.param("/a/b/c", {"runtime", "agent"}, id="below the nearer rule"),
        pytest.param("/a/b/none/at/all", set(), id="a rule without roles"),
        pytest.param("/ab", set(), id="a longer word is not below"),
        pytest.param("/", set(), id="the root"),
        pytest.param("", set(), id="nothing"),
        pytest.param("a", set(), id="no slash before it"),
        pytest.param("//a", set(), id="a slash too many"),
        pytest.param("/A", set(), id="capitals"),
        pytest.param("/x/../a", set(), id="a parent segment is not resolved"),
        pytest.param("/a/", {"activator"}, id="a trailing slash"),
        pytest.param("/1/2/3/4/5/6/7/8", {"agent"}, id="as deep as the rules are looked up"),
        pytest.param("/" * 100_000, set(), id="slashes alone"),
    ],
)
def test_nearest_rule_decides_who_may_call(path: str, want: set[str]) -> None:
    """The nearest rule decides. A path without a rule is refused for all roles."""
    assert {str(role) for role in Role if role_may_call(RULES, role, path)} == want
