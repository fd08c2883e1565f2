"""Names in a request: tenants and models are DNS labels, versions are digests, references combine them."""

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from kelvin.contracts.errors import InvalidRequest, Refused

# An RFC 1123 label, so that host-based endpoints and Kubernetes objects can use it.
_LABEL: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_VERSION_PREFIX: Final = re.compile(r"[0-9a-f]{12,64}")
_DEVICE_CLASS: Final = re.compile(r"[ -~]{1,64}")  # what the meter page and the ledger can store
DEVICE_CLASS_RULE: Final = "must be 1 to 64 printable ASCII characters"
DIGEST_HEX: Final = 64
_DIGEST: Final = re.compile(rf"[0-9a-f]{{{DIGEST_HEX}}}")
CACHED_REFERENCES: Final = 512  # size of the cache of parsed references: callers use the same few
DEFAULT_ALIAS: Final = "prod"
# First segments of Kelvin's own paths. A tenant of that name could never use the path form of a model.
RESERVED_TENANTS: Final = frozenset({"admin", "push", "v1", "v2"})


def is_dns_label(value: str) -> bool:
    """Return whether `value` can be the name of a tenant or model."""
    return _LABEL.fullmatch(value) is not None


def is_digest(text: str) -> bool:
    """Return whether the text is a complete digest, the name of a version or chunk: 64 hex digits in lower case."""
    return _DIGEST.fullmatch(text) is not None


def require_dns_label(value: str, field: str) -> str:
    """Return `value` if it is a DNS label. Otherwise raises `Refused(InvalidRequest)` with the value and the rule."""
    if not is_dns_label(value):
        rule = "must be a DNS label (1-63 of a-z, 0-9 and '-', not at either end)"
        raise Refused(InvalidRequest(field, repr(value[:80]), rule))
    return value


def require_tenant_name(value: str) -> str:
    """Return `value` if a new tenant may have that name. Otherwise raises `Refused(InvalidRequest)`."""
    if require_dns_label(value, "tenant") in RESERVED_TENANTS:
        raise Refused(InvalidRequest("tenant", repr(value), "is reserved, as our own paths begin with it"))
    return value


@dataclass(frozen=True, slots=True)
class ModelReference:
    """`M`, `M@alias` or `M@<12 or more hex of the version>`. Exactly one of alias and version_prefix is set."""

    model: str
    alias: str | None
    version_prefix: str | None
    owner: str | None = None  # the tenant named in the reference; None: the caller's own

    def __str__(self) -> str:
        whose = "" if self.owner is None else f"{self.owner}/"
        return f"{whose}{self.model}@{self.alias or self.version_prefix}"


def is_device_class(value: str) -> bool:
    """Return whether `value` can name a device class. A longer name would be cut, and billed as another class."""
    return _DEVICE_CLASS.fullmatch(value) is not None


def qualified_model_name(caller: str, owner: str, model: str) -> str:
    """Return the model's name as the caller sees it: `M` for its own model, `OWNER/M` for another tenant's. So two
    models never have the same name for one caller.
    """
    return model if owner == caller else f"{owner}/{model}"


def split_qualified_name(caller: str, named: str) -> tuple[str, str]:
    """Return (owner, model) of a name that `qualified_model_name` made. `model` is the owner's name for it."""
    owner, slash, model = named.partition("/")
    return (owner, model) if slash else (caller, named)


def require_model_name(value: str, field: str) -> str:
    """Return `value` if it is `M` or `OWNER/M`. Otherwise raises `Refused(InvalidRequest)` with the rule."""
    if not all(map(is_dns_label, value.split("/", 1))):
        rule = "must be MODEL or OWNER/MODEL, each a DNS label, without the alias or version that may follow '@'"
        raise Refused(InvalidRequest(field, repr(value[:130]), rule))
    return value


@lru_cache(CACHED_REFERENCES)  # valid references only: a refused one raises and is not cached
def parse_reference(text: str) -> ModelReference:
    """Parse a reference. After `@`, 12 to 64 hex digits are a version, and other text is an alias. The default is
    `prod`. Raises `Refused(InvalidRequest)` if model or alias is not a DNS label.
    """
    model, at, rest = text.partition("@")
    require_dns_label(model, "model")
    if not at:
        return ModelReference(model, DEFAULT_ALIAS, None)
    if _VERSION_PREFIX.fullmatch(rest):
        return ModelReference(model, None, rest)
    return ModelReference(model, require_dns_label(rest, "alias"), None)


def parse_address(text: str) -> ModelReference:
    """Parse a reference that may have `OWNER/` before it: another tenant's model. Raises `Refused(InvalidRequest)`."""
    owner, slash, reference = text.partition("/")
    if not slash:
        return parse_reference(text)
    return replace(parse_reference(reference), owner=require_dns_label(owner, "model"))
