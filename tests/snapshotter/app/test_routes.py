"""The push API over a real Unix socket: authorization, early refusals, and bounds."""

import asyncio
import json
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest
from blake3 import blake3
from fastapi import FastAPI
from msgspec import structs

from kelvin.cli.artifacts.progress import Progress
from kelvin.cli.artifacts.push import push_directory
from kelvin.contracts.artifacts.push_api import (
    CommitRequest,
    CommitStep,
    Committed,
    Committing,
    Missing,
    MissingRequest,
    Plan,
    PlanRequest,
    WeightsFile,
)
from kelvin.contracts.errors import Unavailable
from kelvin.contracts.serving.control_messages import Scope, TenantLimits
from kelvin.contracts.wire import decode, encode
from kelvin.ipc.failure_responses import install_failure_handlers
from snapshotter.app.app import SOCKET
from snapshotter.app.routes import push_routes
from snapshotter.intake.policy.file_roles import MAX_PATHS
from snapshotter.intake.policy.layout import assemble
from snapshotter.intake.tenant_call_limits import BodyBudget
from snapshotter.push.pushes import MAX_CHUNKS, MAX_DRY_RUNS, MAX_PLANS, MAX_RECORDS, MAX_TEXT_BYTES
from snapshotter.store.catalog import Catalog, StoredChunks
from tests.eventually import eventually
from tests.snapshotter.bench import Bench
from tests.snapshotter.control import UNSERVED
from tests.snapshotter.house import (
    House,
    announce_digests,
    make_plan,
    open_house,
    post,
    principal_of,
    problem,
    push_whole,
    settings_for,
)
from tests.snapshotter.intake.test_intake import REFUSALS, config
from tests.snapshotter.models import Model, default_config, raw_safetensors, request_of
from tests.snapshotter.sender import TENANT, digests_of


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """One snapshotter for all tests of this file. Each test uses its own tenants."""
    settings = settings_for(tmp_path_factory.mktemp("house"), max_version_bytes=1 << 20)
    with open_house(settings) as opened:
        yield opened


MORE = [
    pytest.param(Model(config=config(architectures=[UNSERVED])).files(), "config.json", "its attention is chunked",
                 id="an architecture that the gate refuses"),
    pytest.param(Model(config=config(gate_vocab_size=31)).files(), "tokenizer.json", "the embedding has 31 rows",
                 id="a tokenizer larger than the vocabulary that the gate found"),
    pytest.param(Model(config=config(max_position_embeddings=1)).files(), "config.json", "1 positions",
                 id="a model that can't answer"),
]  # fmt: skip


@pytest.mark.parametrize(("files", "path", "reason"), [*REFUSALS, *MORE])
def test_refused_before_any_chunk(house: House, files: dict[str, bytes], path: str, reason: str) -> None:
    """Every refusal comes with the plan, as problem details. Nothing was staged or stored."""
    with house.client("refused") as client:
        status, code, detail = problem(post(client, "/plans", request_of(files)))
    assert (status, code) == (422, "artifact_rejected")
    assert detail.startswith(f"{path}: ")
    assert reason in detail
    assert not (house.data / "staging" / "refused").exists()
    assert not (house.store / "refused").exists()


def test_files_of_a_plan_are_counted_before_they_are_read(house: House) -> None:
    """A list of short names would take twenty times its size in memory. It is refused with a small part of that."""
    body = encode(PlanRequest(model="m", small_files=(), weights=(), other_paths=("a",) * 1_000_000))
    with house.client("many") as client:
        tracemalloc.start()
        try:
            status, code, detail = problem(client.post("/push/v1/plans", content=body))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (status, code) == (422, "artifact_rejected")
    assert detail == f"model: a directory may hold at most {MAX_PATHS} files"
    assert peak < 8 * len(body)


def test_plans_that_are_sent_slowly_hold_up_no_tenant(house: House) -> None:
    """Two tenants send half a plan each, and a third tenant's plan is answered meanwhile."""
    begun, answered = threading.Barrier(3), threading.Event()

    def slowly() -> Iterator[bytes]:
        yield b"{"
        begun.wait(20.0)
        assert answered.wait(20.0)
        yield b"}"

    def send(tenant: str) -> None:
        with house.client(tenant) as client:
            client.post("/push/v1/plans", content=slowly())

    senders = [threading.Thread(target=send, args=(tenant,)) for tenant in ("slow-a", "slow-b")]
    for sender in senders:
        sender.start()
    try:
        begun.wait(20.0)
        with house.client("quick") as client:
            status, code, _ = problem(client.post("/push/v1/plans", content=b"{}"))
    finally:
        answered.set()
        for sender in senders:
            sender.join()
    assert (status, code) == (400, "invalid_request")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"model":"%s","small_files":[],"weights":[]}', id="model"),
        pytest.param(b'{"model":"m","small_files":[{"path":"%s","content":""}],"weights":[]}', id="path"),
        pytest.param(b'{"model":"m","small_files":[],"weights":[],"other_paths":["%s"]}', id="other path"),
        pytest.param(b'{"model":"%s","model":"m","small_files":[],"weights":[]}', id="a text that is replaced"),
        pytest.param(b'{"model":"m","small_files":[],"weights":[],"%s":1}', id="the name of a field"),
    ],
)
def test_texts_of_a_plan_are_measured_before_they_are_read(house: House, body: bytes) -> None:
    """One wide character makes a text four times as large in memory, so the text is refused without being decoded."""
    sent = body % (b"\\ud83d\\ude00" + b"a" * MAX_TEXT_BYTES)
    check_refused_unread(house, sent)


def test_many_texts_of_a_plan_are_measured_together(house: House) -> None:
    """Many short texts count together."""
    text = b'"\\ud83d\\ude00' + b"a" * (MAX_TEXT_BYTES // 256) + b'"'
    check_refused_unread(
        house, b'{"model":"m","small_files":[],"weights":[],"other_paths":[%s]}' % b",".join([text] * 256)
    )


def check_refused_unread(house: House, sent: bytes) -> None:
    with house.client("many") as client:
        tracemalloc.start()
        try:
            status, code, detail = problem(client.post("/push/v1/plans", content=sent))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert (status, code) == (400, "invalid_request")
    assert detail == "body=(without the contents of files): may take at most 16777216 bytes"
    assert peak < 3.5 * len(sent)


def test_too_large_version_is_refused(house: House) -> None:
    """A version that can never fit is refused with the plan."""
    big = Model(config=default_config())
    big.shards["model.safetensors"] |= {"big": type(big.shards["model.safetensors"]["model.norm.weight"])(
        "U8", (1 << 20,), bytes(1 << 20))}  # fmt: skip
    with house.client("large") as client:
        assert problem(post(client, "/plans", big.request()))[:2] == (507, "capacity_exceeded")


def test_a_version_that_claims_too_much_is_not_laid_out(house: House) -> None:
    """A short header may claim more chunks than fit in memory. The push is refused before its layout and its gate."""
    size, gates = 1 << 60, len(house.control.gates)
    tensor = {"dtype": "F32", "shape": [size // 32, 8], "data_offsets": [0, size]}
    header = raw_safetensors(json.dumps({"model.embed_tokens.weight": tensor}).encode())
    claims = WeightsFile(path="model.safetensors", size=len(header) + size, header=header)
    with house.client("large") as client:
        request = structs.replace(Model().request(), weights=(claims,))
        status, code, detail = problem(post(client, "/plans", request))
    assert (status, code) == (507, "capacity_exceeded")
    assert detail.startswith("bytes of one version: needs 1152921504606")
    assert len(house.control.gates) == gates


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 401, id="no caller"),
        pytest.param({"x-kelvin-principal": "{}"}, 400, id="an incomplete caller"),
        pytest.param(principal_of(TENANT, Scope.INFER), 403, id="a key for inference"),
        pytest.param(principal_of("Not a label"), 400, id="a tenant that is no label"),
        pytest.param(principal_of("../up"), 400, id="a tenant that is a path"),
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/plans"), ("POST", "/plans/0/missing"), ("PUT", "/plans/0/chunks/0"), ("POST", "/plans/0/commit"),
        ("POST", "/fsck"),
    ],
)  # fmt: skip
def test_every_route_requires_a_pusher(
    house: House, headers: dict[str, str], status: int, method: str, path: str
) -> None:
    """Every route refuses callers that may not push, before it reads the body."""
    with house.client() as client:
        client.headers.pop("x-kelvin-principal")
        assert problem(client.request(method, f"/push/v1{path}", headers=headers))[0] == status


def test_tenants_are_apart(house: House) -> None:
    """Another tenant's plan is unknown in every call, and its chunks are missing for all others."""
    with house.client("alpha") as alpha, house.client("beta") as beta:
        plan = make_plan(alpha)
        digests = digests_of(plan, Model().files())
        body = MissingRequest(digests=digests)
        opened = announce_digests(alpha, plan, digests)
        for answer in (
            post(beta, f"/plans/{plan.plan_id}/missing", body),
            post(beta, f"/plans/{opened.plan_id}/missing", body),
            beta.put(f"/push/v1/plans/{opened.plan_id}/chunks/{digests[-1]}", content=b""),
            post(beta, f"/plans/{opened.plan_id}/commit", CommitRequest(digests=digests)),
        ):
            assert problem(answer)[:2] == (404, "not_found")
        push_whole(alpha, plan)
        theirs = make_plan(beta)
        missing = announce_digests(beta, theirs, digests)
        assert not missing.exists
        pinned = {piece.path for chunk in theirs.chunks for piece in chunk.pieces if piece.path.endswith(".json")}
        weights = [chunk for chunk in theirs.chunks if not {piece.path for piece in chunk.pieces} & pinned]
        assert len(missing.digests) == len(weights)


def test_control_shared_catalog_reveals_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if the catalog gave one tenant's chunks to all tenants, others would learn what it has."""
    real_stored_chunks = Catalog.stored_chunks

    async def one_for_all(self: Catalog, tenant: str) -> StoredChunks:
        return await real_stored_chunks(self, "alpha")

    with open_house(settings_for(tmp_path)) as house, house.client("alpha") as alpha, house.client("beta") as beta:
        digests = digests_of(make_plan(alpha), Model().files())
        before = announce_digests(alpha, make_plan(alpha), digests)
        push_whole(alpha, make_plan(alpha))
        assert announce_digests(beta, make_plan(beta), digests).digests == before.digests
        monkeypatch.setattr(Catalog, "stored_chunks", one_for_all)
        assert announce_digests(beta, make_plan(beta), digests).digests == ()


def test_chunks_are_checked(house: House) -> None:
    """A chunk is accepted only if it was announced, and only with its length and digest."""
    files = Model().files()
    with house.client("chunks") as client:
        plan = make_plan(client)
        digests = digests_of(plan, files)
        last = plan.chunks[-1]
        good = assemble(last, files)
        url = f"/push/v1/plans/{plan.plan_id}/chunks"
        assert problem(client.put(f"{url}/{digests[-1]}", content=good))[:2] == (409, "conflict")
        url = f"/push/v1/plans/{announce_digests(client, plan, digests).plan_id}/chunks"
        assert problem(client.put(f"{url}/{digests[-1]}", content=good[:-1]))[0] == 400
        assert problem(client.put(f"{url}/{digests[-1]}", content=good + b"\0"))[:2] == (413, "request_too_large")
        flipped = bytes([good[0] ^ 1]) + good[1:]
        assert "do not match" in problem(client.put(f"{url}/{digests[-1]}", content=flipped))[2]
        assert problem(client.put(f"{url}/{'0' * 64}", content=good))[0] == 400
        assert problem(client.put(f"{url}/nonsense", content=good))[0] == 400
        assert client.put(f"{url}/{digests[-1]}", content=good).status_code == 204
        assert client.put(f"{url}/{digests[-1]}", content=good).status_code == 204  # repeats are harmless


def test_padding_is_checked(house: House) -> None:
    """A chunk with the right digest, but with bytes in its padding, is refused."""
    files = Model().files()
    with house.client("padding") as client:
        plan = make_plan(client)
        assert plan.chunks[-1].pieces[-1].pad
        wrong_padding = assemble(plan.chunks[-1], files)[:-1] + b"x"
        digests = (*digests_of(plan, files)[:-1], blake3(wrong_padding).hexdigest())
        push_id = announce_digests(client, plan, digests).plan_id
        answer = client.put(f"/push/v1/plans/{push_id}/chunks/{digests[-1]}", content=wrong_padding)
        assert "padding must be zeros" in problem(answer)[2]


@pytest.mark.parametrize("call", ["missing", "commit"])
def test_digests_are_checked(house: House, call: str) -> None:
    """There must be one digest per chunk, and the small files must be those of the plan."""
    files = Model().files()
    with house.client("digests") as client:
        plan = make_plan(client)
        digests = digests_of(plan, files)
        other = digests_of(plan, files | {"config.json": files["config.json"].replace(b"Toy", b"Bad")})
        assert other[0] != digests[0]
        for rejected_digests in (digests[:-1], (*digests, digests[0]), other, (digests[1], *digests[1:])):
            kind = MissingRequest if call == "missing" else CommitRequest
            answer = post(client, f"/plans/{plan.plan_id}/{call}", kind(digests=rejected_digests))
            assert problem(answer)[:2] == (409, "conflict")


def test_commit_without_all_chunks_is_a_conflict(house: House) -> None:
    """A commit without all chunks is a conflict. After the chunks were sent, it succeeds."""
    with house.client("early") as client:
        plan = make_plan(client)
        digests = digests_of(plan, Model().files())
        push_id = announce_digests(client, plan, digests).plan_id
        for early in (plan.plan_id, push_id):
            answer = post(client, f"/plans/{early}/commit", CommitRequest(digests=digests))
            assert problem(answer)[:2] == (409, "conflict")
        first = push_whole(client, plan)
        assert first["created"]
        again = post(client, f"/plans/{push_id}/commit", CommitRequest(digests=digests))
        assert again.json() == first  # a client that lost its answer may ask again
        once_more = push_whole(client, make_plan(client))
        assert once_more == {**first, "created": False, "new_chunks": 0}


def test_passing_failures_can_be_repeated(house: House) -> None:
    """If the control plane is unavailable, the answer is 503 with Retry-After, and the same call succeeds later."""
    with house.client("patient") as client:
        house.control.failures = {"gate": [Unavailable("a standby", 2.0)], "seal": [Unavailable("a standby")]}
        refused = post(client, "/plans", Model().request())
        assert problem(refused)[:2] == (503, "unavailable")
        assert refused.headers["retry-after"] == "2"
        plan = make_plan(client)
        digests = digests_of(plan, Model().files())
        with pytest.raises(AssertionError, match="standby"):
            push_whole(client, plan)
        push_id = announce_digests(client, plan, digests).plan_id
        answer = post(client, f"/plans/{push_id}/commit", CommitRequest(digests=digests))
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", 400, id="nothing"),
        pytest.param(b"[]", 400, id="a list"),
        pytest.param(b'{"model": "m"}', 400, id="half a request"),
        pytest.param(encode(PlanRequest(model="No Label", small_files=(), weights=())), 400, id="a bad model name"),
        pytest.param(encode(PlanRequest(model="m", small_files=(), weights=())), 422, id="an empty directory"),
    ],
)
def test_undecodable_body_is_a_client_error(house: House, body: bytes, status: int) -> None:
    """A body that does not decode is a 400 that names the rule, never a 500."""
    with house.client("bodies") as client:
        assert problem(client.post("/push/v1/plans", content=body))[0] == status


def test_body_with_a_huge_length_is_refused(house: House) -> None:
    """The body is refused by its Content-Length before it is read."""
    with house.directory.connect(SOCKET) as raw:
        header = principal_of("claims")["x-kelvin-principal"]
        raw.sendall(
            f"POST /push/v1/plans HTTP/1.1\r\nhost: x\r\nx-kelvin-principal: {header}\r\n"
            f"content-length: {1 << 40}\r\n\r\n".encode()
        )
        assert b" 413 " in raw.recv(100)


def test_broken_connection_stores_nothing(house: House) -> None:
    """A connection that breaks within a chunk stores nothing, and the next client is served."""
    files = Model().files()
    with house.client("cut") as client:
        plan = make_plan(client)
        digests = digests_of(plan, files)
        push_id = announce_digests(client, plan, digests).plan_id
        good = assemble(plan.chunks[-1], files)
        with house.directory.connect(SOCKET) as raw:
            header = principal_of("cut")["x-kelvin-principal"]
            raw.sendall(
                f"PUT /push/v1/plans/{push_id}/chunks/{digests[-1]} HTTP/1.1\r\nhost: x\r\n"
                f"x-kelvin-principal: {header}\r\ncontent-length: {len(good)}\r\n\r\n".encode()
                + good[:1000]
            )
            raw.shutdown(socket.SHUT_WR)
            while raw.recv(4096):  # until the server has seen the end
                continue
        assert digests[-1] in announce_digests(client, plan, digests).digests
        push_whole(client, plan)


def test_unfinished_plans_do_not_delay_other_tenants(house: House) -> None:
    """As many unfinished plans as are judged at once do not keep another tenant's plan waiting."""
    header = principal_of("slow")["x-kelvin-principal"]
    with ExitStack() as stack:
        for _ in range(MAX_PLANS):
            raw = stack.enter_context(house.directory.connect(SOCKET))
            raw.sendall(
                f"POST /push/v1/plans HTTP/1.1\r\nhost: x\r\nx-kelvin-principal: {header}\r\n"
                "content-length: 1000\r\n\r\n{".encode()
            )
        with house.client("quick") as client:
            make_plan(client)


def test_unfinished_chunks_do_not_delay_other_tenants(house: House) -> None:
    """Two tenants hold as many unfinished chunks as are stored at once, and a third tenant's push is not delayed."""
    with ExitStack() as stack:
        for tenant in ("slow-a", "slow-b"):
            with house.client(tenant) as client:
                plan = make_plan(client)
                missing = announce_digests(client, plan, digests_of(plan, Model().files()))
            header = principal_of(tenant)["x-kelvin-principal"]
            for _ in range(MAX_CHUNKS // 2):
                raw = stack.enter_context(house.directory.connect(SOCKET))
                raw.sendall(
                    f"PUT /push/v1/plans/{missing.plan_id}/chunks/{missing.digests[-1]} HTTP/1.1\r\nhost: x\r\n"
                    f"x-kelvin-principal: {header}\r\ncontent-length: {plan.chunks[-1].length}\r\n\r\n.".encode()
                )
        with house.client("quick") as client:
            push_whole(client, make_plan(client))


def test_service_is_healthy_and_ready(house: House) -> None:
    """The service is healthy and ready, and unknown routes are answered with problem details."""
    with house.client() as client:
        assert client.get("/healthz").status_code == 200
        assert client.get("/readyz").status_code == 200
        assert problem(client.get("/push/v1/nothing"))[0] == 404
        assert problem(client.get("/push/v1/plans"))[0] == 405


def test_equal_pushes_are_one(house: House) -> None:
    """Equal pushes, repeated or concurrent, share plan and push. Chunks stay missing until they are stored."""
    files = Model().files()
    with house.client("twins") as client:
        plan, again = make_plan(client), make_plan(client)
        digests = digests_of(plan, files)
        assert plan == again
        first, second = announce_digests(client, plan, digests), announce_digests(client, again, digests)
        assert first == second
        assert announce_digests(client, structs.replace(plan, plan_id=first.plan_id), digests) == first
        data = assemble(plan.chunks[-1], files)
        url = f"/push/v1/plans/{first.plan_id}/chunks/{digests[-1]}"
        assert client.put(url, content=data).status_code == 204
        assert set(announce_digests(client, plan, digests).digests) == set(first.digests) - {digests[-1]}
        committed = push_whole(client, plan)
        assert (committed["version"], first.exists) == (first.version, False)
        assert announce_digests(client, make_plan(client), digests).exists


def test_one_of_two_racing_pushes_says_created(house: House, tmp_path: Path) -> None:
    """Concurrent equal pushes share a commit, and only one creates. Pushing a deleted version restores it."""
    directory = Model().write(tmp_path / "model")

    def pushed(_: int = 0) -> Committed:
        with house.client("racers") as client:
            return push_directory(directory, "toy", client, Progress()).committed

    with ThreadPoolExecutor(2) as threads:
        racers = list(threads.map(pushed, range(2)))
    assert sorted(each.created for each in racers) == [False, True]
    assert not any(each.restored for each in racers)
    house.control.deleted.add(racers[0].version)
    back = pushed()
    assert (back.created, back.restored) == (False, True)


def test_dry_run_keeps_nothing(house: House) -> None:
    """A dry run is judged, planned and compared like a push. It keeps nothing and accepts no chunk."""
    files = Model().files()
    with house.client("dry") as client:
        real = make_plan(client)
        digests = digests_of(real, files)
        want = announce_digests(client, real, digests)
    with house.client("drier") as client:
        plan = decode(post(client, "/plans", structs.replace(Model().request(), dry_run=True)).content, Plan)
        missing = announce_digests(client, plan, digests)
        assert (missing.version, missing.exists) == (want.version, False)
        assert missing.plan_id == plan.plan_id != want.plan_id
        assert missing.digests == want.digests
        url = f"/push/v1/plans/{plan.plan_id}/chunks/{digests[-1]}"
        assert problem(client.put(url, content=assemble(plan.chunks[-1], files)))[:2] == (404, "not_found")
        answer = post(client, f"/plans/{plan.plan_id}/commit", CommitRequest(digests=digests))
        assert problem(answer)[:2] == (404, "not_found")
        assert not (house.data / "staging" / "drier").exists()
        bad = request_of({**files, "x.pt": b""})
        assert problem(post(client, "/plans", structs.replace(bad, dry_run=True)))[0] == 422


def test_dry_runs_of_one_tenant_spare_other_tenants(house: House) -> None:
    """Plans of dry runs are kept in memory, and few in all. The tenant that has most of them loses one."""
    with house.client("dry-owner") as owner, house.client("dry-guest") as guest:

        def plan(client: httpx.Client, model: str) -> Plan:
            request = structs.replace(Model().request(), model=model, dry_run=True)
            return decode(post(client, "/plans", request).content, Plan)

        def status(client: httpx.Client, plan: Plan) -> int:
            request = MissingRequest(digests=digests_of(plan, Model().files()))
            return post(client, f"/plans/{plan.plan_id}/missing", request).status_code

        own = plan(owner, "toy")
        others = [plan(guest, f"toy-{number}") for number in range(MAX_DRY_RUNS)]
        assert status(owner, own) == 200
        assert (status(guest, others[0]), status(guest, others[-1])) == (404, 200)


def test_open_pushes_are_bounded(tmp_path: Path) -> None:
    """A push over the tenant's limit is refused with a retryable 503. Open pushes stay."""

    def other(number: int) -> Model:
        return Model(more={"generation_config.json": b'{"top_k": %d}' % number})

    with open_house(settings_for(tmp_path, plans_per_tenant=2)) as house, house.client() as client:
        plans = [make_plan(client, other(number)) for number in range(2)]
        for number, plan in enumerate(plans):
            announce_digests(client, plan, digests_of(plan, other(number).files()))
        third = make_plan(client, other(2))
        body = MissingRequest(digests=digests_of(third, other(2).files()))
        assert problem(post(client, f"/plans/{third.plan_id}/missing", body))[:2] == (503, "overloaded")
        push_whole(client, make_plan(client, other(0)), other(0).files())
        assert post(client, f"/plans/{third.plan_id}/missing", body).status_code == 200


@asynccontextmanager
async def client_of(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    app = FastAPI()
    install_failure_handlers(app)
    app.include_router(push_routes(bench.pushes))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://bench", headers=principal_of()) as client:
        yield client


async def make_plan_on(client: httpx.AsyncClient) -> tuple[str, bytes]:
    """Return the path of a new plan, and the body for `missing`."""
    answer = await client.post("/push/v1/plans", content=encode(Model().request()))
    plan = decode(answer.raise_for_status().content, Plan)
    return f"/push/v1/plans/{plan.plan_id}", encode(MissingRequest(digests=digests_of(plan, Model().files())))


async def test_calls_of_a_tenant_read_few_plans_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that reads a large plan takes 150 MB of memory, so further calls of the same tenant wait."""
    bench, go, inside, most = Bench.over(tmp_path), asyncio.Event(), 0, 0

    async def limits(tenant: str) -> TenantLimits:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await go.wait()
        inside -= 1
        return TenantLimits()

    monkeypatch.setattr(bench.jobs, "read_limits", limits)
    async with client_of(bench) as client:
        path, body = await make_plan_on(client)
        calls = [asyncio.create_task(client.post(f"{path}/missing", content=body)) for _ in range(MAX_RECORDS)]
        await eventually(lambda: inside >= MAX_RECORDS // 2)
        # of another tenant, which has free turns; meanwhile the calls above could go on
        for _ in range(MAX_RECORDS):
            answer = await client.get(f"{path}/manifest", headers=principal_of("umbrella"))
            assert answer.status_code == 404
        go.set()
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200] * MAX_RECORDS
    assert most == MAX_RECORDS // 2


async def test_answers_about_plans_count_in_the_memory_for_bodies(tmp_path: Path) -> None:
    """Otherwise clients that do not read their answers would fill the memory."""
    bench = Bench.over(tmp_path)
    async with client_of(bench) as client:
        path, body = await make_plan_on(client)
        missing = decode((await client.post(f"{path}/missing", content=body)).content, Missing)
        path = f"/push/v1/plans/{missing.plan_id}/manifest"
        length = len((await client.get(path)).raise_for_status().content)
        bench.pushes.body_budget = BodyBudget("the bench", 2 * length - 1)
        assert problem(await client.get(path))[:2] == (503, "overloaded")
        bench.pushes.body_budget = BodyBudget("the bench", 2 * length)
        assert (await client.get(path)).status_code == 200


async def test_waiting_commit_frees_its_list_of_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of a large version takes 80 MB, and any number of requests may wait for its commit."""
    bench = Bench.over(tmp_path)
    body = encode(CommitRequest(digests=tuple(f"{number:064x}" for number in range(30_000))))

    async def commit(*_: object) -> Committing:
        # The thread that decoded the list may still hold it for a moment.
        await eventually(lambda: tracemalloc.get_traced_memory()[0] < len(body) // 2, "memory without the list")
        return Committing(step=CommitStep.WAITING)

    monkeypatch.setattr(bench.pushes, "commit", commit)
    async with client_of(bench) as client:
        path = f"/push/v1/plans/{'0' * 32}/commit"
        await client.post(path, content=encode(CommitRequest(digests=())))
        tracemalloc.start()
        try:
            answer = await client.post(path, content=body)
        finally:
            tracemalloc.stop()
    assert answer.status_code == 202
