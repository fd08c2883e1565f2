"""An S3 bucket that limits the rate of all readers together, and counts the range reads of packs.

It imitates ListObjectsV2 and ranged GetObject of S3. It checks no signature and serves one bucket.
"""

import asyncio
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final
from xml.sax.saxutils import escape

from aiohttp import web

from tests.loop_thread import HOST, running_http_server

PIECE_BYTES: Final = 16 << 10


class ThrottledBucket:
    """A bucket of `objects` by full key. `rate` is bytes a second. `reads` counts range reads of packs."""

    def __init__(self, objects: dict[str, bytes], rate: float) -> None:
        self.objects = objects
        self.rate = rate
        self.port = 0
        self.reads: Counter[tuple[str, str]] = Counter()
        self._free_at = 0.0

    @property
    def url(self) -> str:
        """The URL for `KELVIN_STORE`."""
        return f"s3://bucket/p?endpoint=http://{HOST}:{self.port}&region=us-east-1"

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        _, _, key = request.path.removeprefix("/").partition("/")
        if not key:
            return self._list(request.query.get("prefix", ""))
        data = self.objects.get(key)
        if data is None:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>", content_type="text/xml")
        where = request.headers.get("range", f"bytes=0-{len(data) - 1}")
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", where)
        assert found is not None
        first, last = int(found[1]), min(int(found[2]), len(data) - 1)
        if "/packs/" in key:
            self.reads[key, where] += 1
        reply = web.StreamResponse(status=206)
        reply.headers.update({"content-range": f"bytes {first}-{last}/{len(data)}", "etag": '"fixed"'})
        reply.content_length = last + 1 - first
        await reply.prepare(request)
        for at in range(first, last + 1, PIECE_BYTES):
            piece = data[at : min(at + PIECE_BYTES, last + 1)]
            await self._take(len(piece))
            await reply.write(piece)
        return reply

    def _list(self, prefix: str) -> web.Response:
        rows = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size></Contents>"
            for key, data in sorted(self.objects.items())
            if key.startswith(prefix)
        )
        xml = f"<ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>"
        return web.Response(text=xml, content_type="application/xml")

    async def _take(self, nbytes: int) -> None:
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + nbytes / self.rate
        await asyncio.sleep(self._free_at - now)


@contextmanager
def run_throttled_bucket(objects: dict[str, bytes], rate: float) -> Iterator[ThrottledBucket]:
    """Serve the bucket from a thread until the block ends."""
    bucket = ThrottledBucket(objects, rate)
    with running_http_server(bucket.answer) as bucket.port:
        yield bucket
