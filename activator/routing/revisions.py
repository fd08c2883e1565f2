"""Which Knative Revision runs which version, according to the feed. Only the routing table writes it."""

from activator.routing.policy.version_key import VersionKey, key_of
from kelvin.contracts.serving.control_messages import Feed, PoolRow, RevisionRow


class Revisions:
    """A two-way map of Revisions and versions. Look-ups take O(1)."""

    def __init__(self) -> None:
        self._rows: dict[VersionKey, RevisionRow] = {}
        self._named: dict[tuple[str, str], VersionKey] = {}  # by namespace and name
        self.pools: tuple[PoolRow, ...] = ()  # pools of pods without a version

    def __repr__(self) -> str:
        return f"<Revisions {len(self._rows)}>"

    def find_revision(self, key: VersionKey) -> RevisionRow | None:
        """Return the Revision of this version, or None."""
        return self._rows.get(key)

    def find_version(self, namespace: str, name: str) -> VersionKey | None:
        """Return the version that a Revision runs, or None if the Revision is not ours."""
        return self._named.get((namespace, name))

    def rows(self) -> tuple[RevisionRow, ...]:
        """Return the rows of all Revisions."""
        return tuple(self._rows.values())

    def apply(self, feed: Feed) -> None:
        """Apply a feed message."""
        if feed.full:
            self._rows, self._named, self.pools = {}, {}, ()
        self.pools = feed.pools or self.pools
        for row in feed.revisions:
            key = key_of(row)
            self._drop(key)
            self._rows[key] = row
            self._named[row.namespace, row.name] = key
        for version in (*feed.removed_versions, *feed.removed_revisions):
            self._drop(VersionKey(*version))

    def check_integrity(self) -> None:
        """Assert that both maps agree."""
        for place, key in self._named.items():
            row = self._rows[key]
            assert place == (row.namespace, row.name)

    def _drop(self, key: VersionKey) -> None:
        row = self._rows.pop(key, None)
        if row is not None and self._named.get((row.namespace, row.name)) == key:
            del self._named[row.namespace, row.name]
