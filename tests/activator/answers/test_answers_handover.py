"""A planned change of the activator: the new one takes over the stored answers and the running idempotency keys."""

import asyncio
import contextlib
import signal
from pathlib import Path

import pytest

from activator.answers.answer_store import Claimed, ClaimedElsewhere, LocalAnswerStore
from activator.answers.answers_handover import FORMAT, SOCKET, HandoverReceiver, HandoverSender, Running
from activator.answers.idempotency_policy import AnswerKey, AnswerStoreLimits, KeptAnswer
from kelvin.ipc.socket_directory import SocketDirectory
from kelvin.ipc.tcp_listener import listen
from tests.activator.answers.idempotent_calls import ASK
from tests.activator.replica import halves
from tests.activator.world import ReceivedResponse, world

LIMITS = AnswerStoreLimits(ttl_s=100.0)
ALONE = ASK | {"connection": "close"}  # each request uses its own connection


def answer_key(number: int) -> AnswerKey:
    return AnswerKey("t", b"name %d" % number, b"fingerprint %d" % number, "once")


async def test_key_runs_once_across_a_planned_change(tmp_path: Path) -> None:
    """A request with the key runs at the old activator. Repeats there join it; repeats at the new activator get 409
    with a retry time. Afterwards every repeat gets the answer. Nothing runs twice.
    """

    listener = listen("127.0.0.1", 0)
    try:
        async with world(tmp_path, listener=listener) as here:
            held = halves()
            replica = await here.replica("a", held)
            first = asyncio.create_task(here.post(**ALONE))
            await replica.until(lambda r: len(r.calls) == 1)
            old = await here.start_successor()
            repeats = [asyncio.create_task(here.post(**ALONE)) for _ in range(8)]
            old.send_signal(signal.SIGUSR1)
            refused: set[asyncio.Task[ReceivedResponse]] = set()
            while not refused:  # until then all repeats reach the old activator and join
                repeats.append(asyncio.create_task(here.post(**ALONE)))
                refused, _ = await asyncio.wait(repeats, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            for each in refused:
                assert (each.result().code, each.result().headers["retry-after"]) == ("idempotency_key_in_use", "1")
            held.release()
            got = await first
            assert got.status == 200
            for repeat in await asyncio.gather(*repeats):
                assert repeat.status in (200, 409)
                assert repeat.status == 409 or repeat.body == got.body
            assert await old.wait() == 0
            again = await here.post(**ALONE)
            assert (again.status, again.body) == (200, got.body)
            assert again.headers["x-kelvin-repeat-of"] == got.headers["x-request-id"]
            other = await here.post(body={"model": "m", "messages": []}, **ALONE)
            assert other.code == "idempotency_key_reused"
            assert len(replica.calls) == 1
    finally:
        listener.close()


@pytest.mark.parametrize("ends", [signal.SIGUSR1, signal.SIGKILL], ids=["planned", "killed"])
async def test_kept_answers_move_to_the_next_activator(tmp_path: Path, ends: signal.Signals) -> None:
    """Answers survive two planned changes. A killed activator loses its answers, and the key is free at once."""

    listener = listen("127.0.0.1", 0)
    try:
        async with world(tmp_path, listener=listener) as here:
            replica = await here.replica("a")
            first = await here.post(**ALONE)
            for _ in range(2):
                old = await here.start_successor()
                old.send_signal(ends)
                assert await old.wait() == (0 if ends is signal.SIGUSR1 else -ends)
            again = await asyncio.wait_for(here.post(**ALONE), 10)
            assert again.status == 200
            assert ("x-kelvin-repeat-of" in again.headers) is (ends is signal.SIGUSR1)
            assert ends is signal.SIGKILL or again.body == first.body
            assert len(replica.calls) == (1 if ends is signal.SIGUSR1 else 2)
    finally:
        listener.close()


async def test_deadline_passed_in_a_claim_reports_the_wait(tmp_path: Path) -> None:
    """The old activator decides on keys, and hangs. The 504 says how long the request waited for its key."""

    listener = listen("127.0.0.1", 0)
    try:
        async with world(tmp_path, listener=listener) as here:
            old = await here.start_successor()
            old.send_signal(signal.SIGSTOP)
            try:
                got = await asyncio.wait_for(here.post(**ALONE, x_kelvin_deadline_ms="300"), 30)
            finally:
                old.send_signal(signal.SIGCONT)
            assert (got.status, got.code) == (504, "deadline_exceeded")
            assert b"s passed while claiming its key" in got.body
            assert b" 0.0 s passed" not in got.body
            old.send_signal(signal.SIGUSR1)
            assert await old.wait() == 0
    finally:
        listener.close()


class Pair:
    """The answer stores of an old and a new activator, connected by a handover."""

    def __init__(self, path: Path, limits: AnswerStoreLimits = LIMITS) -> None:
        path.chmod(0o700)
        self.now_s = 1000.0
        self.directory = SocketDirectory(path)
        self.old, self.new = (
            LocalAnswerStore(limits, lambda: self.now_s),
            LocalAnswerStore(limits, lambda: self.now_s + 500.0),
        )
        self.runs: list[Running] = []
        self.sender = HandoverSender(self.old, lambda: self.runs)

    async def connect(self) -> HandoverReceiver:
        await self.sender.listen(self.directory)
        found = await HandoverReceiver.connect(self.new, self.directory)
        assert found is not None
        await asyncio.sleep(0.01)  # let the old activator accept the connection
        return found


async def _keep(answers: LocalAnswerStore, number: int) -> None:
    await answers.publish(answer_key(number), Claimed(), b"sealed %d" % number)


async def test_all_that_is_known_is_handed_over(tmp_path: Path) -> None:
    """Stored answers move with their age. Running keys stay claimed until the old activator is done with them."""

    pair = Pair(tmp_path)
    await _keep(pair.old, 1)
    pair.now_s += 60.0
    await _keep(pair.old, 2)
    receiving = asyncio.ensure_future((await pair.connect()).receive())
    waiting = asyncio.ensure_future(pair.new.claim(answer_key(9)))
    assert isinstance(await pair.old.claim(answer_key(3)), Claimed)
    pair.runs = [Running(answer_key(number).name, answer_key(number).fingerprint) for number in (3, 4, 5)]
    await asyncio.sleep(0.02)
    assert not waiting.done(), "the old one decides"
    pair.sender.hand_over()
    assert isinstance(await waiting, Claimed)
    assert await pair.new.claim(answer_key(1)) == KeptAnswer(answer_key(1).fingerprint, b"sealed 1")
    assert isinstance(await pair.new.claim(answer_key(3)), ClaimedElsewhere)
    assert isinstance(await pair.old.claim(answer_key(8)), ClaimedElsewhere), "it begins nothing that is new"
    assert isinstance(await pair.old.claim(answer_key(2)), KeptAnswer)
    await _keep(pair.old, 3)
    await pair.old.release(answer_key(4), Claimed())
    await asyncio.sleep(0.02)
    assert await pair.new.claim(answer_key(3)) == KeptAnswer(answer_key(3).fingerprint, b"sealed 3")
    assert isinstance(await pair.new.claim(answer_key(4)), Claimed)
    assert isinstance(await pair.new.claim(answer_key(5)), ClaimedElsewhere)
    pair.now_s += 50.0  # the first answer is now 110 s old
    assert isinstance(await pair.new.claim(answer_key(1)), Claimed)
    assert isinstance(await pair.new.claim(answer_key(2)), KeptAnswer)
    pair.new.cache.check_integrity()
    await pair.sender.close()
    await asyncio.wait_for(receiving, 5)
    assert isinstance(await pair.new.claim(answer_key(5)), Claimed), "its activator has gone"


async def test_old_activator_that_hands_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the old activator lives, a claim at the new one waits briefly and is refused with a retry time. Once the
    old one has gone, or if there was none, the new one decides.
    """
    monkeypatch.setattr("activator.answers.answer_store.HANDOVER_WAIT_S", 0.05)

    pair = Pair(tmp_path)
    assert await HandoverReceiver.connect(pair.new, pair.directory) is None
    assert isinstance(await pair.new.claim(answer_key(1)), Claimed)
    receiver = await pair.connect()
    receiving = asyncio.ensure_future(receiver.receive())
    assert isinstance(await pair.new.claim(answer_key(1)), ClaimedElsewhere)
    pair.sender.hand_over()
    await asyncio.sleep(0.01)
    assert isinstance(await pair.new.claim(answer_key(1)), Claimed)
    await pair.sender.close()
    await asyncio.wait_for(receiving, 5)


async def test_activator_that_connects_late_is_handed_over_to(tmp_path: Path) -> None:
    """An activator that connects after the old one was told to end decides at once, by what the old one knows."""

    pair = Pair(tmp_path)
    await _keep(pair.old, 1)
    pair.runs = [Running(answer_key(2).name, answer_key(2).fingerprint)]
    pair.sender.hand_over()
    receiving = asyncio.ensure_future((await pair.connect()).receive())
    assert isinstance(await pair.new.claim(answer_key(3)), Claimed)
    assert await pair.new.claim(answer_key(1)) == KeptAnswer(answer_key(1).fingerprint, b"sealed 1")
    assert isinstance(await pair.new.claim(answer_key(2)), ClaimedElsewhere)
    assert isinstance(await pair.old.claim(answer_key(4)), ClaimedElsewhere), "it begins nothing that is new"
    await pair.sender.close()
    await asyncio.wait_for(receiving, 5)


def test_old_activator_ends_once_its_socket_has_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All answers reach a successor that doesn't read yet, or the log says that they did not. The socket buffer takes
    about 170 KiB. After `close` nothing runs here, as in a process that has ended.
    """
    monkeypatch.setattr("activator.answers.answers_handover.FLUSH_S", 0.02)

    async def received(number: int) -> bytes:
        place = tmp_path / str(number)
        place.mkdir()
        pair = Pair(place)
        for each in range(number):
            await pair.old.publish(answer_key(each), Claimed(), b"x" * 4000)
        await pair.sender.listen(pair.directory)
        with pair.directory.connect(SOCKET) as successor:
            async with asyncio.timeout(5):
                while repr(pair.sender) != "<HandoverSender successors=1>":
                    await asyncio.sleep(0)
            pair.sender.hand_over()
            await pair.sender.close()
            successor.setblocking(False)
            found = b""
            with contextlib.suppress(BlockingIOError):
                while part := successor.recv(1 << 20):
                    found += part
            return found

    outcomes = set()
    for number in range(20, 120, 8):
        caplog.clear()
        found = asyncio.run(received(number))
        is_logged = "did not receive all" in caplog.text
        outcomes.add(is_logged)
        assert is_logged or found.count(b"x" * 4000) == number
        assert is_logged or found.endswith(b"Complete")
    assert outcomes == {True, False}


async def test_large_answers_are_handed_over(tmp_path: Path) -> None:
    """A handover carries an answer of 65 MiB: KELVIN_ONCE_ANSWER_BYTES has no upper bound."""

    pair = Pair(tmp_path, AnswerStoreLimits(tenant_bytes=80 << 20, answer_bytes=80 << 20))
    await pair.old.publish(answer_key(1), Claimed(), bytes(65 << 20))
    receiving = asyncio.ensure_future((await pair.connect()).receive())
    pair.sender.hand_over()
    assert isinstance(await pair.new.claim(answer_key(1)), KeptAnswer)
    await pair.sender.close()
    await asyncio.wait_for(receiving, 5)


@pytest.mark.parametrize(
    "response_bytes",
    [
        pytest.param(b"", id="it ends at once"),
        pytest.param(b"\x00\x00\x00\x09ab", id="it ends within a message"),
        pytest.param(b"\xff\xff\xff\xffx", id="it ends within a message of 4 GiB"),
        pytest.param(b"\x00\x00\x00\x01x", id="no message"),
        pytest.param(b"\x00\x00\x00\x08\x92\xa5Hello" + bytes([FORMAT + 1]), id="another format"),
    ],
)
async def test_handover_that_breaks_off_frees_all_keys(tmp_path: Path, response_bytes: bytes) -> None:
    """Claims don't wait for a handover that ends early or that this activator can't parse."""

    pair = Pair(tmp_path)

    async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(response_bytes)
        writer.close()

    server = await asyncio.start_unix_server(speak, sock=pair.directory.listen(SOCKET))
    receiver = await HandoverReceiver.connect(pair.new, pair.directory)
    assert receiver is not None
    await asyncio.wait_for(receiver.receive(), 5)
    assert isinstance(await pair.new.claim(answer_key(1)), Claimed)
    server.close()
