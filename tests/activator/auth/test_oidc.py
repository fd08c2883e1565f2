"""Signed tokens: each kind of forged token is refused, and what a valid one opens at a real activator."""

import asyncio
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from activator.auth import jwks, oidc
from activator.auth.claims_policy import Token
from activator.auth.issuers import read_issuers
from activator.auth.oidc import TokenVerifier, open_token_verifier
from kelvin.contracts.serving.control_messages import Scope, TenantRow
from kelvin.telemetry.policy.instruments import MetricsPage
from tests.activator.auth.token_issuer import KeyServer, Signer, claims, forged, hmac_of, key_server
from tests.activator.control import key_row
from tests.activator.world import ActivatorWorld, world

ONE, TWO = Signer("one"), Signer("two", ed25519.Ed25519PrivateKey.generate())
STRANGER = Signer("one")  # another key with the same kid
RSA = Signer("one", rsa.generate_private_key(65537, 2048))
ANY = {"alg": "ES256", "kid": "one", "typ": "JWT"}
INFER = 'scopes = ["infer", "push"]\n'


@asynccontextmanager
async def verifying(scratch: Path) -> AsyncIterator[tuple[KeyServer, TokenVerifier]]:
    """Start an issuer's key server and a verifier of its tokens."""
    async with key_server(scratch, ONE, TWO) as server:
        trusted = read_issuers(server.file(scratch / "issuers.toml", INFER))
        async with open_token_verifier(trusted, MetricsPage("activator")) as tokens:
            assert tokens is not None
            task = asyncio.create_task(tokens.run())
            try:
                async with asyncio.timeout(30):
                    yield server, tokens
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


def _tampered(token: str, part: int) -> str:
    parts = token.split(".")
    parts[part] = ("A" if parts[part][0] != "A" else "B") + parts[part][1:]
    return ".".join(parts)


def _bad_tokens() -> dict[str, str]:
    """Return tokens that differ from a valid one in one thing, by name."""
    good = claims(time.time())
    return {
        "no signature at all": forged(ANY | {"alg": "none"}, good, lambda _: b"x"),
        "HS256 over the public key": forged(ANY | {"alg": "HS256"}, good, hmac_of(ONE.pem)),
        "ES256 over the public key's HMAC": forged(ANY, good, hmac_of(ONE.pem)),
        "an empty ECDSA signature": forged(ANY, good, lambda _: bytes(64)),
        "a signature of one byte": forged(ANY, good, lambda _: b"x"),
        "a stranger's key": STRANGER.token(good),
        "an algorithm that is not the issuer's": RSA.token(good),
        "one key's token under another's name": ONE.token(good, kid="two"),
        "another algorithm under the same name": TWO.token(good, kid="one"),
        "a kid that is a path": ONE.token(good, kid="../../../../dev/null"),
        "a kid that is an address": ONE.token(good, kid="https://evil.example.com/keys"),
        "a kid that is SQL": ONE.token(good, kid="one' OR '1'='1"),
        "a key that it brings along": STRANGER.token(good, kid="mine", jwk=STRANGER.jwk),
        "a key set that it names": STRANGER.token(good, kid="mine", jku="https://evil.example.com/keys"),
        "changed claims": _tampered(ONE.token(good), 1),
        "a changed signature": _tampered(ONE.token(good), 2),
        "another audience": ONE.token(good | {"aud": "other"}),
        "another issuer": ONE.token(good | {"iss": "https://evil.example.com/"}),
        "expired": ONE.token(good | {"exp": time.time() - 31}),
        "not valid yet": ONE.token(good | {"nbf": time.time() + 90}),
        "another issuer's tenant": ONE.token(good | {"tenant": "stranger"}),
    }


async def test_invalid_tokens_are_refused(tmp_path: Path) -> None:
    """Tokens of the issuer's keys are accepted. Every other token is refused."""
    async with verifying(tmp_path) as (_, tokens):
        for signer in (ONE, TWO):
            principal = await tokens.find_principal(signer.token(claims(time.time())))
            assert principal is not None
            assert (principal.tenant, principal.scopes) == ("default", (Scope.INFER, Scope.PUSH))
        for name, token in _bad_tokens().items():
            assert await tokens.find_principal(token) is None, name


async def test_control_unsigned_token_would_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: without the signature check a stranger's token is accepted."""
    monkeypatch.setattr(oidc, "_is_signed", lambda *_: True)

    async with verifying(tmp_path) as (_, tokens):
        assert await tokens.find_principal(STRANGER.token(claims(time.time()))) is not None


async def test_a_token_is_verified_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verified token is remembered until it expires. At most MAX_VERIFIED_TOKENS are, the latest ones."""
    verified: list[str] = []
    is_signed = oidc._is_signed

    def counted(text: str, token: Token, key: jwt.PyJWK) -> bool:
        verified.append(text)
        return is_signed(text, token, key)

    monkeypatch.setattr(oidc, "_is_signed", counted)
    monkeypatch.setattr(oidc, "MAX_VERIFIED_TOKENS", 2)

    async with verifying(tmp_path) as (_, tokens):
        now_s = time.time()
        tokens._wall_clock = lambda: now_s
        token = ONE.token(claims(now_s, exp=now_s + 60))
        for _again in range(5):
            assert await tokens.find_principal(token) is not None
        assert verified == [token]
        now_s += 91
        assert await tokens.find_principal(token) is None
        now_s -= 91
        many = [ONE.token(claims(now_s, sub=f"s{number}")) for number in range(3)]
        assert None not in [await tokens.find_principal(each) for each in many]
        assert "verified=2" in repr(tokens)


async def test_a_key_that_is_withdrawn_ends_its_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that were verified with a removed key end too. Tokens of the other key stay valid."""
    monkeypatch.setattr(jwks, "PAUSE_S", 0.01)

    async with verifying(tmp_path) as (server, tokens):
        first, second = (signer.token(claims(time.time())) for signer in (ONE, TWO))
        assert None not in [await tokens.find_principal(token) for token in (first, second)]
        server.signers.remove(ONE)
        # a token with an unknown kid makes the activator fetch the keys
        while await tokens.find_principal(first) is not None:
            await tokens.find_principal(ONE.token(claims(time.time()), kid="none"))
            await asyncio.sleep(0.01)
        assert await tokens.find_principal(second) is not None


async def _opens(here: ActivatorWorld, signer: Signer) -> None:
    """Check that a token opens inference, the models and `/push`, but not `/admin`."""
    token = signer.token(claims(time.time()))
    answered = await here.post(key=token)
    assert answered.status == 200
    (record,) = await here.control.wait_for_records(1)
    assert (record.tenant, record.outcome) == ("default", "ok")
    assert re.fullmatch("j[0-9a-f]{11}", record.key_id)
    timeline = await here.get(f"/v1/requests/{answered.headers['x-request-id']}/timeline", token)
    assert timeline.status == 200
    doors = ("/v1/models", "/push/v1/plans", "/admin/v1/status")
    assert [(await here.get(door, token)).status for door in doors] == [200, 503, 403]  # nothing listens behind /push
    await here.control.wait_for_used("k4")
    assert record.key_id not in here.control.used_at_s, "only API keys have a last use"


async def _refuses(here: ActivatorWorld) -> None:
    """Check that every bad token gets the same 401 without a reason."""
    gone = ONE.token(claims(time.time(), tenant="gone"))  # the issuer may name this tenant, but it does not exist
    answers = []
    for token in (gone, *_bad_tokens().values()):
        got = await here.get("/v1/models", token)
        request_id = got.headers.pop("x-request-id")
        got.headers.pop("retry-after", None)
        answers.append((got.status, got.body.replace(request_id.encode(), b"")))
        if len(answers) == 18:  # fewer than the failures that delay an address
            break
    assert {status for status, _ in answers} == {401}
    assert len(set(answers)) == 1
    await here.publish(tenants=(TenantRow(tenant="default", suspended=True),))
    assert (await here.get("/v1/models", ONE.token(claims(time.time())))).code == "tenant_suspended"
    await here.publish(tenants=(TenantRow(tenant="default", suspended=False),))


async def _counts(here: ActivatorWorld) -> None:
    page = await here.page()
    assert 'kelvin_tokens_refused_total{process="activator",why="signature"}' in page
    assert 'kelvin_issuer_keys_age_seconds{process="activator",issuer="https://idp.example.com/"}' in page


async def test_token_opens_its_scopes_and_tenant(tmp_path: Path) -> None:
    """The token opens inference and push in its tenant. API keys keep working."""
    async with key_server(tmp_path / "idp", ONE, TWO) as server:
        file = server.file(tmp_path / "issuers.toml", INFER)
        async with world(tmp_path, oidc=file) as here:
            await here.replica("r1")
            await _opens(here, TWO)
            await _refuses(here)
            await _counts(here)
            await here.publish(keys=(key_row("kv-push", "kv-push", "default", Scope.PUSH),))
            assert (await here.get("/v1/models", "kv-push")).status == 403
            log = (here.data / "log").read_text()
            assert ONE.token(claims(0)).split(".")[0] not in log


async def test_control_without_issuers_no_token_is_accepted(tmp_path: Path) -> None:
    """Negative control: without KELVIN_OIDC the same token is refused."""
    async with key_server(tmp_path / "idp", ONE) as server, world(tmp_path) as here:
        assert (await here.get("/v1/models", ONE.token(claims(time.time())))).status == 401
        assert server.asked == 0


async def test_issuer_outage_at_start_affects_its_tokens_only(tmp_path: Path) -> None:
    """Its tokens get 503. API keys work."""
    async with key_server(tmp_path / "idp", ONE) as server:
        server.status = 503
        async with world(tmp_path, oidc=server.file(tmp_path / "issuers.toml", INFER)) as here:
            got = await here.get("/v1/models", ONE.token(claims(time.time())))
            assert (got.status, got.code) == (503, "unavailable")
            assert "keys_age_seconds{" not in await here.page()  # no key set was fetched yet
            assert (await here.get("/v1/models")).status == 200
