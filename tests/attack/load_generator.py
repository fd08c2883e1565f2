"""`python -m tests.attack.load_generator PORT CA KEY_FILE MODEL CLIENTS TOKENS`: many clients on kept-alive
connections.

Runs in its own process, so that it does not slow the process that measures. Ends when standard input closes.
"""

import asyncio
import json
import ssl
import sys
from pathlib import Path


async def _call(port: int, tls: ssl.SSLContext, raw: bytes, answered: asyncio.Event) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls, server_hostname="localhost")
    try:
        while True:
            writer.write(raw)
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            body = await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r")[0]))
            if not head.startswith(b"http/1.1 200"):
                print(body.decode(errors="replace"), file=sys.stderr)
                await asyncio.sleep(0.2)  # a refused client waits before its next request
            answered.set()
    finally:
        answered.set()
        writer.transport.abort()


async def main() -> None:
    """Send requests until standard input closes. Print "asking" once each was answered or lost its connection."""
    port, ca, key, model, clients, tokens = sys.argv[1:]
    tls = ssl.create_default_context(cafile=ca)
    body = json.dumps({"model": model, "prompt": "w1 w2", "max_tokens": int(tokens), "temperature": 0}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {Path(key).read_text().strip()}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    raw, answered = head.encode() + body, [asyncio.Event() for _ in range(int(clients))]
    callers = [asyncio.create_task(_call(int(port), tls, raw, event)) for event in answered]
    for event in answered:
        await event.wait()
    print("asking", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(main())
