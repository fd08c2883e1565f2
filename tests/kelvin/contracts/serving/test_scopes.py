"""The scopes that each scope includes."""

import pytest

from kelvin.contracts.serving.control_messages import Scope, scope_allows

INFER, PUSH, BILLING, ADMIN, OPERATOR = Scope.INFER, Scope.PUSH, Scope.BILLING_READ, Scope.ADMIN, Scope.OPERATOR


@pytest.mark.parametrize(
    ("held", "brings"),
    [
        (INFER, {INFER}),
        (PUSH, {PUSH}),
        (BILLING, {BILLING}),
        (ADMIN, {ADMIN, PUSH, BILLING}),
        (OPERATOR, {OPERATOR, ADMIN, PUSH, BILLING}),
    ],
)
def test_scope_includes_exactly_these_scopes(held: Scope, brings: set[Scope]) -> None:
    """A scope includes exactly these. Several scopes add up."""
    assert {scope for scope in Scope if scope_allows((held,), scope)} == brings
    assert scope_allows((INFER, held), INFER)
