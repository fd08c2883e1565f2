"""Turns at each source: so many chunks at once, the next one by shares. Which source is asked, the fetcher says."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from contracts.errors import Cancelled, Refused
from weightcache.policy.sharing import FULL_WEIGHT, Flow, Key, Limit, Sharing


@dataclass(slots=True)
class _Lane:
    """One source's. A future is True once the turn has come, False where nobody wanted the chunk any more."""

    limit: Limit
    free: int
    sharing: Sharing
    waiting: dict[Key, tuple[int, asyncio.Future[bool]]] = field(default_factory=dict)

    def begin(self) -> None:
        """All that is next and fits."""
        while (key := self.sharing.next()) is not None:
            slots, turn = self.waiting[key]
            if turn.cancelled():  # its task has yet to hear of it
                self.withdraw(key)
                continue
            if slots > self.free:
                return
            self.sharing.take()
            del self.waiting[key]
            self.free -= slots
            turn.set_result(True)

    def withdraw(self, key: Key) -> None:
        self.sharing.remove(key)
        del self.waiting[key]

    def end(self, slots: int) -> None:
        self.free += slots
        self.begin()


class Turns:
    """By tier. A slow source keeps nobody from another one: each has slots and a queue of its own."""

    def __init__(self, limits: Mapping[str, Limit]) -> None:
        self._lanes = {tier: _Lane(limit, limit.at_once, Sharing()) for tier, limit in limits.items()}
        self._flows: dict[Flow, Mapping[Key, int]] = {}
        self._wanted: dict[Key, dict[Flow, int]] = {}

    def __repr__(self) -> str:
        return f"<Turns running={self.running} queued={self.queued}>"

    @property
    def running(self) -> dict[str, int]:
        """Slots in use, by tier."""
        return {tier: lane.limit.at_once - lane.free for tier, lane in self._lanes.items()}

    @property
    def queued(self) -> dict[str, int]:
        """Chunks that wait for a turn, by tier."""
        return {tier: len(lane.sharing) for tier, lane in self._lanes.items()}

    def is_wanted(self, key: Key) -> bool:
        """Whether anyone waits for the chunk."""
        return key in self._wanted

    def enter(self, flow: Flow, wanted: Mapping[Key, int], weight: float = FULL_WEIGHT) -> None:
        """Someone waits for these chunks, in the order of their positions, until `leave`."""
        self._flows[flow] = wanted
        for lane in self._lanes.values():
            lane.sharing.enter(flow, weight)
        for key, position in wanted.items():
            self._wanted.setdefault(key, {})[flow] = position
            for lane in self._lanes.values():
                lane.sharing.want(key, flow, position)

    def weigh(self, flow: Flow, weight: float) -> None:
        """See `Sharing.weigh`; nothing where it has left, or not entered yet."""
        if flow in self._flows:
            for lane in self._lanes.values():
                lane.sharing.weigh(flow, weight)

    def leave(self, flow: Flow) -> None:
        """Nobody waits there any more: what no other wants loses its place in the queues."""
        for key in self._flows.pop(flow):
            flows = self._wanted[key]
            del flows[flow]
            if not flows:
                del self._wanted[key]
        for lane in self._lanes.values():
            for key in lane.sharing.leave(flow):
                _, turn = lane.waiting.pop(key)
                if not turn.done():
                    turn.set_result(False)
            lane.begin()  # the next one may need fewer slots

    @asynccontextmanager
    async def at(self, tier: str, key: Key, nbytes: int) -> AsyncIterator[None]:
        """While the block reads the chunk from there. Raises `Refused(Cancelled)` once nobody wants it any more."""
        lane = self._lanes[tier]
        slots = lane.limit.slots(nbytes)
        await self._wait(lane, key, nbytes, slots)
        try:
            yield
        finally:
            lane.end(slots)

    async def _wait(self, lane: _Lane, key: Key, nbytes: int, slots: int) -> None:
        came = False
        while not came:
            if (wanted := self._wanted.get(key)) is None:
                raise Refused(Cancelled())
            turn: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            lane.sharing.add(key, nbytes, wanted)
            lane.waiting[key] = slots, turn
            lane.begin()
            try:
                came = await turn  # where not, it may be wanted again meanwhile: it queues anew
            except asyncio.CancelledError:
                if turn.cancelled():
                    if lane.waiting.get(key, (0, None))[1] is turn:
                        lane.withdraw(key)
                elif turn.result():
                    lane.end(slots)
                raise
