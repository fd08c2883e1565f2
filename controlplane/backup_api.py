"""The backup as the command line takes it: from the socket alone, as it holds the installation's secrets."""

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from controlplane.backups import Backups


def routes(backups: Backups) -> list[Route]:
    """An answer that is cut short is no backup: it lacks its index."""

    async def backup(_: Request) -> Response:
        backups.check()
        moment = await backups.begin()
        return StreamingResponse(backups.pieces(moment, backups.data), media_type="application/x-tar")

    return [Route("/internal/v1/backup", backup, methods=["GET"])]
