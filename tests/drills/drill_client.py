"""`python -m tests.drills.drill_client`: an outside client that knows HTTPS and nothing else, and can be killed.

Its first argument says what to ask, as JSON; it prints one JSON object a line for what comes, as it comes, and counts
the words itself: the drills' models write one word for each token.
"""

import http.client
import json
import re
import socket
import ssl
import sys
import threading
import time
from typing import Any

WORD = re.compile(r"w\d+|<s>|</s>|<unk>")
TIMEOUT_S = 150.0
SMALL_BUFFER = 4096

_lock = threading.Lock()


def tell(**what: object) -> None:
    """A line that is whole, whoever else writes one."""
    with _lock:
        print(json.dumps(what), flush=True)


class Connection(http.client.HTTPSConnection):
    """Takes little at a time where it is told to be slow."""

    small = False

    def connect(self) -> None:
        """As its base, but with the receive buffer set before the handshake, where it counts."""
        if not self.small:
            super().connect()
            return
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        plain.settimeout(TIMEOUT_S)
        plain.connect(("127.0.0.1", self.port))
        self.sock = self._context.wrap_socket(plain, server_hostname=self.host)  # type: ignore[attr-defined]


def run_request(asked: dict[str, Any], number: int) -> None:
    """One streamed completion from request to end."""
    context = ssl.create_default_context(cafile=asked["ca"])
    connection = Connection("localhost", asked["port"], context=context, timeout=TIMEOUT_S)
    connection.small = bool(asked["pace_s"])
    headers = {"authorization": f"Bearer {asked['key']}", "content-type": "application/json"}
    try:
        connection.request("POST", "/v1/completions", json.dumps(asked["body"]), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            tell(n=number, type="end", how=json.loads(answer.read())["error"]["code"])
            return
        read(answer, number, asked["pace_s"])
    except (OSError, http.client.HTTPException, ValueError) as error:
        tell(n=number, type="end", how="cut", why=repr(error))
    finally:
        connection.close()


def read(answer: http.client.HTTPResponse, number: int, pace_s: float) -> None:
    """The events of a stream."""
    failed = False
    for raw in answer:
        line = raw.decode().rstrip()
        if line.startswith(": waiting"):
            tell(n=number, type="beat", stage=line.split("stage=")[1].split()[0])
        elif line == "event: error":
            failed = True
        elif line == "data: [DONE]":
            tell(n=number, type="end", how="done")
            return
        elif line.startswith("data: ") and failed:
            tell(n=number, type="end", how=json.loads(line[6:])["error"]["code"])
            return
        elif line.startswith("data: "):
            (choice,) = json.loads(line[6:])["choices"]
            tell(n=number, type="words", count=len(WORD.findall(choice["text"])))
            if choice["finish_reason"]:
                tell(n=number, type="finish")
            time.sleep(pace_s)
    tell(n=number, type="end", how="cut", why="no end")


def main() -> None:
    """All of them at once."""
    asked = json.loads(sys.argv[1])
    threads = [threading.Thread(target=run_request, args=(asked, number)) for number in range(asked["times"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
