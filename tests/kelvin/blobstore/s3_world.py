"""Shared by the S3 tests: a server, a fault proxy, stores with any part size, and access that bypasses the store."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kelvin.blobstore.retrying_store import Retry, RetryBudget, RetryingStore
from kelvin.blobstore.s3_client import make_client
from kelvin.blobstore.s3_location import S3Location, parse_s3_url
from kelvin.blobstore.s3_store import S3Store
from tests.faults.fault_proxy import FaultProxy
from tests.faults.s3_buckets import Buckets

PART = 1024  # the test server accepts parts of this size
BODY = bytes(range(256)) * 40  # ten parts


async def no_pause(seconds: float) -> None:
    """Replace the pause before a retry by nothing."""


QUICK = Retry(RetryBudget(), sleep=no_pause)


class World:
    """An S3 server, a fault proxy and the stores of one test. Call `begin` before each test and `end` after it."""

    def __init__(self, buckets: Buckets, proxy: FaultProxy, client: Any) -> None:
        self.buckets = buckets
        self.proxy = proxy
        self.client = client
        self.bucket = ""
        self._stores: list[S3Store] = []

    @property
    def place(self) -> S3Location:
        """The location of this test's bucket, through the proxy."""
        return parse_s3_url(self.url())

    def url(self, **parameters: object) -> str:
        """Return that location as a store URL."""
        return self.buckets.url(self.bucket, "p", port=self.proxy.port, connections=8, **parameters)

    def begin(self) -> None:
        self.bucket = self.buckets.make()
        self.proxy.forget()

    def end(self) -> None:
        self.proxy.lift()
        for store in self._stores:
            asyncio.run(store.close())
        self._stores.clear()

    def store(self, *, read_bytes: int = 4 << 20, part_bytes: int = 8 << 20, **changes: Any) -> S3Store:
        """Return a store that retries only parts of a stream. `changes` to the location give it a client of its own."""
        place = replace(self.place, **changes)
        client = make_client(place) if changes else self.client
        store = S3Store(place, client, retry=QUICK, read_bytes=read_bytes, part_bytes=part_bytes, page_keys=3)
        self._stores.append(store)
        return store

    def retrying(self, store: S3Store) -> RetryingStore:
        """Wrap `store` in retries without pauses."""
        return RetryingStore(store, sleep=no_pause)

    def plant(self, key: str, body: bytes = BODY) -> None:
        """Put an object directly on the server."""
        self.buckets.ask("PUT", f"{self.bucket}/p/{key}", body)

    def fetch(self, key: str) -> bytes:
        """Read an object directly from the server."""
        return self.buckets.get(f"{self.bucket}/p/{key}")

    def begin_upload(self, key: str) -> None:
        """Start a multipart upload that is never completed."""
        self.buckets.ask("POST", f"{self.bucket}/p/{key}?uploads")

    def uploads(self) -> list[str]:
        """Return the keys of uploads that are neither completed nor aborted."""
        listing = self.buckets.get(f"{self.bucket}?uploads").decode()
        return re.findall(r"<Upload>.*?<Key>(.*?)</Key>", listing, re.DOTALL)


@contextmanager
def worlds(buckets: Buckets) -> Iterator[World]:
    """Yield a `World` with a proxy and a client whose read timeout is 60 s."""
    with FaultProxy(buckets.host, buckets.port) as proxy:
        place = parse_s3_url(buckets.url("any", port=proxy.port, read_s=60, connections=8))
        client = make_client(place)
        yield World(buckets, proxy, client)
        client.close()
