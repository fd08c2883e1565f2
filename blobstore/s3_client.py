"""The blocking half of the S3 store: boto3's client, one call at a time, its errors as the store's.

The only module that imports boto3. Each call runs in a thread of the store's pool, ends within the timeouts of its
place, and can be ended earlier by its `Halt`.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
)
from botocore.parsers import ResponseParserError

from blobstore.s3_place import S3Place
from blobstore.store import BlobNotFound, BlobShort, BlobUnavailable

_PIECE_BYTES: Final = 1 << 20  # between two looks at the halt; larger ones are no faster
_DEFAULT_REGION: Final = "us-east-1"  # what compatible endpoints take where nobody names one


def make_client(place: S3Place) -> Any:
    """A client over the usual credential chain. It opens nothing yet. Safe to use from many threads.

    Raises `BlobUnavailable` where the chain itself is broken, as by a profile that there is not.
    """
    for name in ("boto3", "botocore", "urllib3"):
        logging.getLogger(name).setLevel(logging.INFO)  # their debug lines hold session tokens
    try:
        session = boto3.session.Session(region_name=place.region)
    except BotoCoreError as error:
        raise BlobUnavailable(f"no client for S3: {error}") from error
    region = session.region_name or _DEFAULT_REGION
    config = Config(
        connect_timeout=place.connect_s,
        read_timeout=place.read_s,
        max_pool_connections=place.connections,
        tcp_keepalive=True,
        # Tries are counted in one place, `retrying`: twice four tries would be sixteen, and nobody's budget.
        retries={"total_max_attempts": 1, "mode": "standard"},
        s3={"addressing_style": "path" if place.path_style else "auto"},
        # Content is checked by digests of ours, bodies sent by their signature; many compatible endpoints refuse the
        # checksum trailers that newer SDKs add by default.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return session.client("s3", region_name=region, endpoint_url=place.endpoint, config=config)


class Halted(Exception):
    """The call was told to end. Never leaves the store: whoever halts has an error of its own to raise."""


class Halt:
    """Ends calls from another thread: what waits for a body wakes up, what has not begun does not begin."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies: set[Any] = set()
        self._set = False

    def __repr__(self) -> str:
        return f"<Halt set={self._set} bodies={len(self._bodies)}>"

    def set(self) -> None:
        """Any number of times."""
        with self._lock:
            self._set = True
            for body in self._bodies:
                _interrupt(body)

    def check(self) -> None:
        """Raises `Halted`."""
        if self._set:
            raise Halted

    @contextmanager
    def over(self, body: Any) -> Iterator[None]:
        """While the block reads `body`. Whatever breaks because of the halt is `Halted`."""
        with self._lock:
            self.check()
            self._bodies.add(body)
        try:
            yield
        except Exception as error:
            if self._set:
                raise Halted from error
            raise
        finally:
            with self._lock:
                self._bodies.discard(body)


def _interrupt(body: Any) -> None:
    """Shut the reading side of its connection, so that a read in another thread ends now."""
    with suppress(Exception):  # it has ended by itself, or this version can't: then the read timeout ends it
        body._raw_stream.shutdown()


@dataclass(frozen=True, slots=True)
class Head:
    """What is known of an object without reading it."""

    size: int
    etag: str
    modified_s: float


def error_of(error: ClientError) -> tuple[str, int]:
    """The error's code and the answer's HTTP status. Of its text nothing is repeated: it may name who called."""
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(error.response.get("Error", {}).get("Code", "unknown")), int(status)


@contextmanager
def translated(key: str) -> Iterator[None]:
    """What the client says, as the store's errors. Statuses with a meaning of their own are taken before."""
    try:
        yield
    except ClientError as error:
        code, status = error_of(error)
        if code in ("NoSuchKey", "404"):
            raise BlobNotFound(key) from None
        raise BlobUnavailable(f"S3 answered {code} ({status})") from error
    except (BotoCoreError, OSError) as error:
        raise BlobUnavailable(f"S3 did not answer: {type(error).__name__}") from error
    except (ResponseParserError, KeyError) as error:
        raise BlobUnavailable(f"S3 answered what can't be read: {type(error).__name__}") from error


def get_range(
    client: Any, place: S3Place, key: str, offset: int, into: memoryview, etag: str | None, halt: Halt
) -> str:
    """Fill `into` from `offset`, of the object with that `etag` where one is given. Returns the object's.

    Raises `BlobNotFound`, `BlobShort` where the object ends before, `BlobUnavailable` for all else: also for an answer
    that is not the range that was asked for, or ends before it should.
    """
    halt.check()
    last = offset + into.nbytes - 1
    condition = {} if etag is None else {"IfMatch": etag}
    try:
        with translated(key):
            answer = client.get_object(
                Bucket=place.bucket, Key=place.prefix + key, Range=f"bytes={offset}-{last}", **condition
            )
    except BlobUnavailable as unavailable:
        if isinstance(unavailable.__cause__, ClientError) and error_of(unavailable.__cause__)[1] == 416:
            raise BlobShort(key, offset, into.nbytes) from None
        raise
    body = answer["Body"]
    try:
        _check_range(answer, key, offset, into.nbytes)
        found = str(answer.get("ETag", ""))
        if etag is not None and found != etag:  # an endpoint without If-Match, or a cache before it
            raise BlobUnavailable("S3 answered of another object than was asked for")
        with halt.over(body):
            _fill(body, into, halt)
    finally:
        body.close()
    return found


def _check_range(answer: Any, key: str, offset: int, length: int) -> None:
    """The answer is the range that was asked for."""
    said = str(answer.get("ContentRange", ""))
    where, _, total = said.removeprefix("bytes ").partition("/")
    if total.isdecimal() and int(total) < offset + length:
        raise BlobShort(key, offset, length)
    if where != f"{offset}-{offset + length - 1}" or not total.isdecimal():
        raise BlobUnavailable(f"S3 answered another range than bytes {offset}+{length}: '{said[:80]}'")
    if answer.get("ContentLength") != length:
        raise BlobUnavailable(f"S3 answered {answer.get('ContentLength')} bytes of {length}")


def _fill(body: Any, into: memoryview, halt: Halt) -> None:
    done = 0
    while done < into.nbytes:
        halt.check()
        try:
            count = body.readinto(into[done : done + _PIECE_BYTES])
        except Exception as error:  # botocore lets some of the transport's own errors through
            raise BlobUnavailable(f"an answer of S3 broke off: {type(error).__name__}") from error
        if count == 0:
            raise BlobUnavailable(f"an answer of S3 ended after {done} of {into.nbytes} bytes")
        done += count


def head(client: Any, place: S3Place, key: str) -> Head:
    """Raises `BlobNotFound` and `BlobUnavailable`."""
    with translated(key):
        answer = client.head_object(Bucket=place.bucket, Key=place.prefix + key)
        return Head(int(answer["ContentLength"]), str(answer.get("ETag", "")), answer["LastModified"].timestamp())


def put(client: Any, place: S3Place, key: str, data: bytes) -> bool:
    """Put where nothing is. Raises `BlobUnavailable`, also for a put at the same time whose end is not known yet."""
    try:
        with translated(key):
            client.put_object(Bucket=place.bucket, Key=place.prefix + key, Body=data, IfNoneMatch="*")
    except BlobUnavailable as unavailable:
        if is_refused_condition(unavailable):
            return False
        raise
    return True


def is_refused_condition(error: BlobUnavailable) -> bool:
    """Whether `If-None-Match` or `If-Match` did not hold (412). A 409 is none: another put is under way, ask again."""
    return isinstance(error.__cause__, ClientError) and error_of(error.__cause__)[1] == 412


_HOPELESS: Final = {
    "NoSuchBucket": "the bucket does not exist",
    "InvalidBucketName": "the bucket's name is refused",
    "AccessDenied": "these credentials may not use the bucket so",
    "AllAccessDisabled": "these credentials may not use the bucket so",
    "InvalidAccessKeyId": "the access key is unknown",
    "SignatureDoesNotMatch": "the secret key is wrong",
    "InvalidToken": "the session token is wrong",
    "AuthorizationHeaderMalformed": "the region is wrong: name the bucket's with region=",
    "PermanentRedirect": "the region is wrong: name the bucket's with region=",
    "IllegalLocationConstraintException": "the region is wrong: name the bucket's with region=",
    "NotImplemented": "this endpoint lacks conditional puts (If-None-Match), which Kelvin can't do without",
}


def why_hopeless(error: BlobUnavailable) -> str | None:
    """What an operator has to mend before the same call can succeed; None for what may pass."""
    cause = error.__cause__
    if isinstance(cause, ClientError):
        code, status = error_of(cause)
        reason = _HOPELESS.get(code)
        return f"{reason} (S3 answered {code}, {status})" if reason else None
    if isinstance(cause, NoCredentialsError | PartialCredentialsError | ProfileNotFound):
        return "no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or a role"
    return None


def delete(client: Any, place: S3Place, key: str) -> None:
    """Whether it was there or not."""
    with translated(key):
        client.delete_object(Bucket=place.bucket, Key=place.prefix + key)


@dataclass(frozen=True, slots=True)
class Page:
    """Keys with the place's prefix taken off; `next` is None on the last page."""

    keys: tuple[str, ...]
    next: str | None


def list_page(client: Any, place: S3Place, prefix: str, token: str | None, page_keys: int) -> Page:
    """One page of a listing, ascending. Raises `BlobUnavailable`."""
    more = {} if token is None else {"ContinuationToken": token}
    with translated(prefix):
        answer = client.list_objects_v2(Bucket=place.bucket, Prefix=place.prefix + prefix, MaxKeys=page_keys, **more)
    names = [str(row.get("Key", "")) for row in answer.get("Contents", ())]
    following = answer.get("NextContinuationToken")
    if any(not name.startswith(place.prefix + prefix) for name in names) or names != sorted(set(names)):
        raise BlobUnavailable("S3 answered a listing that is not ascending keys of its prefix")
    if answer.get("IsTruncated") and not following:
        raise BlobUnavailable("S3 answered a listing that does not say how it goes on")
    return Page(
        tuple(name.removeprefix(place.prefix) for name in names), following if answer.get("IsTruncated") else None
    )
