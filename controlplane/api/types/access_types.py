"""Define the bodies of the routes of tenants and keys. The command line renders them."""

from typing import Annotated

from msgspec import Meta

from kelvin.contracts.patches import patch_of
from kelvin.contracts.serving.control_messages import Scope, TenantLimits
from kelvin.contracts.wire import Wire

DAY_S = 86_400
LifeS = Annotated[int, Meta(ge=1, le=3650 * DAY_S)]
OverlapS = Annotated[int, Meta(ge=0, le=90 * DAY_S)]


class NewTenant(Wire, frozen=True):
    """Body of `POST /admin/v1/tenants`."""

    tenant: str


class StatedLimits(TenantLimits, frozen=True, omit_defaults=False):
    """All of a tenant's limits. Null means the installation's setting."""


class TenantStatus(Wire, frozen=True):
    """A tenant, its state, and how many models and keys it has."""

    tenant: str
    state: str  # "active" or "suspended"
    created_at_s: int
    models: int
    keys: int  # active ones
    limits: StatedLimits


SetLimits = patch_of(
    TenantLimits,
    "SetLimits",
    "Body of `PUT /admin/v1/tenants/T/limits`. Omitted limits stay. Null means the installation's setting.",
)


class Tenants(Wire, frozen=True):
    """Answer of `GET /admin/v1/tenants`."""

    tenants: tuple[TenantStatus, ...]


class NewKey(Wire, frozen=True):
    """Body of `POST /admin/v1/keys`. Without `models` the key may call all; without `expires_in_s` it never expires."""

    name: str
    scopes: tuple[Scope, ...]
    models: tuple[str, ...] = ()
    expires_in_s: LifeS | None = None


class Rotate(Wire, frozen=True):
    """Body of `POST /admin/v1/keys/ID/rotate`: for how many seconds the old key stays valid."""

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
    """Answer of `GET /admin/v1/keys`."""

    keys: tuple[KeyStatus, ...]


class MadeKey(Wire, frozen=True):
    """A new key. `secret` is its text and is shown only once. `old` is the key that it replaces."""

    key: KeyStatus
    secret: str
    old: KeyStatus | None = None


class RevokedKey(Wire, frozen=True):
    """A revoked key. `told`: every activator that follows the feed knew of it before this answer."""

    key: KeyStatus
    told: bool
