"""What the log and the counters say of faulty copies, once it is known how their load ended."""

import logging
from collections import Counter
from collections.abc import Sequence

from weightcache.policy.healing import Trial

log = logging.getLogger(__name__)


def tell_faults(
    what: str, named: dict[str, str], trials: Sequence[Trial], healed: Counter[str], healed_from: str | None
) -> None:
    """One line for each faulty copy of `what`, `named` in the log; a load that was healed counts once in `healed`."""
    faults = [trial for trial in trials if trial.is_fault]
    if faults and healed_from is not None:
        healed[healed_from] += 1
    for fault in faults:
        told = {**named, "tier": fault.tier, "kind": fault.outcome, "healed_from": healed_from}
        if healed_from is None:
            log.error(f"a faulty {what} was not healed", extra=told)
        else:
            log.warning(f"a faulty {what} was healed", extra=told)
