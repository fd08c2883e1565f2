"""Permissions to create keys, and the validity of keys, as tables."""

import pytest

from controlplane.registry.policy.access import (
    KeySpec,
    KeyState,
    TenantState,
    check_empty,
    check_key_spec,
    check_not_last,
    check_state_change,
    key_state,
    rotated_key_expiry_s,
    successor_expiry_s,
    target_tenant,
)
from kelvin.contracts.errors import Conflict, Forbidden, InvalidRequest, NotFound, Refused
from kelvin.contracts.serving.control_messages import Principal, Scope

ADMIN = Principal(key_id="k", tenant="acme", scopes=(Scope.ADMIN,))
OPERATOR = Principal(key_id="o", tenant="default", scopes=(Scope.OPERATOR,))
SECRET = "kv-abcdefghijkl-" + "x" * 43
INFER, PUSH, BILLING, ADMINS, OPERATES = Scope.INFER, Scope.PUSH, Scope.BILLING_READ, Scope.ADMIN, Scope.OPERATOR


@pytest.mark.parametrize(
    ("expires_at_s", "revoked_at_s", "want"),
    [
        pytest.param(None, None, KeyState.ACTIVE, id="without an expiry"),
        pytest.param(101, None, KeyState.ACTIVE, id="a second before its expiry"),
        pytest.param(100, None, KeyState.EXPIRED, id="in the second of its expiry"),
        pytest.param(None, 50, KeyState.REVOKED, id="revoked"),
        pytest.param(60, 50, KeyState.REVOKED, id="revoked and expired"),
    ],
)
def test_key_state(expires_at_s: int | None, revoked_at_s: int | None, want: KeyState) -> None:
    assert key_state(expires_at_s, revoked_at_s, 100) is want


@pytest.mark.parametrize(
    ("actor", "tenant", "grant"),
    [
        pytest.param(ADMIN, "acme", KeySpec("ci", (PUSH,)), id="an admin gives a key to push"),
        pytest.param(ADMIN, "acme", KeySpec("a.b_c@d-e f", (ADMINS,)), id="another admin"),
        pytest.param(ADMIN, "acme", KeySpec("app", (INFER,), ("llama",)), id="for one model"),
        pytest.param(
            ADMIN, "acme", KeySpec("app", (INFER,), ("llama", "other/llama")), id="for another tenant's model"
        ),
        pytest.param(ADMIN, "acme", KeySpec("books", (BILLING,)), id="for the bill"),
        pytest.param(OPERATOR, "acme", KeySpec("first", (ADMINS,)), id="an operator creates a tenant's first admin"),
        pytest.param(
            OPERATOR, "default", KeySpec("second", (ADMINS, OPERATES)), id="an operator creates another operator"
        ),
    ],
)
def test_valid_key_spec_is_accepted(actor: Principal, tenant: str, grant: KeySpec) -> None:
    assert check_key_spec(actor, tenant, grant) == grant


def test_key_spec_is_normalized() -> None:
    """Scopes and models are sorted and unique."""
    assert check_key_spec(ADMIN, "acme", KeySpec("x", (ADMINS, INFER, ADMINS))).scopes == (INFER, ADMINS)
    assert check_key_spec(ADMIN, "acme", KeySpec("x", (INFER,), ("b", "a", "b"))).models == ("a", "b")


@pytest.mark.parametrize(
    ("actor", "tenant", "grant", "kind", "says"),
    [
        pytest.param(ADMIN, "acme", KeySpec("", (INFER,)), InvalidRequest, "name=''", id="no name"),
        pytest.param(ADMIN, "acme", KeySpec("a\nb", (INFER,)), InvalidRequest, "letters", id="a line break"),
        pytest.param(ADMIN, "acme", KeySpec("x" * 64, (INFER,)), InvalidRequest, "1-63", id="a long name"),
        pytest.param(ADMIN, "acme", KeySpec(SECRET, (INFER,)), InvalidRequest, "hold no key", id="a key for a name"),
        pytest.param(ADMIN, "acme", KeySpec("x", ()), InvalidRequest, "infer, push", id="no scope"),
        pytest.param(
            ADMIN, "acme", KeySpec("x", (INFER,), ("No",)), InvalidRequest, "DNS label", id="a bad model name"
        ),
        pytest.param(ADMIN, "acme", KeySpec("x", (ADMINS,), ("m",)), InvalidRequest, "alone", id="an admin of a model"),
        pytest.param(
            ADMIN, "acme", KeySpec("x", (INFER, PUSH), ("m",)), InvalidRequest, "alone", id="one model and two scopes"
        ),
        pytest.param(ADMIN, "acme", KeySpec("x", (OPERATES,)), Forbidden, "operator", id="an admin makes no operator"),
        pytest.param(
            OPERATOR,
            "acme",
            KeySpec("x", (OPERATES,)),
            InvalidRequest,
            "'default'",
            id="an operator key of another tenant",
        ),
        pytest.param(
            ADMIN,
            "acme",
            KeySpec("x", (INFER,), tuple(f"m{n}" for n in range(65))),
            InvalidRequest,
            "64",
            id="too many models",
        ),
    ],
)
def test_invalid_key_spec_is_refused(actor: Principal, tenant: str, grant: KeySpec, kind: type, says: str) -> None:
    """The error names the value and the rule. It never shows a secret."""
    with pytest.raises(Refused, match=says) as caught:
        check_key_spec(actor, tenant, grant)
    assert isinstance(caught.value.failure, kind)


@pytest.mark.parametrize(
    ("actor", "tenant", "want"),
    [
        pytest.param(ADMIN, None, "acme", id="its own tenant by default"),
        pytest.param(ADMIN, "acme", "acme", id="its own tenant by name"),
        pytest.param(OPERATOR, "acme", "acme", id="an operator names any"),
    ],
)
def test_target_tenant(actor: Principal, tenant: str | None, want: str) -> None:
    assert target_tenant(actor, tenant) == want


def test_foreign_tenant_is_not_found() -> None:
    """This holds for an admin who is no operator."""
    with pytest.raises(Refused) as caught:
        target_tenant(ADMIN, "other")
    assert caught.value.failure == NotFound("tenant", "other")


@pytest.mark.parametrize(
    ("expires_at_s", "overlap_s", "want"),
    [
        pytest.param(None, 60, 160, id="after the overlap"),
        pytest.param(150, 60, 150, id="not later than it would have ended"),
        pytest.param(None, 0, 100, id="without an overlap"),
    ],
)
def test_rotated_key_expiry(expires_at_s: int | None, overlap_s: int, want: int) -> None:
    assert rotated_key_expiry_s(expires_at_s, 100, overlap_s) == want


def test_successor_key_has_the_same_lifetime() -> None:
    """The lifetime counts from now. A successor of a key without an expiry has none."""
    assert successor_expiry_s(40, 90, 100) == 150
    assert successor_expiry_s(40, None, 100) is None


@pytest.mark.parametrize(
    ("key_id", "scopes", "lasting", "refused"),
    [
        pytest.param("a", (OPERATES,), ("a",), True, id="the last one stays"),
        pytest.param("a", (OPERATES,), ("a", "b"), False, id="one of two can be revoked"),
        pytest.param("a", (OPERATES,), (), True, id="a temporary key when no permanent one exists"),
        pytest.param("a", (ADMINS,), ("b",), False, id="not an operator key"),
    ],
)
def test_last_permanent_operator_key_stays(
    key_id: str, scopes: tuple[Scope, ...], lasting: tuple[str, ...], refused: bool
) -> None:
    """An installation always keeps an operator key that does not expire."""
    if not refused:
        return check_not_last(key_id, scopes, lasting)
    with pytest.raises(Refused, match="last key of an operator"):
        check_not_last(key_id, scopes, lasting)
    return None


def test_operator_tenant_is_never_suspended() -> None:
    """It is not deleted either. Other tenants can be both."""
    for state in (TenantState.SUSPENDED, TenantState.DELETED):
        with pytest.raises(Refused, match="stays active"):
            check_state_change("default", state)
        check_state_change("acme", state)
    check_state_change("default", TenantState.ACTIVE)


def test_non_empty_tenant_names_models_and_keys() -> None:
    """The error lists models and keys, and only the first of many."""
    check_empty("acme", [], [])
    with pytest.raises(Refused) as caught:
        check_empty("acme", [f"m{n}" for n in range(10)], ["k1"])
    left = "models m0, m1, m2, m3, m4, m5, m6, m7 and 2 more; keys k1"
    want = Conflict("tenant 'acme'", f"is not empty: {left}; with `force` they are deleted, too")
    assert caught.value.failure == want
