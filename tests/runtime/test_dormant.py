"""Weights that were dropped come back in other memory and are proven there, or nobody is served."""

import pytest
import torch

from contracts.artifact_errors import ArtifactRejected, ProbeFailed
from contracts.errors import Internal, Refused
from contracts.timeline import Stage
from runtime import weights as weights_module
from runtime.serving import Kept, Serving, Wiring
from runtime.weights import Skeleton, Weights
from tests.runtime.restoring import (
    DEADLINE_S,
    VERSION,
    Heard,
    asleep_over_copies,
    bind_of,
    by_library,
    copied,
    fell_asleep,
    generate,
    restored,
    wake_and_answer,
)
from tests.runtime.versions import MemoryLease


def _dropped(lease: MemoryLease, heard: Heard) -> Kept:
    """Asleep, and nothing looks into its weights any more."""
    kept = fell_asleep(lease, heard)
    kept.drop()
    assert not lease.in_use, "a view is still there"
    return kept


@pytest.mark.parametrize("attested", [True, False], ids=["attested", "recorded here"])
def test_who_dropped_its_weights_says_the_same_over_others(sealed: MemoryLease, attested: bool) -> None:
    """Leased again, in other memory; the old holds noise by then. Proven before it is called ready."""
    heard, lease = Heard(), MemoryLease(VERSION, sealed.attestations if attested else ())
    kept = _dropped(lease, heard)
    for _ in range(2):
        woken = kept.again(bind_of(lease), Wiring(heard.take, heard.busy.append))
        assert isinstance(woken, Serving)
        assert [span.stage for span in woken.spans] == [Stage.LEASED, Stage.BOUND, Stage.READY]
        assert not woken.engine.needs_probe
        generate(woken, heard)
        assert heard.tokens == by_library(lease)
        assert woken.thread.stop(DEADLINE_S)
        assert woken.kept is not None
        kept = woken.kept
        del woken
        kept.release()
        kept.drop()
        assert not lease.in_use
        heard.ended.clear()
        heard.tokens.clear()


def test_what_was_checked_once_is_kept_without_weights(sealed: MemoryLease) -> None:
    """Modules and tokenizer are those of before; no parameter lies where it lay."""
    heard, lease = Heard(), MemoryLease(VERSION, sealed.attestations)
    with restored(lease, heard) as serving:
        generate(serving, heard)
        codec, kept = serving.codec, serving.kept
        module = serving.engine._runner._module  # type: ignore[attr-defined]
        before = {parameter.data_ptr() for parameter in module.parameters()}
    del serving
    assert kept is not None
    kept.release()
    kept.drop()
    assert all(parameter.is_meta for parameter in module.parameters())
    woken = kept.again(bind_of(lease), Wiring(heard.take, heard.busy.append))
    assert isinstance(woken, Serving)
    assert woken.codec is codec
    assert woken.engine._runner._module is module  # type: ignore[attr-defined]
    assert before.isdisjoint(parameter.data_ptr() for parameter in module.parameters())
    assert woken.thread.stop(DEADLINE_S)


def test_other_weights_than_those_that_were_dropped_are_found_before_it_is_ready(sealed: MemoryLease) -> None:
    """Planted: a flipped bit in what is leased again. The wake fails; nobody was ever told that it serves."""
    heard, lease = Heard(), MemoryLease(VERSION, sealed.attestations)
    kept = _dropped(lease, heard)
    norm = next(tensor for tensor in VERSION.manifest.tensors if tensor.name == "model.norm.weight")
    lease._linear[norm.offset + 3] ^= 0x40
    with pytest.raises(Refused) as caught:
        kept.again(bind_of(lease), Wiring(heard.take, heard.busy.append))
    assert isinstance(caught.value.failure, ProbeFailed)
    assert heard.tokens == []


def test_who_still_holds_a_view_does_not_drop(sealed: MemoryLease) -> None:
    """Planted: a tensor that somebody kept. Nothing is unmapped under it."""
    heard, lease = Heard(), MemoryLease(VERSION, sealed.attestations)
    with restored(lease, heard) as serving:
        generate(serving, heard)
        stale = next(serving.engine._runner._module.parameters()).detach()  # type: ignore[attr-defined]
        kept = serving.kept
    del serving
    assert kept is not None
    kept.release()
    with pytest.raises(Refused) as caught:
        kept.drop()
    assert isinstance(caught.value.failure, Internal)
    assert torch.equal(stale.reshape(-1), lease.weights().tensors["model.embed_tokens.weight"].reshape(-1))


def test_without_pointing_anew_a_wake_is_refused(sealed: MemoryLease, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: parameters that stay where they were, over memory that went, are seen by the probe; and where
    they are nowhere, by the check of where they lie.
    """
    heard, lease = Heard(), MemoryLease(VERSION, sealed.attestations)
    kept = _dropped(lease, heard)
    with monkeypatch.context() as patched:
        patched.setattr(weights_module, "_renew", lambda module, make: None)
        with pytest.raises(Refused) as caught:
            kept.again(bind_of(lease), Wiring(heard.take, heard.busy.append))
        assert isinstance(caught.value.failure, ArtifactRejected)
    stale = fell_asleep(lease, heard)
    monkeypatch.setattr(Skeleton, "empty", lambda *_: None)
    monkeypatch.setattr(Skeleton, "fill", lambda *_: None)
    monkeypatch.setattr(MemoryLease, "in_use", False)
    stale.drop()
    with pytest.raises(Refused) as caught:
        stale.again(bind_of(lease), Wiring(heard.take, heard.busy.append))
    assert isinstance(caught.value.failure, ProbeFailed)


def test_copies_are_dropped_with_what_they_were_made_of(sealed: MemoryLease) -> None:
    """As on a device: after the first sleep the lease is there, after the second it is not, and a new one is copied."""
    heard, lease, acquired = Heard(), MemoryLease(VERSION, sealed.attestations), list[str]()

    def acquire(tenant: str, version: str) -> Weights:
        acquired.append(version)
        return copied(lease)

    kept = asleep_over_copies(lease, heard, acquire)
    kept.drop()
    wake_and_answer(kept, lease, heard)
    assert len(acquired) == 2
