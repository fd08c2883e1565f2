"""The backup as the command line takes it: from the socket alone, as it holds the installation's secrets."""

import asyncio
import errno
from itertools import chain

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from contracts.errors import CapacityExceeded, Refused
from controlplane.backups import Backups


def routes(backups: Backups) -> list[Route]:
    """An answer that is cut short is no backup: it lacks its index."""

    async def backup(_: Request) -> Response:
        backups.check()
        moment = await backups.begin()
        pieces = backups.pieces(moment, backups.data)
        try:
            first = await asyncio.to_thread(next, pieces)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise Refused(CapacityExceeded("bytes on the disk of DATA, for a copy of kelvin.db", 1, 0)) from error
        return StreamingResponse(chain((first,), pieces), media_type="application/x-tar")

    return [Route("/internal/v1/backup", backup, methods=["GET"])]
