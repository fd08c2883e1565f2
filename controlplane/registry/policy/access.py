"""Who may give which key to whom, what a key may be called, and when one is good: tables and rules, no storage."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from kelvin.contracts.errors import Conflict, Forbidden, InvalidRequest, NotFound, Refused
from kelvin.contracts.names import qualified_model_name, require_model_name, split_qualified_name
from kelvin.contracts.redaction import redact
from kelvin.contracts.serving.control_messages import Principal, Scope, scope_allows

OPERATOR_TENANT: Final = "default"  # the installation's own tenant: operators belong to it, and it is always there
MAX_MODELS: Final = 64
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,62}")


class TenantState(StrEnum):
    """Life of a tenant. A deleted one is kept, so that nobody else gets its name and with it what it left."""

    ACTIVE = "active"
    SUSPENDED = "suspended"
    DELETED = "deleted"


class KeyState(StrEnum):
    """Whether a key is good."""

    ACTIVE = "active"
    EXPIRED = "expired"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KeySpec:
    """What a new key shall be."""

    name: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] = ()  # `M`, or `OWNER/M` of another tenant


def key_state(expires_at_s: int | None, revoked_at_s: int | None, now_s: int) -> KeyState:
    """Revoked weighs more; a key is good until its second of expiry begins."""
    if revoked_at_s is not None:
        return KeyState.REVOKED
    return KeyState.EXPIRED if expires_at_s is not None and expires_at_s <= now_s else KeyState.ACTIVE


def target_tenant(by: Principal, tenant: str | None) -> str:
    """Return the tenant that a request is about: the caller's own, or for an operator the one named. Raises
    Refused(NotFound) if another caller names another tenant, so that it looks like one that does not exist.
    """
    if tenant is None or tenant == by.tenant:
        return by.tenant
    if not scope_allows(by.scopes, Scope.OPERATOR):
        raise Refused(NotFound("tenant", tenant[:63]))
    return tenant


def check_key_spec(by: Principal, tenant: str, grant: KeySpec) -> KeySpec:
    """The grant with its scopes and models in order. Raises Refused: InvalidRequest, Forbidden."""
    if _NAME.fullmatch(grant.name) is None or redact(grant.name) != grant.name:
        rule = "must be 1-63 letters, digits, spaces and . _ @ -, the first a letter or digit, and hold no key"
        raise Refused(InvalidRequest("name", repr(grant.name[:80]), rule))
    if not grant.scopes:
        raise Refused(InvalidRequest("scopes", "[]", f"must be some of {', '.join(Scope)}"))
    if Scope.OPERATOR in grant.scopes:
        check_may_manage(by, grant.scopes)
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


def check_may_manage(by: Principal, scopes: Sequence[Scope]) -> None:
    """Only an operator gives, renews or takes an operator's key. Raises Refused(Forbidden)."""
    if Scope.OPERATOR in scopes and not scope_allows(by.scopes, Scope.OPERATOR):
        raise Refused(Forbidden(Scope.OPERATOR))


def rotated_key_expiry_s(expires_at_s: int | None, now_s: int, overlap_s: int) -> int:
    """When a key that was rotated ends: after the overlap, or earlier where it would have anyway."""
    ends_s = now_s + overlap_s
    return ends_s if expires_at_s is None else min(ends_s, expires_at_s)


def successor_expiry_s(created_at_s: int, expires_at_s: int | None, now_s: int) -> int | None:
    """When the key that follows another expires: it lives as long as that one was made for."""
    return None if expires_at_s is None else now_s + expires_at_s - created_at_s


def check_not_last(key_id: str, scopes: Sequence[Scope], permanent_operator_keys: Sequence[str]) -> None:
    """Nobody locks the installation's door from outside. `permanent_operator_keys`: good keys that don't expire."""
    if Scope.OPERATOR in scopes and set(permanent_operator_keys) <= {key_id}:
        rule = "it is the last key of an operator that does not expire; create another one first"
        raise Refused(Conflict(f"key {key_id}", rule))


def check_state_change(tenant: str, wanted: TenantState) -> None:
    """The installation's own tenant stays. Raises Refused(Conflict)."""
    if tenant == OPERATOR_TENANT and wanted is not TenantState.ACTIVE:
        raise Refused(Conflict(f"tenant '{tenant}'", "it is the operators' and stays active"))


def check_empty(tenant: str, models: Sequence[str], keys: Sequence[str]) -> None:
    """A tenant is deleted when it has no model and no good key. Raises Refused(Conflict) naming what is left."""
    left = [f"{what} {_join_limited(names)}" for what, names in (("models", models), ("keys", keys)) if names]
    if left:
        raise Refused(
            Conflict(f"tenant '{tenant}'", f"is not empty: {'; '.join(left)}; with `force` they are deleted, too")
        )


def _relative_model_name(tenant: str, model: str) -> str:
    """As the tenant itself calls it: `T/M` is `M` to T."""
    return qualified_model_name(tenant, *split_qualified_name(tenant, model))


def _join_limited(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
