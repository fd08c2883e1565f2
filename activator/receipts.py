"""Tell a replica what was delivered and what is recorded: one call at a time, so that under load one tells of many."""

from typing import Final

import aiohttp

from activator.errands import Errands
from contracts.usage import Receipt, Receipts
from contracts.wire import encode

MAX_RECEIPTS: Final = 256  # of 200 bytes at the most: what a replica reads of one body
TOLD_S: Final = 2.0
_PATH: Final = "http://replica/v1/receipts"


class Desk:
    """Of one replica. What it is not told is no loss: it keeps the account, and in the ledger our record stands."""

    def __init__(self, http: aiohttp.ClientSession, errands: Errands) -> None:
        self._http = http
        self._errands = errands
        self._due: dict[str, Receipt] = {}
        self._telling = False

    def __repr__(self) -> str:
        return f"<Desk due={len(self._due)}>"

    def tell(self, receipt: Receipt) -> None:
        """Soon; a later one of the same request takes its place."""
        self._due[receipt.request_id] = receipt
        if not self._telling:
            self._begin()

    def _begin(self) -> None:
        self._telling = True
        self._errands.start(self._tell(), TOLD_S)

    async def _tell(self) -> None:
        some = [self._due.pop(request_id) for request_id in list(self._due)[:MAX_RECEIPTS]]
        headers = {"content-type": "application/json"}
        try:
            async with self._http.post(_PATH, data=encode(Receipts(receipts=tuple(some))), headers=headers) as answer:
                await answer.read()
        except (aiohttp.ClientError, OSError, RuntimeError):
            return  # it is gone, or its session is closed
        finally:
            self._telling = False
            if self._due:
                self._begin()
