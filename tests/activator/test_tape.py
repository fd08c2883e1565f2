"""An answer with any number of listeners: what is delivered, who is told that nobody is left, what is forgotten."""

import asyncio

import pytest

from activator.exchange import ClientGone
from activator.tape import PIECE, Room, Tape


class Told:
    """What a tape said to its owner."""

    def __init__(self, keep_bytes: int = 100, room: Room | None = None) -> None:
        self.said: list[str] = []
        self.room = room or Room(1 << 20)
        self.tape = Tape(keep_bytes, self.room, ended=self._ended, deserted=lambda: self.said.append("deserted"))

    async def _ended(self) -> None:
        assert not self.tape.ended, "nobody has heard the end"
        self.said.append(f"ended {len(self.tape.content()) if self.tape.is_whole else 0}")

    async def say(self, data: bytes, *, more: bool = True) -> None:
        await self.tape.send({"type": "http.response.body", "body": data, "more_body": more})

    async def head(self) -> None:
        headers = [(b"a", b"b"), (b"x-ratelimit-limit-tokens", b"9")]
        await self.tape.send({"type": "http.response.start", "status": 201, "headers": headers})


async def test_each_hears_it_from_the_start() -> None:
    """Who comes late, too; where a tenant stands with its limits is not part of it."""
    told = Told()
    tape = told.tape
    with tape.listening() as one:
        await told.head()
        await told.say(b"he")
        assert (await one.head()).headers == [(b"a", b"b")]
        assert await one.more() == (b"he", False)
        one.took(2)
        with tape.listening() as two:
            await told.say(b"llo", more=False)
            assert await one.more() == (b"llo", True)
            assert await two.more() == (b"hello", True)
        assert tape.content() == b"hello"
    assert told.said == ["ended 5"]


async def test_delivered_is_what_the_quickest_has() -> None:
    """And the writer waits for that one alone."""
    told = Told()
    tape = told.tape
    with tape.listening(), tape.listening() as quick:
        await told.head()
        await told.say(b"12")
        assert not tape.is_accepted()
        accepted = asyncio.create_task(tape.accepted())
        await asyncio.sleep(0)
        assert not accepted.done()
        quick.took(2)
        assert await accepted
        assert tape.is_accepted()


@pytest.mark.parametrize(
    ("watched", "ended", "want"),
    [
        pytest.param(True, False, ["deserted", "gone"], id="the run is told"),
        pytest.param(False, False, [], id="it has settled, and runs to its end"),
        pytest.param(True, True, ["ended 0"], id="it is over"),
    ],
)
async def test_when_the_last_one_leaves(watched: bool, ended: bool, want: list[str]) -> None:
    """Not when the last but one does."""
    told = Told()
    tape = told.tape
    with tape.listening():
        with tape.listening():
            tape.watch(lambda: told.said.append("gone"))
            if not watched:
                tape.unwatch()
        assert told.said == []
        if ended:
            await told.say(b"", more=False)
    assert not await tape.accepted()
    assert told.said == want


async def test_a_run_that_begins_when_all_have_left_is_told() -> None:
    """At once."""
    told = Told()
    gone = asyncio.Event()
    told.tape.watch(gone.set)
    await gone.wait()


async def test_a_broken_answer_ends_for_all() -> None:
    """After what they could still hear; one that is whole can't be broken."""
    told = Told()
    with told.tape.listening() as one, told.tape.listening() as two:
        await told.head()
        await told.say(b"he")
        waiting = asyncio.create_task(two.head())
        told.tape.abort()
        assert (await waiting).status == 201
        assert await one.more() == (b"he", False)
        one.took(2)
        with pytest.raises(ClientGone):
            await one.more()
        assert not await told.tape.accepted()
    whole = Told()
    with whole.tape.listening() as three:
        await whole.say(b"x", more=False)
        whole.tape.abort()
        assert await three.more() == (b"x", True)
    assert told.said == []


async def test_a_large_answer_is_forgotten_as_it_is_heard() -> None:
    """As far as the slowest has it: memory is that of the distance between listeners; it is not whole any more."""
    told = Told()
    tape = told.tape
    with tape.listening() as slow, tape.listening() as quick:
        for _ in range(50):
            await told.say(b"x" * 10)
            quick.took(10)
        held = [(tape.is_whole, len(tape._bytes))]
        slow.took(450)
        held.append((tape.is_whole, len(tape._bytes)))
        assert held == [(True, 500), (False, 50)]
        assert await slow.more() == (b"x" * 50, False)


async def test_all_tapes_share_their_room() -> None:
    """Where there is none a tape keeps what is not heard yet, and no more; what ends gives its room back."""
    told = Told(room=Room(25))
    other = Told(room=told.room)
    await other.say(b"x" * 20)
    with told.tape.listening() as one:
        await told.say(b"x" * 10)
        one.took(10)
        assert not told.tape.is_whole
        assert told.room.used_bytes == 20
        other.tape.close()
        other.tape.close()
        assert told.room.used_bytes == 0
        await told.say(b"y", more=False)
        assert await one.more() == (b"y", True)
    told.tape.close()
    assert told.room.used_bytes == 0


async def test_pieces_are_bounded() -> None:
    """However far behind one is; the last is told as the last."""
    told = Told(PIECE * 2)
    await told.say(b"x" * (PIECE + 1), more=False)
    with told.tape.listening() as one:
        data, is_last = await one.more()
        assert (len(data), is_last) == (PIECE, False)
        one.took(PIECE)
        assert await one.more() == (b"x", True)
