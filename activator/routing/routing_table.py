"""Tenants, API keys and models from the feed, found in O(1). Only the feed writes the table."""

import hashlib
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf
from typing import Final, NamedTuple

from activator.routing.policy.version_key import VersionKey
from activator.routing.policy.version_resolution import ModelEntry
from activator.routing.revisions import Revisions
from kelvin.contracts.accounting.spending import SpendingRow
from kelvin.contracts.errors import InvalidRequest, ModelNotFound, Refused, Unavailable
from kelvin.contracts.names import ModelReference
from kelvin.contracts.serving.control_messages import (
    Feed,
    KeyRow,
    ModelRow,
    Principal,
    TenantLimits,
    TenantRow,
    VersionRow,
)
from kelvin.contracts.serving.machine import Machine

NO_LIMITS: Final = TenantLimits()


class _KeyHolder(NamedTuple):
    """A principal, and the expiry of its key."""

    principal: Principal
    expires_at_s: float


class RoutingTable:
    """A snapshot replaces the table, other feed messages update it. `LastFeed.is_fresh` tells if it may be used."""

    def __init__(self) -> None:
        self.revision = 0
        self.machine: Machine | None = None  # the machine's resources for starts
        self._is_loaded = False
        self._tenants: dict[str, TenantRow] = {}
        self._holders: dict[str, _KeyHolder] = {}  # by SHA-256 of the key's text
        self._sha_of_key: dict[str, str] = {}
        self._models: dict[str, dict[str, ModelEntry]] = {}  # tenant -> model
        self._granted: dict[str, set[tuple[str, str]]] = {}  # grantee -> tenant and model of others
        self._list_cache: dict[str, tuple[ModelEntry, ...]] = {}  # by caller, until any entry may change
        self._spending: dict[str, SpendingRow] = {}  # kept for snapshots; `TenantBudgets` uses it
        self.revisions = Revisions()
        # until either changes
        self._row_cache: tuple[tuple[ModelRow, ...], tuple[VersionRow, ...]] | None = None

    def __repr__(self) -> str:
        models = sum(map(len, self._models.values()))
        return f"<RoutingTable revision={self.revision} keys={len(self._holders)} models={models}>"

    def principal(self, key: str, now_s: float) -> Principal | None:
        """Return the holder of an unexpired key, or None. Looked up by digest, so timing reveals nothing about secrets.
        Raises Refused(Unavailable) before the first feed message, when no key is known yet.
        """
        if not self._is_loaded:
            raise Refused(Unavailable("the list of keys"))
        holder = self._holders.get(hashlib.sha256(key.encode()).hexdigest())
        return None if holder is None or holder.expires_at_s <= now_s else holder.principal

    def is_suspended(self, tenant: str) -> bool:
        """Return whether the tenant is suspended, so that its valid keys are refused."""
        row = self._tenants.get(tenant)
        return row is not None and row.suspended

    def has_tenant(self, tenant: str) -> bool:
        """Return whether the tenant exists, suspended or not."""
        return tenant in self._tenants

    def limits(self, tenant: str) -> TenantLimits:
        """Return the tenant's own limits. Unset limits are the installation's."""
        row = self._tenants.get(tenant)
        return NO_LIMITS if row is None else row.limits

    def model(self, tenant: str, model: str) -> ModelEntry | None:
        """Return the tenant's model of that name, or None."""
        return self._models.get(tenant, {}).get(model)

    def backlog_s(self, key: VersionKey) -> float:
        """Return the backlog target in seconds by which the version's model scales; 0: it does not scale by tokens."""
        entry = self.model(key.tenant, key.model)
        return 0.0 if entry is None else entry.backlog_s

    def find_callable_model(self, caller: str, owner: str, model: str) -> ModelEntry | None:
        """Return the model if the caller may call it: its own, or one granted by a tenant that is not suspended."""
        entry = self._models.get(owner, {}).get(model)
        if entry is None or owner == caller or (caller in entry.grantees and not self.is_suspended(owner)):
            return entry
        return None

    def models(self, tenant: str) -> tuple[ModelEntry, ...]:
        """Return the tenant's models by name, then those granted to it. The same object until something changes."""
        listed = self._list_cache.get(tenant)
        if listed is None:
            listed = self._list_cache[tenant] = self._list_models(tenant)
        return listed

    def tenants(self) -> AbstractSet[str]:
        """Return a live view of all tenants, including suspended ones."""
        return self._tenants.keys()

    def snapshot(self) -> Feed:
        """Return the whole table as a snapshot."""
        models, versions = self._row_cache = self._row_cache or self._build_rows()
        return Feed(
            revision=self.revision,
            full=True,
            tenants=tuple(self._tenants.values()),
            keys=tuple(_row(sha, holder) for sha, holder in self._holders.items()),
            models=models,
            versions=versions,
            spending=tuple(self._spending.values()),
            revisions=self.revisions.rows(),
            pools=self.revisions.pools,
            machine=self.machine,
        )

    def apply(self, line: Feed) -> None:
        """Apply a feed message. The throttler applies its replicas and failures."""
        if line.full:
            self._is_loaded = True
            self._tenants, self._holders, self._sha_of_key, self._models, self._granted = {}, {}, {}, {}, {}
            self._spending, self.machine = {}, line.machine
        self.revision = line.revision
        if line.full or line.models or line.versions or line.removed_models or line.removed_versions:
            self._row_cache = None
            self._list_cache = {}
        elif line.tenants or line.removed_tenants:  # an owner may have been suspended or resumed
            self._list_cache = {}
        self._tenants.update((row.tenant, row) for row in line.tenants)
        self._spending.update((row.tenant, row) for row in line.spending)
        for tenant in line.removed_tenants:
            self._tenants.pop(tenant, None)
            self._spending.pop(tenant, None)
        for key in line.keys:
            self._put_key(key)
        for key_id in line.removed_keys:
            self._drop_key(key_id)
        for row in line.models:
            self._put_model(row)
        self._put_versions(line.versions)
        for owner, model in line.removed_models:
            if (entry := self._models.get(owner, {}).pop(model, None)) is not None:
                self._index_grantees(entry, frozenset())
        for owner, model, version in line.removed_versions:
            self._drop_version(owner, model, version)
        self.revisions.apply(line)

    def check_integrity(self) -> None:
        """Assert that both key maps agree, that both grant maps agree, and that versions are sorted and in place."""
        assert {holder.principal.key_id: sha for sha, holder in self._holders.items()} == self._sha_of_key
        for tenant, models in self._models.items():
            for name, entry in models.items():
                assert (entry.tenant, entry.model) == (tenant, name)
                names = [row.version for row in entry.versions]
                assert names == sorted(set(names))
        granted = {(grantee, name) for grantee, names in self._granted.items() for name in names}
        assert granted == {
            (grantee, (entry.tenant, entry.model))
            for models in self._models.values()
            for entry in models.values()
            for grantee in entry.grantees
        }
        assert all(self._granted.values())
        assert self._row_cache in (None, self._build_rows())
        assert all(listed == self._list_models(tenant) for tenant, listed in self._list_cache.items())
        self.revisions.check_integrity()

    def _list_models(self, tenant: str) -> tuple[ModelEntry, ...]:
        found = self._models.get(tenant, {})
        granted = (self.find_callable_model(tenant, *name) for name in sorted(self._granted.get(tenant, ())))
        return (*(found[name] for name in sorted(found)), *(entry for entry in granted if entry is not None))

    def _build_rows(self) -> tuple[tuple[ModelRow, ...], tuple[VersionRow, ...]]:
        """Return the rows of all models and versions. Blocks the event loop for 15 ms with 10,000 rows."""
        entries = [entry for models in self._models.values() for entry in models.values()]
        rows = tuple(
            ModelRow(
                tenant=entry.tenant,
                model=entry.model,
                aliases=entry.aliases,
                created_at_s=entry.created_at_s,
                grantees=tuple(sorted(entry.grantees)),
                split=dict(entry.split),
                ladder=entry.ladder,
                plan_ladders=dict(entry.plan_ladders),
                backlog_s=entry.backlog_s,
                meanwhile=dict(entry.meanwhile),
            )
            for entry in entries
        )
        return rows, tuple(row for entry in entries for row in entry.versions)

    def _put_key(self, row: KeyRow) -> None:
        self._drop_key(row.key_id)
        principal = Principal(key_id=row.key_id, tenant=row.tenant, scopes=row.scopes, models=row.models)
        self._holders[row.secret_sha256] = _KeyHolder(principal, inf if row.expires_at_s is None else row.expires_at_s)
        self._sha_of_key[row.key_id] = row.secret_sha256

    def _drop_key(self, key_id: str) -> None:
        sha = self._sha_of_key.pop(key_id, None)
        if sha is not None:
            del self._holders[sha]

    def _put_model(self, row: ModelRow) -> None:
        models = self._models.setdefault(row.tenant, {})
        before = models.get(row.model)
        versions = () if before is None else before.versions
        grantees = frozenset(row.grantees)
        entry = models[row.model] = ModelEntry(
            row.tenant, row.model, row.aliases, row.created_at_s, versions, grantees, row.split, row.ladder,
            row.plan_ladders, row.backlog_s, row.meanwhile,
        )  # fmt: skip
        self._index_grantees(entry if before is None else before, grantees)

    def _index_grantees(self, before: ModelEntry, grantees: frozenset[str]) -> None:
        """Replace the tenants that may call the model."""
        name = (before.tenant, before.model)
        for grantee in before.grantees - grantees:
            self._granted[grantee].discard(name)
            if not self._granted[grantee]:
                del self._granted[grantee]
        for grantee in grantees:
            self._granted.setdefault(grantee, set()).add(name)

    def _put_versions(self, rows: Iterable[VersionRow]) -> None:
        fresh: dict[tuple[str, str], dict[str, VersionRow]] = {}
        for row in rows:
            fresh.setdefault((row.tenant, row.model), {})[row.version] = row
        for (tenant, model), by_version in fresh.items():
            models = self._models.setdefault(tenant, {})
            before = models.get(model) or ModelEntry(
                tenant, model, {}, min(r.created_at_s for r in by_version.values()), ()
            )
            merged = {row.version: row for row in before.versions} | by_version
            ordered = tuple(merged[version] for version in sorted(merged))
            models[model] = replace(before, versions=ordered)

    def _drop_version(self, tenant: str, model: str, version: str) -> None:
        models = self._models.get(tenant, {})
        if (entry := models.get(model)) is not None:
            models[model] = replace(entry, versions=tuple(row for row in entry.versions if row.version != version))


def _row(sha: str, holder: _KeyHolder) -> KeyRow:
    who = holder.principal
    expires_at_s = None if holder.expires_at_s == inf else int(holder.expires_at_s)
    return KeyRow(
        key_id=who.key_id, secret_sha256=sha, tenant=who.tenant, scopes=who.scopes, models=who.models,
        expires_at_s=expires_at_s,
    )  # fmt: skip


def authorize_model(
    table: RoutingTable, caller: Principal, url_tenant: str | None, reference: ModelReference
) -> ModelEntry:
    """Return the model that a caller means: its own, or one that another tenant granted to it.

    `url_tenant` is the tenant in path or host. `version_resolution.py` decides which version answers. Raises
    Refused(ModelNotFound) for a model that does not exist, is not granted, or is not among the key's models, always in
    the same way. Raises Refused(InvalidRequest) if URL and reference name different tenants.
    """
    if url_tenant is not None and reference.owner not in (None, url_tenant):
        raise Refused(InvalidRequest("model", f"'{reference}'", f"the URL names the tenant '{url_tenant[:63]}'"))
    entry = table.find_callable_model(caller.tenant, reference.owner or url_tenant or caller.tenant, reference.model)
    if entry is None or not caller.may_call(entry.name_for(caller.tenant)):
        raise Refused(ModelNotFound(str(reference)))
    return entry
