"""What the activator knows of keys, models, versions: rows of the feed, found in O(1). The feed is its one writer."""

import hashlib
from collections.abc import Iterable
from dataclasses import replace

from activator.policy.traffic import ModelEntry
from contracts.control import Feed, KeyRow, ModelRow, Principal, VersionRow


class Table:
    """Replaced by a full line, changed by the others; stays valid while the control plane is away."""

    def __init__(self) -> None:
        self.revision = 0
        self._principals: dict[str, Principal] = {}  # by SHA-256 of the key's text
        self._sha_of_key: dict[str, str] = {}
        self._models: dict[str, dict[str, ModelEntry]] = {}  # tenant -> model

    def __repr__(self) -> str:
        models = sum(map(len, self._models.values()))
        return f"<Table revision={self.revision} keys={len(self._principals)} models={models}>"

    def principal(self, key: str) -> Principal | None:
        """Who holds this key. The look-up is by digest: its timing tells nothing about a secret."""
        return self._principals.get(hashlib.sha256(key.encode()).hexdigest())

    def model(self, tenant: str, model: str) -> ModelEntry | None:
        """The tenant's model of that name."""
        return self._models.get(tenant, {}).get(model)

    def models(self, tenant: str) -> tuple[ModelEntry, ...]:
        """All of the tenant's models, by name."""
        found = self._models.get(tenant, {})
        return tuple(found[name] for name in sorted(found))

    def tenants(self) -> frozenset[str]:
        """Every tenant that holds a key or a model."""
        return frozenset(self._models) | {principal.tenant for principal in self._principals.values()}

    def apply(self, line: Feed) -> None:
        """Take one line over; replicas and failures are the throttler's."""
        if line.full:
            self._principals, self._sha_of_key, self._models = {}, {}, {}
        self.revision = line.revision
        for key in line.keys:
            self._put_key(key)
        for key_id in line.removed_keys:
            self._drop_key(key_id)
        for row in line.models:
            self._put_model(row)
        self._put_versions(line.versions)
        for tenant, model in line.removed_models:
            self._models.get(tenant, {}).pop(model, None)
        for tenant, model, version in line.removed_versions:
            self._drop_version(tenant, model, version)

    def check_integrity(self) -> None:
        """Both key maps tell the same, versions are sorted and belong where they are."""
        assert {self._principals[sha].key_id: sha for sha in self._principals} == self._sha_of_key
        for tenant, models in self._models.items():
            for name, entry in models.items():
                assert (entry.tenant, entry.model) == (tenant, name)
                names = [row.version for row in entry.versions]
                assert names == sorted(set(names))

    def _put_key(self, row: KeyRow) -> None:
        self._drop_key(row.key_id)
        self._principals[row.secret_sha256] = Principal(key_id=row.key_id, tenant=row.tenant, scopes=row.scopes)
        self._sha_of_key[row.key_id] = row.secret_sha256

    def _drop_key(self, key_id: str) -> None:
        sha = self._sha_of_key.pop(key_id, None)
        if sha is not None:
            del self._principals[sha]

    def _put_model(self, row: ModelRow) -> None:
        models = self._models.setdefault(row.tenant, {})
        before = models.get(row.model)
        versions = () if before is None else before.versions
        models[row.model] = ModelEntry(row.tenant, row.model, row.aliases, row.created_at_s, versions)

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
            models[model] = ModelEntry(tenant, model, before.aliases, before.created_at_s, ordered)

    def _drop_version(self, tenant: str, model: str, version: str) -> None:
        models = self._models.get(tenant, {})
        if (entry := models.get(model)) is not None:
            models[model] = replace(entry, versions=tuple(row for row in entry.versions if row.version != version))
