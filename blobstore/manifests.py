"""Tell a version that was never published from one whose manifest was lost."""

from blobstore.store import BlobStore
from contracts.artifact_errors import ManifestMissing
from contracts.errors import Failure, NotFound
from contracts.keys import attestations_prefix, names_object


async def absence_of(store: BlobStore, tenant: str, version: str) -> Failure:
    """Return why there is no manifest: `ManifestMissing` where attestations show that the version was sealed, else
    `NotFound`. Raises `Refused` where the store does not answer.
    """
    async for key in store.list(attestations_prefix(tenant, version)):
        if names_object(key):
            return ManifestMissing(version)
    return NotFound("version", version)
