"""What the routes of tenants and keys take and answer. Rendering is the command line's."""

from typing import Annotated

from msgspec import UNSET, Meta, UnsetType

from contracts.control import MAX_WEIGHT, Priority, Scope, TenantLimits
from contracts.ladder import PlanName
from contracts.numbers import MAX_LIMIT
from contracts.wire import Wire

DAY_S = 86_400
LifeS = Annotated[int, Meta(ge=1, le=3650 * DAY_S)]
OverlapS = Annotated[int, Meta(ge=0, le=90 * DAY_S)]


class NewTenant(Wire, frozen=True):
    """Body of `POST /admin/v1/tenants`."""

    tenant: str


class StatedLimits(TenantLimits, frozen=True, omit_defaults=False):
    """All of a tenant's limits: null is the installation's setting."""


class TenantStatus(Wire, frozen=True):
    """A tenant, its state and how much it has."""

    tenant: str
    state: str  # "active" or "suspended"
    created_at_s: int
    models: int
    keys: int  # good ones
    limits: StatedLimits


class SetLimits(Wire, frozen=True):
    """Body of `PUT /admin/v1/tenants/T/limits`: what is not given stays, null is the installation's setting."""

    store_bytes: Annotated[int, Meta(ge=0, le=MAX_LIMIT)] | UnsetType | None = UNSET
    requests: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] | UnsetType | None = UNSET
    body_bytes: Annotated[int, Meta(ge=1024, le=MAX_LIMIT)] | UnsetType | None = UNSET
    rpm: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] | UnsetType | None = UNSET
    tpm: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] | UnsetType | None = UNSET
    context_tokens: Annotated[int, Meta(ge=2, le=MAX_LIMIT)] | UnsetType | None = UNSET
    output_tokens: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] | UnsetType | None = UNSET
    budget_micros: Annotated[int, Meta(ge=0, le=MAX_LIMIT)] | UnsetType | None = UNSET
    weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT)] | UnsetType | None = UNSET
    priority: Priority | UnsetType | None = UNSET
    plan: PlanName | UnsetType | None = UNSET
    deadline_max_s: Annotated[int, Meta(ge=1, le=MAX_LIMIT)] | UnsetType | None = UNSET

    def given(self) -> dict[str, int | str | None]:
        """What is to change, by name."""
        found = {name: getattr(self, name) for name in self.__struct_fields__}
        return {name: value for name, value in found.items() if value is not UNSET}


class Tenants(Wire, frozen=True):
    """`GET /admin/v1/tenants`."""

    tenants: tuple[TenantStatus, ...]


class NewKey(Wire, frozen=True):
    """Body of `POST /admin/v1/keys`. Without `models` all may be called; without `expires_in_s` it stays good."""

    name: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] = ()
    expires_in_s: LifeS | None = None


class Rotate(Wire, frozen=True):
    """Body of `POST /admin/v1/keys/ID/rotate`: for how long the old one stays good."""

    overlap_s: OverlapS


class KeyStatus(Wire, frozen=True):
    """A key without its secret."""

    key_id: str
    tenant: str
    name: str
    state: str  # "active", "expired" or "revoked"
    scopes: tuple[Scope, ...]
    models: tuple[str, ...]
    created_at_s: int
    expires_at_s: int | None
    revoked_at_s: int | None
    last_used_at_s: int | None  # to the minute
    successor: str | None


class Keys(Wire, frozen=True):
    """`GET /admin/v1/keys`."""

    keys: tuple[KeyStatus, ...]


class MadeKey(Wire, frozen=True):
    """A new key; `secret` is its text, told this once. `old` is the key that it follows."""

    key: KeyStatus
    secret: str
    old: KeyStatus | None = None


class RevokedKey(Wire, frozen=True):
    """`told`: every activator that follows the feed was told before this was said."""

    key: KeyStatus
    told: bool
