"""Address and connection options of an S3 store, in one URL. Credentials are never part of it.

`s3://BUCKET[/PREFIX][?endpoint=…&region=…&path_style=…&connect_s=…&read_s=…&connections=…]`. One text has everything,
so that every process of an installation uses the same store.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlsplit

from kelvin.blobstore.blob_store import BadKey, check_key
from kelvin.contracts import setting_parser
from kelvin.contracts.setting_parser import BadSetting

CONNECTIONS: Final = 16
SETTING: Final = "KELVIN_STORE"  # the setting with the URL
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")  # S3's rule for general purpose buckets
_REGION: Final = re.compile(r"[a-z0-9-]{1,40}")
_PREFIX_LIMIT: Final = 120  # with the longest key, still below S3's 1024 bytes
_PARAMETERS: Final = frozenset({"endpoint", "region", "path_style", "connect_s", "read_s", "connections"})


@dataclass(frozen=True, slots=True)
class S3Location:
    """A bucket and how to connect to it. `prefix` is empty or ends in '/'. `read_s` limits how long a connection is
    silent, not a whole response.
    """

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    path_style: bool = False
    connect_s: float = 3.0
    read_s: float = 10.0
    connections: int = CONNECTIONS

    def __str__(self) -> str:
        at = f" at {self.endpoint}" if self.endpoint else ""
        return f"s3://{self.bucket}/{self.prefix}{at}"


def parse_s3_url(url: str, *, connections: int = CONNECTIONS) -> S3Location:
    """Parse the URL. `connections` applies if the URL has none. Raises `BadSetting`, which has no secret parts."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets that don't match, characters that normalise to a delimiter
        raise BadSetting(SETTING, "s3://…", "is no URL") from None
    if "@" in parts.netloc:
        raise BadSetting(SETTING, "s3://…", "must hold no credentials: they come from the environment, see operations")
    shown = f"s3://{parts.netloc}{parts.path}"
    if not _BUCKET.fullmatch(parts.netloc) or parts.fragment:
        raise BadSetting(
            SETTING, shown, "must be s3://BUCKET/PREFIX with a bucket's name of 3 to 63 of a-z, 0-9, . and -"
        )
    given = _parameters(parts.query, shown)
    endpoint, region = given.get("endpoint"), given.get("region")
    if endpoint is not None and not _is_endpoint(endpoint):
        raise BadSetting(SETTING, shown, "its endpoint must be http://HOST[:PORT] or https://HOST[:PORT]")
    if region is not None and not _REGION.fullmatch(region):
        raise BadSetting(SETTING, shown, "its region must be of a-z, 0-9 and -")
    prefix = _prefix(parts.path, shown)
    try:
        return S3Location(
            bucket=parts.netloc,
            prefix=prefix,
            endpoint=endpoint,
            region=region,
            path_style=_flag(given, endpoint is not None),
            connect_s=setting_parser.number(given, "connect_s", 3.0, low=0.05, high=60.0),
            read_s=setting_parser.number(given, "read_s", 10.0, low=0.05, high=300.0),
            connections=setting_parser.integer(given, "connections", connections, low=1, high=256),
        )
    except BadSetting as bad:
        raise BadSetting(SETTING, shown, str(bad)) from None


def _parameters(query: str, shown: str) -> dict[str, str]:
    pairs = parse_qsl(query, keep_blank_values=True)
    given = dict(pairs)
    if given.keys() - _PARAMETERS or len(given) < len(pairs):
        raise BadSetting(SETTING, shown, f"takes each of {', '.join(sorted(_PARAMETERS))} once, and nothing else")
    return given


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    plain = parts.path in ("", "/") and not parts.query and not parts.fragment and "@" not in parts.netloc
    return parts.scheme in ("http", "https") and bool(parts.hostname) and plain and port != 0


def _prefix(path: str, shown: str) -> str:
    prefix = path.strip("/")
    try:
        if prefix and (len(check_key(prefix)) > _PREFIX_LIMIT):
            raise BadSetting(SETTING, shown, f"its prefix must have at most {_PREFIX_LIMIT} characters")
    except BadKey as bad:
        raise BadSetting(SETTING, shown, bad.failure.message) from None
    return f"{prefix}/" if prefix else ""


def _flag(given: Mapping[str, str], default: bool) -> bool:
    match given.get("path_style"):
        case None:
            return default
        case "true":
            return True
        case "false":
            return False
        case other:
            raise BadSetting("path_style", other, "must be true or false")
