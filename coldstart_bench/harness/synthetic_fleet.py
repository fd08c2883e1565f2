"""Generate a fleet of models: a hundred per tenant, one version each, the same at each call. Pure."""

import hashlib
from typing import Final

from kelvin.contracts.artifacts.manifest import Limits
from kelvin.contracts.serving.control_messages import (
    Feed,
    KeyRow,
    ModelRow,
    Scope,
    TenantRow,
    VersionRegistration,
    VersionRow,
)

EACH: Final = 100  # models per tenant
CREATED_S: Final = 1_700_000_000
LIMITS: Final = Limits(max_input_tokens=4096, max_output_tokens=4096, max_streams=64, max_body_bytes=8 << 20)


def tenant_of(number: int) -> str:
    """Return the tenant of model `number`."""
    return f"team-{number // EACH:03}"


def model_of(number: int) -> str:
    """Return the name of model `number`."""
    return f"assistant-{number:05}"


def version_of(number: int) -> str:
    """Return the only version of model `number`: 64 hexadecimal digits."""
    return hashlib.sha256(b"%d" % number).hexdigest()


def key_of(tenant: str) -> str:
    """Return the only API key of a tenant."""
    return f"kv-{tenant.replace('-', ''):0>12}-{hashlib.sha256(tenant.encode()).hexdigest()[:43]}"


def tenants_of(count: int) -> tuple[str, ...]:
    """Return the tenants of the first `count` models."""
    return tuple(dict.fromkeys(tenant_of(number) for number in range(0, count, EACH)))


def registration_of(number: int) -> VersionRegistration:
    """Return the snapshotter's registration of model `number`, with 16 GB of weights."""
    return VersionRegistration(
        tenant=tenant_of(number),
        model=model_of(number),
        version=version_of(number),
        limits=LIMITS,
        architecture="LlamaForCausalLM",
        weight_bytes=16_000_000_000,
        total_bytes=16_000_100_000,
        kv_bytes_per_token=131_072,
        max_positions=131_072,
    )


def fleet_feed(count: int) -> Feed:
    """Return the first feed message that activators get about `count` models."""
    tenants, every = tenants_of(count), range(count)
    return Feed(
        revision=1,
        full=True,
        tenants=tuple(TenantRow(tenant=each, suspended=False) for each in tenants),
        keys=tuple(
            KeyRow(
                key_id=each,
                secret_sha256=hashlib.sha256(key_of(each).encode()).hexdigest(),
                tenant=each,
                scopes=(Scope.INFER,),
            )
            for each in tenants
        ),
        models=tuple(ModelRow(tenant_of(n), model_of(n), {"prod": version_of(n)}, CREATED_S) for n in every),
        versions=tuple(VersionRow(tenant_of(n), model_of(n), version_of(n), LIMITS, CREATED_S) for n in every),
    )
