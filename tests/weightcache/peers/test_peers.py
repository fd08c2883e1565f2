"""Agents send verified chunks to each other, from memory and from disk, to nodes of the same secret only."""

import socket
import ssl
from contextlib import ExitStack
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from coldstart_bench.harness.installation import free_ports
from kelvin.blobstore.file_store import FileStore
from kelvin.contracts.errors import Refused
from kelvin.crypto.node_tls import NodeTls
from tests.loop_thread import HOST
from tests.weightcache.kit import TENANT, make_version, run_agent, settings_of
from tests.weightcache.peer_kit import SECRET, ask, node, run_fake_peer, url_of
from weightcache.peers.ownership_policy import ChunkState
from weightcache.peers.peer_client import Peer
from weightcache.peers.peer_protocol import ChunkQuery, ChunkStates, chunk_path, query_path

VERSION = make_version(seed=11, pages=(8, 16, 3))
COUNT = len(VERSION.digests)


def stock(root: Path, store: Path) -> None:
    """Put the version on the node's disk, and not in its memory."""
    with run_agent(settings_of(root), FileStore(store)) as agent:
        agent.keep(VERSION)


def test_peer_serves_chunks_from_memory(tmp_path: Path) -> None:
    """Chunks that one node has in memory are sent to another, which reads nothing from the store."""
    ports = free_ports(2)
    with (
        node(tmp_path / "a", ports[0], [ports[1]], store=tmp_path / "store") as (one, first),
        node(tmp_path / "b", ports[1], [ports[0]], store=tmp_path / "store") as (two, second),
    ):
        one.publish(VERSION)
        one.acquire(VERSION).close()
        assert len(first.ranges) == COUNT
        with two.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier == {"host": 0, "nvme": 0, "peer": COUNT, "store": 0}
        assert second.ranges == []
        state = one.state().peers
        assert (state.sent_chunks, state.sent_bytes) == (COUNT, len(VERSION.linear))
        assert two.state().peers.nodes[0].answers
        two.wait_for("they are on its NVMe tier", lambda now: now.nvme.chunks == COUNT)


@pytest.mark.parametrize("tier", [pytest.param("host", id="into memory"), pytest.param("nvme", id="onto NVMe")])
def test_prefetch_reads_from_peers_first(tmp_path: Path, tier: str) -> None:
    """A prefetch reads a peer's chunks from the peer, and other chunks from the store."""
    ports = free_ports(2)
    other = make_version(seed=12)
    with (
        node(tmp_path / "a", ports[0], [ports[1]], store=tmp_path / "store") as (one, first),
        node(tmp_path / "b", ports[1], [ports[0]], store=tmp_path / "store") as (two, second),
    ):
        one.publish(VERSION)
        one.publish(other)
        one.acquire(VERSION).close()
        before = len(first.ranges)
        two.prefetch(VERSION, tier)
        state = two.wait_for("the version is loaded", lambda now: now.prefetches.done == 1)
        assert (second.ranges, state.chunk_reads) == ([], {"peer": COUNT})
        two.prefetch(other, tier)
        state = two.wait_for("the other version is loaded", lambda now: now.prefetches.done == 2)
        assert state.chunk_reads == {"peer": COUNT, "store": len(other.digests)}
        assert len(first.ranges) == before
        with two.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier[tier] == COUNT


def test_prefetches_of_all_at_once(tmp_path: Path) -> None:
    """A deploy prefetches a version on all nodes at once. From a slow store each range is read about once in all."""
    ports = free_ports(3)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                node(tmp_path / f"n{n}", port, [each for each in ports if each != port], store=tmp_path / "store")
            )
            for n, port in enumerate(ports)
        ]
        nodes[0][0].publish(VERSION)
        for _, store in nodes:
            store.gate.clear()
        for agent, _ in nodes:
            agent.prefetch(VERSION)
        for agent, _ in nodes:
            agent.wait_for("it begins", lambda now: now.prefetches.running == 1)
        for _, store in nodes:
            store.gate.set()
        for agent, _ in nodes:
            agent.wait_for("the version is loaded", lambda now: now.prefetches.done == 1)
        ranges = [each for _, store in nodes for each in store.ranges]
        assert COUNT == len(set(ranges)) <= len(ranges) <= COUNT + COUNT // 2, "ranges are read about once"
        for agent, _ in nodes:
            with agent.acquire(VERSION) as lease:
                assert lease.view(0, lease.total_bytes) == VERSION.linear


def test_peer_serves_chunks_from_nvme(tmp_path: Path) -> None:
    """Chunks that only the NVMe tier of a peer has are sent from there, and take no place in the peer's memory."""
    ports = free_ports(2)
    stock(tmp_path / "a", tmp_path / "store")
    with (
        node(tmp_path / "a", ports[0], [], store=tmp_path / "store") as (one, _),
        node(tmp_path / "b", ports[1], [ports[0]], store=tmp_path / "store") as (two, second),
    ):
        with two.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["peer"] == COUNT
        assert second.ranges == []
        assert one.state().host.chunks == 0, "a chunk that is sent takes a place in memory"


def test_node_recognises_its_own_url(tmp_path: Path) -> None:
    """The list of peers may be the same on all nodes: a node recognises its own URL."""
    ports = free_ports(2)
    with node(tmp_path / "a", ports[0], ports, store=tmp_path / "store") as (one, store):
        one.publish(VERSION)
        one.acquire(VERSION).close()
        assert len(store.ranges) == COUNT
        assert [fact.url for fact in one.state().peers.nodes] == [f"https://{HOST}:{ports[1]}"]


def test_unreachable_peer_is_replaced_by_the_store(tmp_path: Path) -> None:
    """If no agent listens at a peer's address, chunks come from the store, and the peer is not asked for a while."""
    ports = free_ports(2)
    with node(tmp_path / "a", ports[0], [ports[1]], store=tmp_path / "store") as (one, store):
        one.publish(VERSION)
        with one.acquire(VERSION) as lease:
            assert lease.chunks_by_tier["store"] == COUNT
        assert len(store.ranges) == COUNT
        assert not one.state().peers.nodes[0].answers


def test_damaged_file_is_not_sent(tmp_path: Path) -> None:
    """A node whose own copy is damaged finds that out, sets the file aside, and reports that it has none."""
    ports = free_ports(2)
    stock(tmp_path / "a", tmp_path / "store")
    with (
        node(tmp_path / "a", ports[0], [], store=tmp_path / "store") as (one, _),
        node(tmp_path / "b", ports[1], [ports[0]], store=tmp_path / "store") as (two, second),
    ):
        path = one.chunk_file(VERSION.digests[1])
        path.write_bytes(bytes(path.stat().st_size))
        with two.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["store"] == 1
        assert len(second.ranges) == 1
        assert one.state().chunk_faults == {"nvme": {"digest": 1}}
        assert two.state().chunk_faults == {}


def test_wrong_bytes(tmp_path: Path) -> None:
    """Wrong bytes from a peer are counted and replaced by the store's, and the peer is not asked again."""
    ports = free_ports(2)
    stock(tmp_path / "a", tmp_path / "store")
    with (
        node(tmp_path / "a", ports[0], [], store=tmp_path / "store", verify=lambda *_: True) as (one, _),
        node(tmp_path / "b", ports[1], [ports[0]], store=tmp_path / "store") as (two, second),
    ):
        for digest in VERSION.digests:
            path = one.chunk_file(digest)
            path.write_bytes(bytes(path.stat().st_size))
        with two.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["store"] == COUNT
        state = two.state()
        faults = state.chunk_faults["peer"]["digest"]
        assert 1 <= faults <= COUNT
        assert state.healed_chunks == {"store": faults}
        assert not state.peers.nodes[0].answers
        assert len(second.ranges) == COUNT


def has_all(request_body: bytes) -> web.Response:
    count = len(msgspec.json.decode(request_body, type=ChunkQuery).digests)
    return web.json_response({"node": "pretender", "standings": "r" * count, "moved": 1})


@pytest.mark.parametrize("kind", ["cut", "cut at once", "busy", "longer", "error", "nonsense"])
def test_failing_peer_is_replaced_by_the_store(tmp_path: Path, kind: str) -> None:
    """The peer claims to have all chunks, and then cuts answers, is busy, or sends nonsense. The store is used."""
    ranges: list[str] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "POST":
            return web.Response(body=b"?") if kind == "nonsense" else has_all(await request.read())
        ranges.append(request.headers["range"])
        chunk = dict(zip(VERSION.digests, VERSION.chunks, strict=True))[request.path.rsplit("/", 1)[1]]
        begin = int(request.headers["range"].removeprefix("bytes=").removesuffix("-"))
        if kind == "busy":
            return web.Response(status=503, headers={"retry-after": "0"})
        if kind == "error":
            return web.Response(status=500)
        length = len(chunk) + (4096 if kind == "longer" else 0)
        reply = web.StreamResponse(status=206)
        reply.headers["content-range"] = f"bytes {begin}-{length - 1}/{length}"
        reply.content_length = length - begin
        await reply.prepare(request)
        if kind == "cut":
            await reply.write(chunk[begin : begin + 1000])
        assert request.transport is not None
        request.transport.close()
        return reply

    with (
        run_fake_peer(answer) as port,
        node(tmp_path / "b", free_ports(1)[0], [port], store=tmp_path / "store") as (two, second),
    ):
        two.publish(VERSION)
        with two.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["store"] == COUNT
        assert len(second.ranges) == COUNT
        if kind == "cut":
            assert "bytes=1000-" in ranges, "the read is not resumed where it was cut"
        if kind in ("cut", "error", "nonsense", "busy"):
            assert not two.state().peers.nodes[0].answers


async def test_peer_that_sends_no_chunk_is_paused_longer() -> None:
    """A peer that claims to have a chunk and does not send it is paused. Every failure doubles the pause."""

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return has_all(await request.read()) if request.method == "POST" else web.Response(status=500)

    now, digest = 0.0, VERSION.digests[0]
    with run_fake_peer(answer) as port:
        connector = aiohttp.TCPConnector(ssl=NodeTls([SECRET]).client_context())
        async with aiohttp.ClientSession(connector=connector) as session:
            peer = Peer(url_of(port), session, lambda: now)
            for pause in (2.0, 4.0, 8.0):
                assert await peer.query_chunks(TENANT, [digest], None, 0.0) == [ChunkState.READY]
                with pytest.raises(Refused):
                    await peer.fetch(TENANT, digest, memoryview(bytearray(8)))
                now += pause - 0.1
                assert not peer.is_available
                now += 0.1
                assert peer.is_available


def test_interrupted_answer_is_resumed(tmp_path: Path) -> None:
    """If only the connection is lost, the rest of the chunk is requested, and no byte twice."""
    interrupted: set[str] = set()
    chunks = dict(zip(VERSION.digests, VERSION.chunks, strict=True))

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "POST":
            return has_all(await request.read())
        digest = request.path.rsplit("/", 1)[1]
        begin, chunk = int(request.headers["range"].removeprefix("bytes=").removesuffix("-")), chunks[digest]
        assert begin == (1000 if digest in interrupted else 0)
        reply = web.StreamResponse(status=206)
        reply.headers["content-range"] = f"bytes {begin}-{len(chunk) - 1}/{len(chunk)}"
        reply.content_length = len(chunk) - begin
        await reply.prepare(request)
        if digest in interrupted:
            await reply.write(chunk[begin:])
        else:
            interrupted.add(digest)
            await reply.write(chunk[:1000])
            assert request.transport is not None
            request.transport.close()
        return reply

    with (
        run_fake_peer(answer) as port,
        node(tmp_path / "b", free_ports(1)[0], [port], store=tmp_path / "store") as (two, second),
    ):
        two.publish(VERSION)
        with two.acquire(VERSION) as lease:
            assert lease.view(0, lease.total_bytes) == VERSION.linear
            assert lease.chunks_by_tier["peer"] == COUNT
        assert second.ranges == []
        assert interrupted == set(VERSION.digests)


def test_a_stranger_gets_nothing(tmp_path: Path) -> None:
    """Clients without the secret get no answer: without TLS, without a certificate, or with another secret's. No node
    asks a server of another secret.
    """
    ports = free_ports(2)
    without_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without_certificate.check_hostname, without_certificate.verify_mode = False, ssl.CERT_NONE
    other = NodeTls([b"f" * 64]).client_context()
    other.verify_mode = ssl.CERT_NONE  # a client that accepts any server
    request = f"GET {chunk_path(TENANT, VERSION.digests[0])} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    with (
        node(tmp_path / "a", ports[0], [], store=tmp_path / "store") as (one, _),
        node(tmp_path / "b", ports[1], [ports[0]], store=tmp_path / "store", secret=b"f" * 64) as (two, _),
    ):
        one.publish(VERSION)
        one.acquire(VERSION).close()
        for context in (without_certificate, other):
            assert ask(ports[0], request, context) == b""
        with socket.create_connection((HOST, ports[0]), 10) as plain:
            plain.sendall(request.encode())
            assert b"HTTP" not in plain.recv(1000)
        with two.acquire(VERSION) as lease:
            assert lease.chunks_by_tier["store"] == COUNT
        state = one.wait_for("each is counted", lambda now: now.peers.strangers >= 4)
        assert state.peers.sent_bytes == 0
        assert b"200 OK" in ask(ports[0], request), "the control: a node is refused"


def body_of(answer: bytes) -> bytes:
    return answer.partition(b"\r\n\r\n")[2]


def test_peer_port_serves_ranges_and_queries(tmp_path: Path) -> None:
    """The port serves ranges and queries, refuses bad requests, keeps tenants apart, and reveals no paths."""
    port = free_ports(1)[0]
    chunk, digest = VERSION.chunks[1], VERSION.digests[1]

    def get(path: str, *headers: str) -> tuple[int, bytes]:
        head = "".join(f"{line}\r\n" for line in headers)
        answer = ask(port, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{head}\r\n")
        return int(answer.split(b" ")[1]), body_of(answer)

    def query_chunks(tenant: str, body: bytes) -> tuple[int, bytes]:
        head = f"host: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        answer = ask(port, f"POST {query_path(tenant)} HTTP/1.1\r\n{head}{body.decode()}")
        return int(answer.split(b" ")[1]), body_of(answer)

    with node(tmp_path, port, [], store=tmp_path / "store") as (one, _):
        one.publish(VERSION)
        one.acquire(VERSION).close()
        path = chunk_path(TENANT, digest)
        assert get(path) == (200, chunk)
        assert get(path, "range: bytes=100-") == (206, chunk[100:])
        assert get(path, "range: bytes=100-199") == (206, chunk[100:200])
        assert get(path, "range: bytes=-7") == (206, chunk[-7:])
        assert get(path, f"range: bytes={len(chunk)}-") == (416, b"")
        for bad, status in (
            (chunk_path("other", digest), 404),
            (chunk_path(TENANT, "0" * 64), 404),
            (chunk_path(TENANT, "xyz"), 400),
            (chunk_path("..", digest), 400),
            ("/v1/state", 404),
            ("/", 404),
            (query_path(TENANT), 405),
        ):
            found, body = get(bad)
            assert (found, str(tmp_path).encode() in body) == (status, False), bad
        assert get(path, "range: pages=1-2")[0] == 400
        request = msgspec.json.encode(ChunkQuery(digests=(digest, "0" * 64)))
        for tenant, standings in ((TENANT, "r-"), ("other", "--")):
            status, body = query_chunks(tenant, request)
            assert (status, msgspec.json.decode(body, type=ChunkStates).standings) == (200, standings)
        assert query_chunks(TENANT, b"{}")[0] == 400
        assert query_chunks(TENANT, msgspec.json.encode(ChunkQuery(digests=("0" * 64,) * 2049)))[0] == 400
        assert query_chunks(TENANT, b"[" * 100_000)[0] == 400


def test_secret_can_be_rotated(tmp_path: Path) -> None:
    """During a rotation, nodes that use the new secret and nodes that know it can talk. Others can't."""
    ports = free_ports(1)
    with node(tmp_path, ports[0], [], store=tmp_path / "store") as (one, _):
        one.publish(VERSION)
        one.acquire(VERSION).close()
        request = "GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        assert b"404" in ask(ports[0], request, NodeTls([SECRET, b"n" * 64]).client_context())
        assert ask(ports[0], request, NodeTls([b"n" * 64, SECRET]).client_context()) == b""
