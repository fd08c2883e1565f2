"""An issuer of tokens for tests: its signing keys, valid and forged tokens, and its key set over HTTPS."""

import base64
import hashlib
import hmac
import json
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import jwt
from aiohttp import web
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from activator.tls.certificate_authority import CertificateAuthority

ISSUER: Final = "https://idp.example.com/"
AUDIENCE: Final = "kelvin"
_ALGORITHMS: Final[Mapping[type, str]] = {
    ec.EllipticCurvePrivateKey: "ES256", ed25519.Ed25519PrivateKey: "EdDSA", rsa.RSAPrivateKey: "RS256",
}  # fmt: skip
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Signer:
    """A private key and its kid."""

    kid: str
    key: PrivateKey = field(default_factory=lambda: ec.generate_private_key(ec.SECP256R1()))

    @property
    def algorithm(self) -> str:
        """Return the JWT algorithm that the key signs with."""
        return next(name for kind, name in _ALGORITHMS.items() if isinstance(self.key, kind))

    @property
    def jwk(self) -> dict[str, Any]:
        """Return the public key as the issuer publishes it."""
        algorithm = jwt.PyJWS().get_algorithm_by_name(self.algorithm)
        made: dict[str, Any] = algorithm.to_jwk(self.key.public_key(), as_dict=True)
        return made | {"kid": self.kid, "use": "sig", "key_ops": ["verify"]}

    @property
    def pem(self) -> bytes:
        """Return the public key in PEM. It is public, so a forger may know it."""
        public = self.key.public_key()
        return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)

    def token(self, claims: Mapping[str, object], **header: object) -> str:
        """Return a signed token."""
        algorithm = jwt.PyJWS().get_algorithm_by_name(self.algorithm)
        return forged({"alg": self.algorithm, "kid": self.kid, "typ": "JWT"} | header, claims,
                      lambda message: algorithm.sign(message, algorithm.prepare_key(self.key)))  # fmt: skip


def claims(now_s: float, **others: object) -> dict[str, object]:
    """Return the claims of a valid token, with other values. None removes a claim."""
    made: dict[str, object] = {
        "iss": ISSUER, "aud": AUDIENCE, "sub": "build-1", "iat": now_s, "nbf": now_s, "exp": now_s + 300,
        "tenant": "default", "jti": "1",
    }  # fmt: skip
    return {name: value for name, value in (made | others).items() if value is not None}


def forged(header: Mapping[str, object], claims: Mapping[str, object], sign: Callable[[bytes], bytes]) -> str:
    """Return a token of any header and claims."""
    message = b".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
    return b".".join((message, _base64(sign(message)))).decode()


def hmac_of(secret: bytes) -> Callable[[bytes], bytes]:
    """Return a function that signs with HS256."""
    return lambda message: hmac.digest(secret, message, hashlib.sha256)


def _base64(raw: bytes) -> bytes:
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


@dataclass
class KeyServer:
    """A server that publishes the public keys of its signers."""

    port: int
    ca: Path
    signers: list[Signer]
    status: int = 200
    asked: int = 0
    body: bytes | None = None  # replaces the key set

    @property
    def url(self) -> str:
        """The URL of the key set."""
        return f"https://localhost:{self.port}/keys"

    @property
    def tls(self) -> ssl.SSLContext:
        """Return a client context that trusts this server."""
        return ssl.create_default_context(cafile=str(self.ca))

    def file(self, path: Path, more: str = "", tenants: str = '["default", "gone"]') -> Path:
        """Write an issuers file with this issuer."""
        path.write_text(
            f'[[issuer]]\nissuer = "{ISSUER}"\naudience = "{AUDIENCE}"\njwks = "{self.url}"\nca = "{self.ca}"\n'
            f'algorithms = ["ES256", "EdDSA"]\ntenant_claim = "tenant"\ntenants = {tenants}\n{more}'
        )
        return path

    async def answer(self, _: web.Request) -> web.Response:
        """Answer as `status` and `body` say."""
        self.asked += 1
        if self.status in (301, 302):
            raise web.HTTPFound("/elsewhere")
        body = self.body or json.dumps({"keys": [signer.jwk for signer in self.signers]}).encode()
        return web.Response(status=self.status, body=body)


@asynccontextmanager
async def key_server(scratch: Path, *signers: Signer) -> AsyncIterator[KeyServer]:
    """Start a key server over TLS on a local port."""
    scratch.mkdir(parents=True, exist_ok=True)
    authority = CertificateAuthority.load_or_make(scratch / "idp.pem", scratch / "idp.key")
    server = KeyServer(0, scratch / "idp.pem", list(signers))
    app = web.Application()
    app.router.add_get("/{any:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    try:
        tls = authority.issue_context(["localhost"], ["127.0.0.1"])
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        server.port = runner.addresses[0][1]
        yield server
    finally:
        await runner.cleanup()
