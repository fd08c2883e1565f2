"""Report when API keys were last used, to the minute, with one call to the control plane per minute."""

import asyncio
import logging
from typing import Final

from activator import dependencies
from kelvin.contracts.errors import Refused
from kelvin.contracts.serving import control_messages
from kelvin.ipc.service_client import ServiceClient

log = logging.getLogger(__name__)

PERIOD_S: Final = 60
POST_TIMEOUT_S: Final = dependencies.KEY_USES.timeout_s
PATH: Final = "/internal/v1/keys/uses"


class KeyUses:
    """Reports uses at most once a minute, at once if the last report is older. Failed reports go with the next."""

    def __init__(self, control_plane: ServiceClient) -> None:
        self._control = control_plane
        self._noted: dict[str, int] = {}  # used in this minute, or not reported yet
        self._news: dict[str, int] = {}
        self._is_news = asyncio.Event()

    def __repr__(self) -> str:
        return f"<KeyUses noted={len(self._noted)} untold={len(self._news)}>"

    def record_use(self, key_id: str, now_s: float) -> None:
        """Record that the key was valid at `now_s` (seconds since 1970)."""
        minute_s = int(now_s) // PERIOD_S * PERIOD_S
        if self._noted.get(key_id) != minute_s:
            self._noted[key_id] = self._news[key_id] = minute_s
            self._is_news.set()

    async def run(self) -> None:
        """Report new uses until cancelled."""
        while True:
            await self._is_news.wait()
            await self.tell()
            await asyncio.sleep(PERIOD_S)

    async def tell(self) -> None:
        """Report new uses. On failure they are kept for the next report."""
        news, self._news = self._news, {}
        self._is_news.clear()
        latest_s = max(news.values(), default=0)
        self._noted = {key_id: at_s for key_id, at_s in self._noted.items() if at_s >= latest_s}
        body = control_messages.KeyUses(used_at_s=news)
        try:
            await self._control.call("POST", PATH, type(None), body=body, timeout_s=POST_TIMEOUT_S)
        except Refused as refused:
            log.warning("the control plane did not accept key uses", extra={"error": str(refused), "keys": len(news)})
            self._news = news | self._news
            self._is_news.set()
