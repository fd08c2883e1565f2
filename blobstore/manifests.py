"""Tell a version that was never published from one whose manifest was lost."""

from blobstore.store import BlobStore
from contracts.artifact_errors import ManifestMissing
from contracts.errors import Failure, NotFound
from contracts.keys import attestations_prefix, names_object


async def absence_of(store: BlobStore, tenant: str, version: str) -> Failure:
    """Return why there is no manifest: `ManifestMissing` where a seal shows that the version was made, else `NotFound`.
    A publisher's statement shows nothing: it comes while the push is open. Raises `Refused` where the store does not
    answer.
    """
    async for key in store.list(f"{attestations_prefix(tenant, version)}seal-"):
        if names_object(key):
            return ManifestMissing(version)
    return NotFound("version", version)
