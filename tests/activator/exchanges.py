"""A request as a handler gets it, without a connection. Its client reads everything at once."""

from collections.abc import Callable, Iterable

from starlette.types import Message

from activator.http.deadline_timer import DeadlineTimer
from activator.http.exchange import ARRIVAL_KEY, REQUEST_ID_KEY, Exchange, read_clocks_us


class FakeConnection:
    """A connection whose client has read everything that was sent."""

    def __init__(self) -> None:
        self.deadline_timer = DeadlineTimer()

    def unaccepted_bytes(self) -> int:
        return 0

    def is_all_accepted(self) -> bool:
        return True

    async def wait_all_accepted(self) -> bool:
        return True

    def watch(self, on_disconnect: Callable[[], None]) -> None: ...

    def try_read_body(self) -> bytes | None:
        return None

    def on_body_read(self) -> None: ...

    def unwatch(self, on_disconnect: Callable[[], None] | None = None) -> None: ...

    def abort(self) -> None: ...


def exchange(
    said: list[bytes] | None = None,
    connection: FakeConnection | None = None,
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    address: str = "127.0.0.1",
) -> Exchange:
    """Return request req_1 with a deadline of a minute. Its response is appended to `said`: the status as <200>, then
    pieces of the body.
    """

    async def send(message: Message) -> None:
        if said is not None:
            said.append(message.get("body", b"<%d>" % message.get("status", 0)))

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    scope = {
        "method": "POST", "raw_path": b"/", "query_string": b"", "headers": [*headers], "client": (address, 1),
        ARRIVAL_KEY: read_clocks_us(), REQUEST_ID_KEY: "req_1",
    }  # fmt: skip
    return Exchange(scope, receive, send, connection or FakeConnection(), 60.0)
