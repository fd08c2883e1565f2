"""Decide who may give which key to whom, which names and scopes a key may have, and when it is active. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kelvin.contracts.errors import Conflict, Forbidden, InvalidRequest, NotFound, Refused
from kelvin.contracts.names import qualified_model_name, require_model_name, split_qualified_name
from kelvin.contracts.redaction import redact
from kelvin.contracts.serving.control_messages import Principal, Scope, scope_allows

OPERATOR_TENANT: Final = "default"  # the installation's own tenant: operators belong to it, and it can't be deleted
MAX_MODELS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,62}")


class TenantState(StrEnum):
    """State of a tenant. A deleted tenant's row is kept, so that no new tenant gets its name and its leftovers."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETED = "deleted"


class KeyState(StrEnum):
    """State of a key."""

    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KeySpec:
    """Name, scopes and models of a new key."""

    name: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] = ()  # `M`, or `OWNER/M` for another tenant's model; empty: all


def key_state(expires_at_s: int | None, revoked_at_s: int | None, now_s: int) -> KeyState:
    """Return the state of a key. Revoked precedes expired. A key expires when its second of expiry begins."""
    if revoked_at_s is not None:
        return KeyState.REVOKED
    return KeyState.EXPIRED if expires_at_s is not None and expires_at_s <= now_s else KeyState.ACTIVE


def target_tenant(actor: Principal, tenant: str | None) -> str:
    """Return the tenant that a request is about: the caller's own, or for an operator the named one. Raises
    Refused(NotFound) if another caller names another tenant, so that it looks like a missing one.
    """
    if tenant is None or tenant == actor.tenant:
        return actor.tenant
    if not scope_allows(actor.scopes, Scope.OPERATOR):
        raise Refused(NotFound("tenant", tenant[:63]))
    return tenant


def check_key_spec(actor: Principal, tenant: str, grant: KeySpec) -> KeySpec:
    """Return the spec with scopes and models in order. Raises Refused: InvalidRequest, Forbidden."""
    if _NAME.fullmatch(grant.name) is None or redact(grant.name) != grant.name:
        rule = "must be 1-63 letters, digits, spaces and . _ @ -, the first a letter or digit, and hold no key"
        raise Refused(InvalidRequest("name", repr(grant.name[:80]), rule))
    if not grant.scopes:
        raise Refused(InvalidRequest("scopes", "[]", f"must be some of {', '.join(Scope)}"))
    if Scope.OPERATOR in grant.scopes:
        check_may_manage(actor, grant.scopes)
        if tenant != OPERATOR_TENANT:
            rule = f"operators belong to the tenant '{OPERATOR_TENANT}'"
            raise Refused(InvalidRequest("scopes", str(Scope.OPERATOR), rule))
    models = {_relative_model_name(tenant, require_model_name(model, "models")) for model in grant.models}
    if len(grant.models) > MAX_MODELS:
        raise Refused(InvalidRequest("models", f"({len(grant.models)})", f"must be {MAX_MODELS} or fewer"))
    if grant.models and set(grant.scopes) != {Scope.INFER}:
        rule = f"only a key with the scope '{Scope.INFER}' alone can be held to some models"
        raise Refused(InvalidRequest("models", ", ".join(grant.models)[:80], rule))
    scopes = tuple(scope for scope in Scope if scope in grant.scopes)
    return KeySpec(grant.name, scopes, tuple(sorted(models)))


def check_may_manage(actor: Principal, scopes: Sequence[Scope]) -> None:
    """Check that only an operator creates, rotates or revokes an operator's key. Raises Refused(Forbidden)."""
    if Scope.OPERATOR in scopes and not scope_allows(actor.scopes, Scope.OPERATOR):
        raise Refused(Forbidden(Scope.OPERATOR))


def rotated_key_expiry_s(expires_at_s: int | None, now_s: int, overlap_s: int) -> int:
    """Return when a rotated key expires: after the overlap, or at its own expiry if that is earlier."""
    ends_s = now_s + overlap_s
    return ends_s if expires_at_s is None else min(ends_s, expires_at_s)


def successor_expiry_s(created_at_s: int, expires_at_s: int | None, now_s: int) -> int | None:
    """Return when a key's successor expires: it has the lifetime that the old key was created with."""
    return None if expires_at_s is None else now_s + expires_at_s - created_at_s


def check_not_last(key_id: str, scopes: Sequence[Scope], permanent_operator_keys: Sequence[str]) -> None:
    """Check that an operator key which never expires remains. Raises Refused(Conflict).

    `permanent_operator_keys` are the ids of active keys that don't expire.
    """
    if Scope.OPERATOR in scopes and set(permanent_operator_keys) <= {key_id}:
        rule = "it is the last key of an operator that does not expire; create another one first"
        raise Refused(Conflict(f"key {key_id}", rule))


def check_state_change(tenant: str, new_state: TenantState) -> None:
    """Check that the installation's own tenant stays active. Raises Refused(Conflict)."""
    if tenant == OPERATOR_TENANT and new_state is not TenantState.ACTIVE:
        raise Refused(Conflict(f"tenant '{tenant}'", "it is the operators' and stays active"))


def check_empty(tenant: str, models: Sequence[str], keys: Sequence[str]) -> None:
    """Check that a tenant to be deleted has no model and no active key. Raises Refused(Conflict) naming the rest."""
    left = [f"{what} {_join_limited(names)}" for what, names in (("models", models), ("keys", keys)) if names]
    if left:
        raise Refused(
            Conflict(f"tenant '{tenant}'", f"is not empty: {'; '.join(left)}; with `force` they are deleted, too")
        )


def _relative_model_name(tenant: str, model: str) -> str:
    """Return the model's name as the tenant itself uses it: T calls `T/M` just `M`."""
    return qualified_model_name(tenant, *split_qualified_name(tenant, model))


def _join_limited(names: Sequence[str], max_names: int = 8) -> str:
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return ", ".join(names[:max_names]) + more
