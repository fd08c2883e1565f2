"""ResponseBroadcast: several clients read one response. Covers delivery, abandonment, trimming and the byte budget."""

import asyncio

import pytest

from activator.answers.response_broadcast import PIECE_BYTES, ByteBudget, ResponseBroadcast
from activator.http.exchange import ClientGone


class RecordedBroadcast:
    """A broadcast, and the events that it reported to its owner."""

    def __init__(self, keep_bytes: int = 100, room: ByteBudget | None = None) -> None:
        self.said: list[str] = []
        self.room = room or ByteBudget(1 << 20)
        self.broadcast = ResponseBroadcast(
            keep_bytes, self.room, on_complete=self._ended, on_abandoned=lambda: self.said.append("deserted")
        )

    async def _ended(self) -> None:
        assert not self.broadcast.has_ended, "the end is sent after the answer is stored"
        self.said.append(f"ended {len(self.broadcast.complete_body()) if self.broadcast.is_whole else 0}")

    async def say(self, data: bytes, *, next_piece: bool = True) -> None:
        await self.broadcast.send({"type": "http.response.body", "body": data, "more_body": next_piece})

    async def head(self) -> None:
        headers = [(b"a", b"b"), (b"x-ratelimit-limit-tokens", b"9")]
        await self.broadcast.send({"type": "http.response.start", "status": 201, "headers": headers})


async def test_each_client_reads_from_the_first_byte() -> None:
    """A late client reads from the first byte too. Rate-limit headers are not part of the shared response."""
    recorded = RecordedBroadcast()
    broadcast = recorded.broadcast
    with broadcast.listening() as one:
        await recorded.head()
        await recorded.say(b"he")
        assert (await one.wait_head()).headers == [(b"a", b"b")]
        assert await one.next_piece() == (b"he", False)
        one.record_taken(2)
        with broadcast.listening() as two:
            await recorded.say(b"llo", next_piece=False)
            assert await one.next_piece() == (b"llo", True)
            assert await two.next_piece() == (b"hello", True)
        assert broadcast.complete_body() == b"hello"
    assert recorded.said == ["ended 5"]


async def test_delivered_bytes_follow_the_fastest_client() -> None:
    """The sender waits for the fastest client only."""
    recorded = RecordedBroadcast()
    broadcast = recorded.broadcast
    with broadcast.listening(), broadcast.listening() as quick:
        await recorded.head()
        await recorded.say(b"12")
        assert not broadcast.is_all_accepted()
        accepted = asyncio.create_task(broadcast.wait_all_accepted())
        await asyncio.sleep(0)
        assert not accepted.done()
        quick.record_taken(2)
        assert await accepted
        assert broadcast.is_all_accepted()


@pytest.mark.parametrize(
    ("watched", "ended", "want"),
    [
        pytest.param(True, False, ["deserted", "gone"], id="a watched run is cancelled"),
        pytest.param(False, False, [], id="a settled run goes on"),
        pytest.param(True, True, ["ended 0"], id="a finished run stays finished"),
    ],
)
async def test_run_is_abandoned_when_the_last_client_leaves(watched: bool, ended: bool, want: list[str]) -> None:
    """A client that leaves before the last one changes nothing."""
    recorded = RecordedBroadcast()
    broadcast = recorded.broadcast
    with broadcast.listening():
        with broadcast.listening():
            broadcast.watch(lambda: recorded.said.append("gone"))
            if not watched:
                broadcast.unwatch()
        assert recorded.said == []
        if ended:
            await recorded.say(b"", next_piece=False)
    assert not await broadcast.wait_all_accepted()
    assert recorded.said == want


async def test_run_started_after_all_left_is_abandoned() -> None:
    """`watch` reports it at once."""
    recorded = RecordedBroadcast()
    gone = asyncio.Event()
    recorded.broadcast.watch(gone.set)
    await gone.wait()


async def test_run_goes_on_if_a_client_joins_after_all_left() -> None:
    """The client joins in the same loop iteration in which the run begins to watch."""
    recorded = RecordedBroadcast()
    recorded.broadcast.watch(lambda: recorded.said.append("gone"))
    with recorded.broadcast.listening():
        await asyncio.sleep(0)
        assert recorded.said == []
    assert recorded.said == ["deserted", "gone"]


async def test_a_broken_answer_ends_for_all() -> None:
    """Clients still read what was sent before the abort. A complete response can't be aborted."""
    recorded = RecordedBroadcast()
    with recorded.broadcast.listening() as one, recorded.broadcast.listening() as two:
        await recorded.head()
        await recorded.say(b"he")
        waiting = asyncio.create_task(two.wait_head())
        recorded.broadcast.abort()
        assert (await waiting).status == 201
        assert await one.next_piece() == (b"he", False)
        one.record_taken(2)
        with pytest.raises(ClientGone):
            await one.next_piece()
        assert not await recorded.broadcast.wait_all_accepted()
    whole = RecordedBroadcast()
    with whole.broadcast.listening() as three:
        await whole.say(b"x", next_piece=False)
        whole.broadcast.abort()
        assert await three.next_piece() == (b"x", True)
    assert recorded.said == []


async def test_large_response_is_trimmed_as_it_is_read() -> None:
    """Memory is the distance between the slowest and the fastest client. A trimmed response is no longer whole."""
    recorded = RecordedBroadcast()
    broadcast = recorded.broadcast
    with broadcast.listening() as slow, broadcast.listening() as quick:
        for _ in range(50):
            await recorded.say(b"x" * 10)
            quick.record_taken(10)
        held = [(broadcast.is_whole, len(broadcast._bytes))]
        slow.record_taken(450)
        held.append((broadcast.is_whole, len(broadcast._bytes)))
        assert held == [(True, 500), (False, 50)]
        assert await slow.next_piece() == (b"x" * 50, False)


async def test_broadcasts_share_one_byte_budget() -> None:
    """Without budget a broadcast keeps unread bytes only. A closed broadcast returns its bytes."""
    recorded = RecordedBroadcast(room=ByteBudget(25))
    other = RecordedBroadcast(room=recorded.room)
    await other.say(b"x" * 20)
    with recorded.broadcast.listening() as one:
        await recorded.say(b"x" * 10)
        one.record_taken(10)
        assert not recorded.broadcast.is_whole
        assert recorded.room.used_bytes == 20
        other.broadcast.close()
        other.broadcast.close()
        assert recorded.room.used_bytes == 0
        await recorded.say(b"y", next_piece=False)
        assert await one.next_piece() == (b"y", True)
    recorded.broadcast.close()
    assert recorded.room.used_bytes == 0


async def test_pieces_are_bounded() -> None:
    """A client far behind reads pieces of at most PIECE bytes. Only the last is marked as last."""
    recorded = RecordedBroadcast(PIECE_BYTES * 2)
    await recorded.say(b"x" * (PIECE_BYTES + 1), next_piece=False)
    with recorded.broadcast.listening() as one:
        data, is_last = await one.next_piece()
        assert (len(data), is_last) == (PIECE_BYTES, False)
        one.record_taken(PIECE_BYTES)
        assert await one.next_piece() == (b"x", True)
