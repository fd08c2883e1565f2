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
        self._recorded: dict[str, int] = {}  # used in this minute, or not reported yet
        self._unreported: dict[str, int] = {}
        self._has_unreported = asyncio.Event()

    def __repr__(self) -> str:
        return f"<KeyUses recorded={len(self._recorded)} unreported={len(self._unreported)}>"

    def record_use(self, key_id: str, now_s: float) -> None:
        """Record that the key was valid at `now_s` (seconds since 1970)."""
        minute_s = int(now_s) // PERIOD_S * PERIOD_S
        if self._recorded.get(key_id) != minute_s:
            self._recorded[key_id] = self._unreported[key_id] = minute_s
            self._has_unreported.set()

    async def run(self) -> None:
        """Report new uses until cancelled."""
        while True:
            await self._has_unreported.wait()
            await self.report()
            await asyncio.sleep(PERIOD_S)

    async def report(self) -> None:
        """Report new uses. On failure they are kept for the next report."""
        news, self._unreported = self._unreported, {}
        self._has_unreported.clear()
        latest_s = max(news.values(), default=0)
        self._recorded = {key_id: at_s for key_id, at_s in self._recorded.items() if at_s >= latest_s}
        body = control_messages.KeyUses(used_at_s=news)
        try:
            await self._control.call("POST", PATH, type(None), body=body, timeout_s=POST_TIMEOUT_S)
        except Refused as refused:
            log.warning("the control plane did not accept key uses", extra={"error": str(refused), "keys": len(news)})
            self._unreported = news | self._unreported
            self._has_unreported.set()
