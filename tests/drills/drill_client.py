"""`python -m tests.drills.drill_client`: a client in its own process that uses only HTTPS and can be killed.

Its first argument is the request as JSON. It prints one JSON object per line for each event, and counts words itself:
the drills' models write one word per token.
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
    """Print one whole line. Safe to call from several threads."""
    with _lock:
        print(json.dumps(what), flush=True)


class Connection(http.client.HTTPSConnection):
    """An HTTPS connection. With `small`, it has a small receive buffer, so that the client is slow."""

    small = False

    def connect(self) -> None:
        """Connect like the base class, but set the receive buffer before the handshake, where it has an effect."""
        if not self.small:
            super().connect()
            return
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
        plain.settimeout(TIMEOUT_S)
        plain.connect(("127.0.0.1", self.port))
        self.sock = self._context.wrap_socket(plain, server_hostname=self.host)  # type: ignore[attr-defined]


def run_request(asked: dict[str, Any], number: int) -> None:
    """Run one streamed completion to its end."""
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
    """Print the events of a stream."""
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
    """Run all requests at once."""
    asked = json.loads(sys.argv[1])
    threads = [threading.Thread(target=run_request, args=(asked, number)) for number in range(asked["times"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
