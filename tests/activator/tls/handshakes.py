"""TLS handshakes without a socket."""

import ssl


def handshake(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> ssl.SSLObject:
    """Perform a handshake. Return the client's end. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    done: set[int] = set()
    for _ in range(10):
        for number, end in enumerate(ends):
            try:
                end.do_handshake()
                done.add(number)
            except ssl.SSLWantReadError:
                continue
    assert done == {0, 1}
    return ends[0]
