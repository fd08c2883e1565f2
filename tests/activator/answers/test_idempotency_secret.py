"""The installation's secret, and answers sealed with it: an answer opens only for the request that it was made for."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from activator.answers.idempotency_policy import AnswerKey, derive_answer_key
from activator.answers.idempotency_secret import BadIdempotencySecret, Sealer, StoredResponse, ensure_idempotency_secret

SECRET, OTHER = b"s" * 32, b"t" * 32
TENANTS = st.sampled_from(["acme", "other", "acme2"])
BODY = b"the answer of a tenant"
ANSWER = StoredResponse("req_1", 200, [(b"content-type", b"text/plain")], BODY)


def test_idempotency_secret_is_created_once(tmp_path: Path) -> None:
    """The file is readable by its owner only. A second call returns the same secret."""
    path = tmp_path / "once.key"
    made = ensure_idempotency_secret(path)
    assert (len(made), path.stat().st_mode & 0o777) == (32, 0o600)
    assert ensure_idempotency_secret(path) == made
    assert ensure_idempotency_secret(tmp_path / "another") != made


@pytest.mark.parametrize("content", ["", "abc", "zz" * 32, "ab" * 31, "ab" * 33])
def test_invalid_secret_file_is_refused(tmp_path: Path, content: str) -> None:
    """The error names the rule but not the content. The file is not overwritten."""
    path = tmp_path / "once.key"
    path.write_text(content)
    with pytest.raises(BadIdempotencySecret, match=r"once\.key: must hold 64 hex digits; restore it"):
        ensure_idempotency_secret(path)
    assert path.read_text() == content


@given(TENANTS, st.sampled_from([b"k", b"l"]), st.sampled_from([b"x", b"y"]), st.sampled_from([SECRET, OTHER]))
def test_sealed_answer_opens_only_for_its_request(tenant: str, key: bytes, body: bytes, secret: bytes) -> None:
    """A sealed answer opens for the same tenant, key, request and installation only."""
    one = derive_answer_key(SECRET, "acme", b"k", [b"x"])
    sealed = Sealer(SECRET).seal(one, ANSWER)
    found = Sealer(secret).open(derive_answer_key(SECRET, tenant, key, [body]), sealed)
    if (tenant, key, body, secret) == ("acme", b"k", b"x", SECRET):
        assert found == ANSWER
    else:
        assert found is None


def test_a_tenant_has_a_key_of_its_own() -> None:
    """Each tenant has its own encryption key, so equal digests don't open another tenant's answer."""
    one = derive_answer_key(SECRET, "acme", b"k", [b"x"])
    sealed = Sealer(SECRET).seal(one, ANSWER)
    assert Sealer(SECRET).open(AnswerKey("acme", one.name, one.fingerprint, ""), sealed) is not None
    assert Sealer(SECRET).open(AnswerKey("other", one.name, one.fingerprint, ""), sealed) is None


def test_sealed_answer_reveals_no_content() -> None:
    """The sealed bytes don't contain the body, fail to open if one bit changes, and differ each time."""
    one, sealer = derive_answer_key(SECRET, "acme", b"k", [b"x"]), Sealer(SECRET)
    first, second = (sealer.seal(one, ANSWER) for _ in range(2))
    assert BODY not in first
    assert first != second
    for at in (0, 12, len(first) - 1):
        changed = bytearray(first)
        changed[at] ^= 1
        assert sealer.open(one, bytes(changed)) is None
    assert sealer.open(one, b"") is None
