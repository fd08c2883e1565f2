"""An answer of the door as its bytes come (RFC 9112, as far as the door uses it), and what it says. Pure."""

from collections.abc import Iterable
from typing import Any

import msgspec

_END = b"\r\n\r\n"


class Answer:
    """Of one request. `status` is 0 until its head is here; `body` has what has come of it, without framing."""

    __slots__ = ("_chunked", "_left", "_unread", "body", "is_stream", "retry_after", "status")

    def __init__(self) -> None:
        self.status = 0
        self.body = bytearray()
        self.is_stream = self.retry_after = False
        self._unread = bytearray()
        self._chunked = False
        self._left = 0  # bytes of the body, or of the chunk that is being read with its line's end

    def feed(self, data: bytes) -> bool:
        """Whether it is whole. Raises ValueError for what is no answer."""
        self._unread += data
        if self.status == 0 and not self._read_head():
            return False
        return self._read_chunks() if self._chunked else self._read_plain()

    def _read_head(self) -> bool:
        end = self._unread.find(_END)
        if end < 0:
            return False
        head = bytes(self._unread[:end]).lower()
        del self._unread[: end + len(_END)]
        lines = head.split(b"\r\n")
        fields = dict(line.split(b": ", 1) for line in lines[1:])
        self.status = int(lines[0][9:12])
        self.is_stream = fields.get(b"content-type", b"").startswith(b"text/event-stream")
        self.retry_after = b"retry-after" in fields
        self._chunked = fields.get(b"transfer-encoding") == b"chunked"
        self._left = int(fields.get(b"content-length", b"0"))
        return True

    def _read_plain(self) -> bool:
        self.body += self._unread[: self._left]
        self._left -= min(self._left, len(self._unread))
        self._unread.clear()
        return self._left == 0

    def _read_chunks(self) -> bool:
        unread = self._unread
        while (end := unread.find(b"\r\n")) >= 0:
            size = int(unread[:end], 16)
            if len(unread) < end + 4 + size:
                return False
            self.body += unread[end + 2 : end + 2 + size]
            del unread[: end + 4 + size]
            if size == 0:
                return True
        return False


def said(answer: Answer) -> tuple[str, str, bool]:
    """Its text, the code of its failure (or ""), and whether it is whole as far as its own form says."""
    if answer.status == 0 or not answer.body:
        return "", "", answer.status not in (0, 200)
    if answer.is_stream:
        return _of_events(bytes(answer.body).split(b"\n\n"))
    try:
        found = msgspec.json.decode(bytes(answer.body))
    except msgspec.DecodeError:
        return "", "", False
    if answer.status != 200:
        return "", str(found["error"]["code"]), True
    return _text(found), "", True


def _of_events(events: Iterable[bytes]) -> tuple[str, str, bool]:
    pieces, failed, whole = [], "", False
    for event in events:
        lines = event.split(b"\n")
        data = next((line[6:] for line in lines if line.startswith(b"data: ")), b"")
        if b"event: error" in lines and data:
            failed = str(msgspec.json.decode(data)["error"]["code"])
        elif data == b"[DONE]":
            whole = True
        elif data.startswith(b"{"):
            try:
                pieces.append(_text(msgspec.json.decode(data)))
            except msgspec.DecodeError:  # cut in the middle of it
                break
    return "".join(pieces), failed, whole or bool(failed)


def _text(found: Any) -> str:
    choices = found.get("choices") or [{}]
    choice = choices[0]
    return str(choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or "")
