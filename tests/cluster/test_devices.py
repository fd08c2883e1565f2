"""The device limit of a cluster: the maximum scales of all Services together stay within it."""

from pathlib import Path

from controlplane.knative.policy.knative_service import service_name
from kelvin.contracts.wire import encode
from tests.cluster.fake_knative import NAMESPACE, SERVING, FakeKnative, inside, running
from tests.controlplane.builders import digest, registration
from tests.eventually import eventually


async def test_all_together_order_no_more_than_there_is(knative: FakeKnative, tmp_path: Path) -> None:
    """The first model gets its maximum, the second the rest. A minimum above the devices is refused."""

    def most() -> list[str]:
        found = (knative.server.get(SERVING, "Service", service_name(each, digest("a")), NAMESPACE) for each in "mn")
        notes = (each["spec"]["template"]["metadata"]["annotations"] for each in found)
        return [each["autoscaling.knative.dev/max-scale"] for each in notes]

    with running(tmp_path, cluster_devices="8"):
        async with inside(tmp_path) as client:
            for name in "mn":
                assert (await client.request("POST", "/internal/v1/versions", encode(registration(name, "a"))))[
                    0
                ] == 201
                assert (await client.admin("PUT", f"/models/{name}/scale", {"max": 1000}))[0] == 200
            await eventually(lambda: len(knative.services()) == 2 and most() == ["8", "1"], "all of them, and one")
            assert (await client.admin("PUT", "/models/m/scale", {"max": 6}))[0] == 200
            await eventually(lambda: most() == ["6", "2"], "what is left")
            status, problem = await client.admin("PUT", "/models/n/scale", {"min": 9})
            assert (status, problem["detail"]) == (400, "min=9: must be 8 or less: there are no more devices")
