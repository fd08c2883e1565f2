"""The blocking part of the S3 store: boto3's client, one function per call, errors translated to those of the store.

Only this module imports boto3. Each call runs in a thread of the store's pool, and ends within the timeouts of its
`S3Location`. `s3_reads` reads objects.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError, ProfileNotFound
from botocore.parsers import ResponseParserError

from kelvin.blobstore.blob_store import BlobNotFound, BlobUnavailable, StoreFull
from kelvin.blobstore.s3_location import S3Location

_INSUFFICIENT_STORAGE: Final = 507  # RFC 4918, 11.5: MinIO's status for full disks (XMinioStorageFull)
_FULL: Final = frozenset({"QuotaExceeded", "XMinioAdminBucketQuotaExceeded"})  # quotas: Ceph (403), MinIO (400)
_DEFAULT_REGION: Final = "us-east-1"  # what compatible endpoints accept if no region is configured


def make_client(location: S3Location) -> Any:
    """Return a client with the usual credential chain. It opens no connection yet. Thread-safe. Raises
    `BlobUnavailable` if the chain itself is broken, for example by a profile that does not exist.
    """
    for name in ("boto3", "botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.INFO)  # their debug lines hold session tokens
    try:
        session = boto3.session.Session(region_name=location.region)
    except BotoCoreError as error:
        raise BlobUnavailable(f"no client for S3: {error}") from error
    region = session.region_name or _DEFAULT_REGION
    config = Config(
        connect_timeout=location.connect_s,
        read_timeout=location.read_s,
        max_pool_connections=location.connections,
        tcp_keepalive=True,
        # Only `retrying_store` retries: four attempts here and four there would be sixteen, more than any budget.
        retries={"total_max_attempts": 1, "mode": "standard"},
        s3={"addressing_style": "path" if location.path_style else "auto"},
        # Kelvin's own digests check the content, and signatures protect request bodies. Many compatible endpoints
        # refuse the checksum trailers that newer SDKs add by default.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return session.client("s3", region_name=region, endpoint_url=location.endpoint, config=config)


@dataclass(frozen=True, slots=True)
class Head:
    """Facts about an object without its content."""

    size: int
    etag: str
    modified_s: float


def error_of(error: ClientError) -> tuple[str, int]:
    """Return the error's code and the response's HTTP status. Its text is never repeated: it may name the caller."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(error.response.get("Error", {}).get("Code", "unknown")), int(status)


@contextmanager
def translate_errors(key: str) -> Iterator[None]:
    """Translate the client's errors to those of the store. Statuses with a special meaning are handled before."""
    try:
        yield
    except ClientError as error:
        code, status = error_of(error)
        if code in ("NoSuchKey", "404"):
            raise BlobNotFound(key) from None
        if status == _INSUFFICIENT_STORAGE or code in _FULL:
            raise StoreFull() from error
        raise BlobUnavailable(f"S3 answered {code} ({status})") from error
    except (BotoCoreError, OSError) as error:
        raise BlobUnavailable(f"S3 did not answer: {type(error).__name__}") from error
    except (ResponseParserError, KeyError) as error:
        raise BlobUnavailable(f"S3 returned an unreadable response: {type(error).__name__}") from error


def head(client: Any, location: S3Location, key: str) -> Head:
    """Return size, ETag and time of an object. Raises `BlobNotFound` and `BlobUnavailable`."""
    with translate_errors(key):
        answer = client.head_object(Bucket=location.bucket, Key=location.prefix + key)
        return Head(int(answer["ContentLength"]), str(answer.get("ETag", "")), answer["LastModified"].timestamp())


def put(client: Any, location: S3Location, key: str, data: bytes) -> bool:
    """Create the object; return False if it exists. Raises `BlobUnavailable`, also if a concurrent put still runs."""
    try:
        with translate_errors(key):
            client.put_object(Bucket=location.bucket, Key=location.prefix + key, Body=data, IfNoneMatch="*")
    except BlobUnavailable as unavailable:
        if is_refused_condition(unavailable):
            return False
        raise
    return True


def is_refused_condition(error: BlobUnavailable) -> bool:
    """Return whether `If-None-Match` or `If-Match` failed (412). A 409 is different: another put is running; retry."""
    return status_of(error) == 412


def status_of(error: BlobUnavailable) -> int:
    """Return the HTTP status of the response that caused the error, 0 without a response."""
    return error_of(error.__cause__)[1] if isinstance(error.__cause__, ClientError) else 0


_PERMANENT_FAILURES: Final = {
    "NoSuchBucket": "the bucket does not exist",
    "InvalidBucketName": "the bucket's name is refused",
    "AccessDenied": "these credentials may not do this with the bucket",
    "AllAccessDisabled": "these credentials may not do this with the bucket",
    "InvalidAccessKeyId": "the access key is unknown",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "InvalidToken": "the session token is wrong",
    "AuthorizationHeaderMalformed": "the region is wrong: name the bucket's with region=",
    "PermanentRedirect": "the region is wrong: name the bucket's with region=",
    "IllegalLocationConstraintException": "the region is wrong: name the bucket's with region=",
    "NotImplemented": "this endpoint lacks conditional puts (If-None-Match), which Kelvin can't do without",
}


def permanent_failure_reason(error: BlobUnavailable) -> str | None:
    """Return what an operator must fix before the call can succeed, or None if the error may be temporary."""
    cause = error.__cause__
    if isinstance(cause, ClientError):
        code, status = error_of(cause)
        reason = _PERMANENT_FAILURES.get(code)
        return f"{reason} (S3 answered {code}, {status})" if reason else None
    if isinstance(cause, NoCredentialsError | PartialCredentialsError | ProfileNotFound):
        return "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
    return None


def delete(client: Any, location: S3Location, key: str) -> None:
    """Delete the object. Does nothing if it does not exist, whatever the endpoint reports for that."""
    with suppress(BlobNotFound), translate_errors(key):
        client.delete_object(Bucket=location.bucket, Key=location.prefix + key)


@dataclass(frozen=True, slots=True)
class Page:
    """Keys without the location's prefix. `next` is None on the last page."""

    keys: tuple[str, ...]
    next: str | None


def list_page(client: Any, location: S3Location, prefix: str, token: str | None, page_keys: int) -> Page:
    """Return one page of a listing, ascending. Raises `BlobUnavailable`."""
    more = {} if token is None else {"ContinuationToken": token}
    with translate_errors(prefix):
        answer = client.list_objects_v2(
            Bucket=location.bucket, Prefix=location.prefix + prefix, MaxKeys=page_keys, **more
        )
    names = [str(row.get("Key", "")) for row in answer.get("Contents", ())]
    following = answer.get("NextContinuationToken")
    if any(not name.startswith(location.prefix + prefix) for name in names) or names != sorted(set(names)):
        raise BlobUnavailable("S3 returned a listing with keys out of order or outside its prefix")
    if answer.get("IsTruncated") and not following:
        raise BlobUnavailable("S3 returned a truncated listing without a continuation token")
    return Page(
        tuple(name.removeprefix(location.prefix) for name in names), following if answer.get("IsTruncated") else None
    )
