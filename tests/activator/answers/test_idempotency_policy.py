"""Valid idempotency keys, the names derived from them, and which answers an `AnswerCache` evicts."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from activator.answers.idempotency_policy import (
    CHARGE_S,
    ENTRY_BYTES,
    RUNS_PER_CHARGE,
    AnswerCache,
    AnswerStoreLimits,
    KeptAnswer,
    RunCounts,
    derive_answer_key,
    read_key,
)
from kelvin.contracts.errors import InvalidRequest, Refused

SECRET = b"s" * 32
TENANTS = st.sampled_from(["a", "ab", "b", "default"])
PARTS = st.lists(st.binary(max_size=4), max_size=4)


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(b"a", id="one character"),
        pytest.param(b"~" * 255, id="255 characters"),
        pytest.param(b'"8e03978e-40d5-43dd-bc93-6894a57f9324"', id="in quotes, as in the IETF draft"),
    ],
)
def test_valid_idempotency_key_is_accepted(key: bytes) -> None:
    assert read_key([key]) == key


@pytest.mark.parametrize(
    ("given", "value"),
    [
        pytest.param([b""], "(0 bytes)", id="empty"),
        pytest.param([b"x" * 256], "(256 bytes)", id="too long"),
        pytest.param([b"a b"], "(3 bytes)", id="a space"),
        pytest.param([b"a\x7f"], "(2 bytes)", id="a control character"),
        pytest.param([b"a", b"a"], "(2 headers)", id="the same key twice"),
    ],
)
def test_invalid_idempotency_key_is_refused(given: list[bytes], value: str) -> None:
    """The refusal names the rule but not the key, which may be a secret of the caller."""
    with pytest.raises(Refused) as caught:
        read_key(given)
    assert isinstance(caught.value.failure, InvalidRequest)
    assert (caught.value.failure.field, caught.value.failure.value) == ("idempotency-key", value)


@given(TENANTS, st.binary(min_size=1, max_size=4), PARTS, TENANTS, st.binary(min_size=1, max_size=4), PARTS)
def test_answer_keys_match_only_for_equal_requests(
    tenant: str, key: bytes, parts: list[bytes], other: str, other_key: bytes, other_parts: list[bytes]
) -> None:
    """Equal keys of two tenants have different names. Parts that only join to the same bytes differ too."""
    one, two = derive_answer_key(SECRET, tenant, key, parts), derive_answer_key(SECRET, other, other_key, other_parts)
    assert (one.name == two.name) == ((tenant, key) == (other, other_key))
    assert (one.fingerprint == two.fingerprint) == (parts == other_parts)
    assert (one.charge_id == two.charge_id) == ((tenant, key, parts) == (other, other_key, other_parts))


def test_names_tell_nothing_without_the_secret() -> None:
    """Another secret gives other names."""
    one, two = (derive_answer_key(secret, "acme", b"order-7", [b"hi"]) for secret in (SECRET, b"t" * 32))
    assert not {one.name, one.fingerprint, one.charge_id} & {two.name, two.fingerprint, two.charge_id}
    assert len(one.charge_id) == 32


LIMITS = AnswerStoreLimits(
    ttl_s=10, tenant_answers=3, tenant_bytes=4 * ENTRY_BYTES, answers=5, nbytes=6 * ENTRY_BYTES, answer_bytes=1 << 20
)


def kept(size: int = 0) -> KeptAnswer:
    return KeptAnswer(b"f", b"x" * size)


def test_tenant_with_most_bytes_is_evicted_first() -> None:
    """A full tenant loses its own oldest answer. A full cache drops the oldest answer of the tenant with most bytes."""
    cache = AnswerCache(LIMITS)
    for number in range(4):
        assert cache.put("greedy", b"%d" % number, kept(), number)
    assert cache.find("greedy", b"0", 4) is None
    assert cache.find("greedy", b"1", 4) is not None
    for number in range(3):
        assert cache.put("modest", b"%d" % number, kept(), 4)
    assert [cache.find("greedy", name, 4) is not None for name in (b"1", b"2", b"3")] == [False, True, True]
    assert all(cache.find("modest", b"%d" % number, 4) for number in range(3))
    assert not cache.put("modest", b"large", kept(4 * ENTRY_BYTES), 4)
    cache.check_integrity()


def test_kept_answer_expires() -> None:
    """An answer expires exactly at its TTL, even if it is never looked up."""
    cache = AnswerCache(LIMITS)
    cache.put("a", b"1", kept(), 0)
    assert cache.find("a", b"1", 9.9) is not None
    assert cache.find("a", b"1", 10) is None
    cache.put("a", b"1", kept(), 20)
    cache.drop_expired(30)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_answer_that_comes_with_an_age_ends_sooner() -> None:
    """An answer's age when it is stored counts towards its TTL."""
    cache = AnswerCache(LIMITS)
    cache.put("a", b"1", replace(kept(), age_s=8), 1)
    cache.put("a", b"2", kept(), 1)
    found = cache.find("a", b"1", 2.5)
    assert found is not None
    assert found.age_s == 9.5
    assert [cache.find("a", name, 3) is not None for name in (b"1", b"2")] == [False, True]
    cache.check_integrity()


class Shelving(RuleBasedStateMachine):
    """Compare the cache with an unlimited one: a found answer is the one last put, and no limit is exceeded."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = AnswerCache(LIMITS)
        self.put_last: dict[tuple[str, bytes], tuple[KeptAnswer, float]] = {}
        self.now_s = 0.0

    @rule(tenant=TENANTS, name=st.sampled_from([b"1", b"2", b"3", b"4"]), size=st.integers(0, 5 * ENTRY_BYTES))
    def put(self, tenant: str, name: bytes, size: int) -> None:
        answer = KeptAnswer(b"%d" % len(self.put_last), b"x" * size)
        if self.cache.put(tenant, name, answer, self.now_s):
            self.put_last[tenant, name] = answer, self.now_s
            assert self.cache.find(tenant, name, self.now_s) == answer

    @rule(seconds=st.floats(0, 6))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(tenant=TENANTS, name=st.sampled_from([b"1", b"2", b"3", b"4"]))
    def find(self, tenant: str, name: bytes) -> None:
        if (found := self.cache.find(tenant, name, self.now_s)) is not None:
            answer, at_s = self.put_last[tenant, name]
            assert found == answer
            assert found.age_s == pytest.approx(self.now_s - at_s)
            assert self.now_s < at_s + LIMITS.ttl_s

    @invariant()
    def is_sound(self) -> None:
        self.cache.check_integrity()


TestShelving = Shelving.TestCase


def test_running_again_and_again_is_charged_in_the_end() -> None:
    """RUNS_PER_CHARGE runs of a key share one charge within a day; later runs don't. The oldest keys are forgotten."""
    counts = RunCounts(keys=2)
    for now_s in range(RUNS_PER_CHARGE):
        assert not counts.exceeds_free_runs("a", now_s)
        counts.record_run("a", now_s)
    assert counts.exceeds_free_runs("a", CHARGE_S - 1)
    counts.record_run("b", CHARGE_S - 1)
    counts.record_run("c", CHARGE_S - 1)
    assert not counts.exceeds_free_runs("a", CHARGE_S - 1)


def test_runs_of_a_key_are_counted_anew_each_day() -> None:
    """A key that runs twice a day for months never exceeds its free runs."""
    counts = RunCounts()
    for day in range(2 * RUNS_PER_CHARGE):
        assert not counts.exceeds_free_runs("a", day * CHARGE_S)
        counts.record_run("a", day * CHARGE_S)
        assert not counts.exceeds_free_runs("a", day * CHARGE_S + 1)
