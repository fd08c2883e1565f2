"""Pods that wait, where there are none."""

from contracts.jobs import Bound, RuntimeReport, Take
from controlplane.scaling.knative.pool_calls import PodCalls


class Nobody(PodCalls):
    """Pods, of which there are none."""

    def __init__(self) -> None:
        pass

    async def bind(self, url: str, take: Take) -> Bound:
        raise NotImplementedError

    async def release(self, url: str, take: Take) -> None:
        raise NotImplementedError

    async def state(self, url: str) -> RuntimeReport:
        raise NotImplementedError
