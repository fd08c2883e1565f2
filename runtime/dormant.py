"""A version whose replica sleeps: its bound model over its weights, or empty and without a lease; and back again.

The engine is gone by then, and its KV with it. Of copies on a device nothing is kept in either case: they are made of
the lease. What serves again is `restore.py`'s.
"""

import gc
import logging
from collections.abc import Callable

import torch

from contracts.errors import Internal, Refused
from contracts.jobs import Bind
from contracts.timeline import Stage
from runtime.binding import BoundModel
from runtime.engine.attention import detach
from runtime.families import SERVED
from runtime.skeleton import Skeleton
from runtime.weights import Acquire, Weights

log = logging.getLogger(__name__)


class Dormant:
    """Blocking; one call at a time. `bound` is None where a model is made anew out of the lease's bytes."""

    def __init__(self, weights: Weights, bound: BoundModel | None, acquire: Acquire) -> None:
        architecture = weights.lease.manifest.engine.architecture
        self._skeleton = None if bound is None else Skeleton(SERVED[architecture], bound.module)
        self._lease = weights.lease
        self._weights: Weights | None = weights
        self._renew = weights.renew  # of copies, while there is a lease to make them of
        self._acquire = acquire
        self.is_dropped = False

    def __repr__(self) -> str:
        state = "dropped" if self.is_dropped else "empty" if self._weights is None else "whole"
        return f"<Dormant {state} {self._lease!r}>"

    def release(self) -> None:
        """What an engine left on the model is freed, and what is on a device."""
        if self._skeleton is not None:
            detach(self._skeleton.module)
        if self._renew is not None:
            self._empty()
        _collect()

    def drop(self) -> None:
        """Give the lease back. Raises `Refused(Internal)` where something still looks into its memory: that stays
        mapped then, and the process has to end.
        """
        self._empty()
        _collect()
        if self._lease.in_use:
            log.error("something still refers to weights that are to be dropped")
            raise Refused(Internal())
        self._renew = None
        self.is_dropped = True
        self._lease.close()

    def rouse(self, request: Bind, stamp: Callable[[Stage], None]) -> Weights:
        """The weights, with the model over them: as they were left, or leased and placed anew. Raises `Refused`."""
        if self._weights is not None:
            return self._weights
        if self._renew is not None:
            weights = self._renew()
        else:
            weights = self._acquire(request.tenant, request.version)
            weights.lease.until_whole()
            stamp(Stage.LEASED)
        if self._skeleton is not None:
            self._skeleton.fill(weights.tensors)
            stamp(Stage.BOUND)
        return weights

    def _empty(self) -> None:
        if self._weights is None:
            return
        if self._skeleton is not None:
            self._skeleton.empty(self._weights.tensors)
        self._weights.tensors.clear()  # whoever else has the dictionary has none of its views either
        self._weights = None


def _collect() -> None:
    """What nothing refers to any more is freed, modules and their cycles included, and goes back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
