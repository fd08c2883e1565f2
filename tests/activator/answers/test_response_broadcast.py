"""An answer with any number of listeners: what is delivered, who is told that nobody is left, what is forgotten."""

import asyncio

import pytest

from activator.answers.response_broadcast import PIECE, ByteBudget, ResponseBroadcast
from activator.http.exchange import ClientGone


class Told:
    """What a tape said to its owner."""

    def __init__(self, keep_bytes: int = 100, room: ByteBudget | None = None) -> None:
        self.said: list[str] = []
        self.room = room or ByteBudget(1 << 20)
        self.broadcast = ResponseBroadcast(
            keep_bytes, self.room, ended=self._ended, on_abandoned=lambda: self.said.append("deserted")
        )

    async def _ended(self) -> None:
        assert not self.broadcast.ended, "nobody has heard the end"
        self.said.append(f"ended {len(self.broadcast.content()) if self.broadcast.is_whole else 0}")

    async def say(self, data: bytes, *, next_piece: bool = True) -> None:
        await self.broadcast.send({"type": "http.response.body", "body": data, "more_body": next_piece})

    async def head(self) -> None:
        headers = [(b"a", b"b"), (b"x-ratelimit-limit-tokens", b"9")]
        await self.broadcast.send({"type": "http.response.start", "status": 201, "headers": headers})


async def test_each_client_reads_from_the_first_byte() -> None:
    """Who comes late, too; where a tenant stands with its limits is not part of it."""
    told = Told()
    broadcast = told.broadcast
    with broadcast.listening() as one:
        await told.head()
        await told.say(b"he")
        assert (await one.head()).headers == [(b"a", b"b")]
        assert await one.next_piece() == (b"he", False)
        one.record_taken(2)
        with broadcast.listening() as two:
            await told.say(b"llo", next_piece=False)
            assert await one.next_piece() == (b"llo", True)
            assert await two.next_piece() == (b"hello", True)
        assert broadcast.content() == b"hello"
    assert told.said == ["ended 5"]


async def test_delivered_bytes_follow_the_fastest_client() -> None:
    """And the writer waits for that one alone."""
    told = Told()
    broadcast = told.broadcast
    with broadcast.listening(), broadcast.listening() as quick:
        await told.head()
        await told.say(b"12")
        assert not broadcast.is_accepted()
        accepted = asyncio.create_task(broadcast.wait_accepted())
        await asyncio.sleep(0)
        assert not accepted.done()
        quick.record_taken(2)
        assert await accepted
        assert broadcast.is_accepted()


@pytest.mark.parametrize(
    ("watched", "ended", "want"),
    [
        pytest.param(True, False, ["deserted", "gone"], id="the run is told"),
        pytest.param(False, False, [], id="it has settled, and runs to its end"),
        pytest.param(True, True, ["ended 0"], id="it is over"),
    ],
)
async def test_run_is_abandoned_when_the_last_client_leaves(watched: bool, ended: bool, want: list[str]) -> None:
    """Not when the last but one does."""
    told = Told()
    broadcast = told.broadcast
    with broadcast.listening():
        with broadcast.listening():
            broadcast.watch(lambda: told.said.append("gone"))
            if not watched:
                broadcast.unwatch()
        assert told.said == []
        if ended:
            await told.say(b"", next_piece=False)
    assert not await broadcast.wait_accepted()
    assert told.said == want


async def test_run_started_after_all_left_is_abandoned() -> None:
    """At once."""
    told = Told()
    gone = asyncio.Event()
    told.broadcast.watch(gone.set)
    await gone.wait()


async def test_run_goes_on_if_a_client_joins_after_all_left() -> None:
    """It joins in the same round of the loop in which the run begins to watch."""
    told = Told()
    told.broadcast.watch(lambda: told.said.append("gone"))
    with told.broadcast.listening():
        await asyncio.sleep(0)
        assert told.said == []
    assert told.said == ["deserted", "gone"]


async def test_a_broken_answer_ends_for_all() -> None:
    """After what they could still hear; one that is whole can't be broken."""
    told = Told()
    with told.broadcast.listening() as one, told.broadcast.listening() as two:
        await told.head()
        await told.say(b"he")
        waiting = asyncio.create_task(two.head())
        told.broadcast.abort()
        assert (await waiting).status == 201
        assert await one.next_piece() == (b"he", False)
        one.record_taken(2)
        with pytest.raises(ClientGone):
            await one.next_piece()
        assert not await told.broadcast.wait_accepted()
    whole = Told()
    with whole.broadcast.listening() as three:
        await whole.say(b"x", next_piece=False)
        whole.broadcast.abort()
        assert await three.next_piece() == (b"x", True)
    assert told.said == []


async def test_large_response_is_trimmed_as_it_is_read() -> None:
    """As far as the slowest has it: memory is that of the distance between listeners; it is not whole any more."""
    told = Told()
    broadcast = told.broadcast
    with broadcast.listening() as slow, broadcast.listening() as quick:
        for _ in range(50):
            await told.say(b"x" * 10)
            quick.record_taken(10)
        held = [(broadcast.is_whole, len(broadcast._bytes))]
        slow.record_taken(450)
        held.append((broadcast.is_whole, len(broadcast._bytes)))
        assert held == [(True, 500), (False, 50)]
        assert await slow.next_piece() == (b"x" * 50, False)


async def test_broadcasts_share_one_byte_budget() -> None:
    """Where there is none a tape keeps what is not heard yet, and no more; what ends gives its room back."""
    told = Told(room=ByteBudget(25))
    other = Told(room=told.room)
    await other.say(b"x" * 20)
    with told.broadcast.listening() as one:
        await told.say(b"x" * 10)
        one.record_taken(10)
        assert not told.broadcast.is_whole
        assert told.room.used_bytes == 20
        other.broadcast.close()
        other.broadcast.close()
        assert told.room.used_bytes == 0
        await told.say(b"y", next_piece=False)
        assert await one.next_piece() == (b"y", True)
    told.broadcast.close()
    assert told.room.used_bytes == 0


async def test_pieces_are_bounded() -> None:
    """However far behind one is; the last is told as the last."""
    told = Told(PIECE * 2)
    await told.say(b"x" * (PIECE + 1), next_piece=False)
    with told.broadcast.listening() as one:
        data, is_last = await one.next_piece()
        assert (len(data), is_last) == (PIECE, False)
        one.record_taken(PIECE)
        assert await one.next_piece() == (b"x", True)
