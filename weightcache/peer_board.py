"""What is known of the chunks that this node is loading: what it does about each itself, and what others said of it.

Others are asked once for all chunks that are wanted in the same moment, which also tells them that they are wanted
here; who is waited for is asked with a wait, once for all chunks that are waited for. A chunk is forgotten when its
load has ended.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from weightcache.peer_client import Peer
from weightcache.peer_wire import MAX_DIGESTS, Have, Holdings
from weightcache.policy.mixing import Other, Standing

FRESH_S: Final = 2.0  # after which what others said is asked again
STALL_S: Final = 10.0  # without a chunk arriving there, a node is not waited for
WATCH_S: Final = 0.5  # of one question with a wait: what begins to be waited for meanwhile is in the next
WATCHED: Final = 256  # chunks of one such question
TOGETHER_S: Final = 0.02  # what arrives so close to one another is told of in one answer

Key = tuple[str, str]  # tenant, digest


@dataclass(slots=True)
class _Chunk:
    """One that is loading. What became of it elsewhere is told by `news`."""

    since: float
    users: int = 0
    standing: Standing = Standing.WANTED
    seen: dict[Peer, Standing] = field(default_factory=dict)
    asked_at: float | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True)
class _Survey:
    digests: list[str] = field(default_factory=list)
    task: asyncio.Task[None] | None = None


class Board:
    """`node` is our name among the others; `serves`: they may ask us for what we load. `is_here` knows our tiers."""

    def __init__(
        self, node: str, peers: Sequence[Peer], is_here: Callable[[str, str], bool], clock: Callable[[], float], *,
        serves: bool,
    ) -> None:  # fmt: skip
        self.node = node
        self.peers = list(peers)
        self.moved = 0  # loads that ended, and parts of chunks that arrived
        self.moved_at = clock()  # when the last one did
        self._is_here = is_here
        self._clock = clock
        self._told_name = node if serves else None
        self._chunks: dict[Key, _Chunk] = {}
        self._surveys: dict[str, _Survey] = {}
        self._watched: dict[tuple[Peer, str], dict[str, None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    def __repr__(self) -> str:
        return f"<Board {self.node} loading={len(self._chunks)} peers={len(self.peers)}>"

    async def close(self) -> None:
        """Nobody is asked any more."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    @contextmanager
    def loading(self, key: Key) -> Iterator[None]:
        """The chunk is wanted while the block runs. Two may want it: for memory, and for the disk."""
        chunk = self._chunks.setdefault(key, _Chunk(self._clock()))
        chunk.users += 1
        try:
            yield
        finally:
            chunk.users -= 1
            if not chunk.users:
                del self._chunks[key]
            self.note_moved()
            self._stir()

    def note_moved(self) -> None:
        """Something arrived here: who waits for us goes on waiting."""
        self.moved += 1
        self.moved_at = self._clock()

    def claim(self, key: Key) -> None:
        """It is being read here, from disk or store: others may wait for it."""
        self._chunks[key].standing = Standing.CLAIMED
        self._stir()

    def is_loading(self, key: Key) -> bool:
        """Whether it is wanted here."""
        return key in self._chunks

    def since(self, key: Key) -> float:
        """When its load began."""
        return self._chunks[key].since

    def asked_at(self, key: Key) -> float | None:
        """When others last were asked for it."""
        return self._chunks[key].asked_at

    async def answer(self, tenant: str, question: Have) -> Holdings:
        """What another node asked. With a wait: once one of the chunks is here, or will not be."""
        if question.node is not None:
            self._hear(question.node, tenant, question.digests)
        until = self._clock() + question.wait_s
        while True:
            standings = [self._standing(tenant, digest) for digest in question.digests]
            left = until - self._clock()
            if left <= 0 or Standing.READY in standings or Standing.ABSENT in standings:
                return Holdings(node=self.node, standings="".join(standings), moved=self.moved)
            await self._change(left)
            await asyncio.sleep(TOGETHER_S)

    def named(self, node: str) -> Peer | None:
        """The peer that has this name."""
        return next((peer for peer in self.peers if peer.node == node), None)

    def others(self, key: Key, nbytes: int) -> list[Other]:
        """All that answer, and what they said of the chunk."""
        chunk, now = self._chunks[key], self._clock()
        return [
            Other(
                peer.node,
                chunk.seen.get(peer, Standing.ABSENT),
                peer.pace.expected_s(nbytes),
                busy=peer.is_busy,
                moving=now - max(peer.moved_at, chunk.since) < STALL_S,
            )
            for peer in self.peers
            if peer.answers and peer.node is not None
        ]

    def forget(self, peer: Peer, key: Key | None = None) -> None:
        """What it said of the chunk, or of any, counts no more."""
        for each in list(self._chunks) if key is None else [key]:
            if (chunk := self._chunks.get(each)) is not None and chunk.seen.pop(peer, None) is not None:
                chunk.news.set()

    async def ask(self, key: Key) -> None:
        """Have the others say what they have of it, with all that is asked for in this moment."""
        tenant, digest = key
        survey = self._surveys.get(tenant)
        if survey is None:
            survey = self._surveys[tenant] = _Survey()
            survey.task = self._own(self._survey(tenant, survey))
        survey.digests.append(digest)
        assert survey.task is not None
        await asyncio.shield(survey.task)

    def is_stale(self, key: Key) -> bool:
        """Whether others should be asked again."""
        asked_at = self._chunks[key].asked_at
        return asked_at is None or self._clock() - asked_at > FRESH_S

    async def hear_of(self, key: Key, peer: Peer, timeout_s: float) -> None:
        """Returns when the peer has the chunk or will not have it, or after that time."""
        tenant, digest = key
        chunk = self._chunks[key]
        chunk.news.clear()
        watched = self._watched.get((peer, tenant))
        if watched is None:
            watched = self._watched[peer, tenant] = {}
            self._own(self._watch(peer, tenant, watched))
        watched[digest] = None
        try:
            async with asyncio.timeout(timeout_s):
                await chunk.news.wait()
        except TimeoutError:
            return
        finally:
            watched.pop(digest, None)

    def _standing(self, tenant: str, digest: str) -> Standing:
        if self._is_here(tenant, digest):
            return Standing.READY
        chunk = self._chunks.get((tenant, digest))
        return Standing.ABSENT if chunk is None else chunk.standing

    async def _change(self, timeout_s: float) -> None:
        """Returns when a chunk's load ended or was claimed, or after that time."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    def _hear(self, node: str, tenant: str, digests: Sequence[str]) -> None:
        """Another node said that it wants these."""
        peer = self.named(node)
        for digest in digests:
            chunk = self._chunks.get((tenant, digest))
            if chunk is None:
                continue
            if peer is None:
                chunk.asked_at = None  # one that began after we had asked, or began anew
            elif chunk.seen.get(peer, Standing.ABSENT) is Standing.ABSENT:
                chunk.seen[peer] = Standing.WANTED

    async def _survey(self, tenant: str, survey: _Survey) -> None:
        await asyncio.sleep(0)  # all tasks that begin in this turn of the loop have asked then
        del self._surveys[tenant]
        for at in range(0, len(survey.digests), MAX_DIGESTS):
            digests = survey.digests[at : at + MAX_DIGESTS]
            await asyncio.gather(*(self._ask_one(peer, tenant, digests, 0.0) for peer in self.peers if peer.answers))
        for digest in survey.digests:
            if (chunk := self._chunks.get((tenant, digest))) is not None:
                chunk.asked_at = self._clock()

    async def _watch(self, peer: Peer, tenant: str, watched: dict[str, None]) -> None:
        try:
            while watched and await self._ask_one(peer, tenant, list(islice(watched, WATCHED)), WATCH_S):
                for digest in list(watched):
                    chunk = self._chunks.get((tenant, digest))
                    if chunk is None or chunk.news.is_set():
                        watched.pop(digest)  # it is on its way out of the wait
        finally:
            del self._watched[peer, tenant]

    async def _ask_one(self, peer: Peer, tenant: str, digests: Sequence[str], wait_s: float) -> bool:
        """False where it does not answer: then it is as if it had said nothing."""
        standings = await peer.have(tenant, digests, self._told_name, wait_s)
        if standings is None:
            self.forget(peer)
            return False
        if peer.node == self.node:  # the list of peers may be the same everywhere
            self.peers = [each for each in self.peers if each is not peer]
            return False
        for digest, standing in zip(digests, standings, strict=True):
            if (chunk := self._chunks.get((tenant, digest))) is not None:
                chunk.seen[peer] = standing
                if standing in (Standing.READY, Standing.ABSENT):
                    chunk.news.set()
        return True

    def _own(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stir(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
