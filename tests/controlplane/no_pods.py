"""Pods that wait, where there are none."""

from contracts.jobs import Bound, RuntimeReport, Take
from controlplane.scaling.knative.pool_actuator import Calls


class Nobody(Calls):
    """Pods, of which there are none."""

    async def bind(self, url: str, take: Take) -> Bound:
        raise NotImplementedError

    async def release(self, url: str, take: Take) -> None:
        raise NotImplementedError

    async def state(self, url: str) -> RuntimeReport:
        raise NotImplementedError
