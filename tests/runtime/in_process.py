"""Call every route of a runtime once, like control plane and activator."""

import json

from kelvin.contracts.artifacts.runtime_control import BindRequest, BindResponse, RuntimeReport
from kelvin.contracts.serving.stream_frames import FrameDecoder, FrameKind
from kelvin.ipc.service_client import ServiceClient
from kelvin.ipc.socket_directory import SocketDirectory

DEADLINE_S = 60.0


async def call_every_route(directory: SocketDirectory, name: str, version: str) -> None:
    """Get the state, bind, send a chat, a stream and a cancellation."""
    client = ServiceClient(directory, name, "the runtime")
    try:
        await client.call("GET", "/control/state", RuntimeReport, timeout_s=DEADLINE_S)
        bind = BindRequest(tenant="acme", model="m", version=version, device_class="cpu-1", threads=1, kv_bytes=4 << 20)
        await client.call("POST", "/control/bind", BindResponse, body=bind, timeout_s=DEADLINE_S)
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8, "stop": "x", "temperature": 0.7}
        for number, body in enumerate((chat, chat | {"stream": True, "top_k": 5, "top_p": 0.9, "seed": 1})):
            headers = {"x-kelvin-request-id": f"r{number}"}
            path = "http://rt/v1/chat/completions"
            async with client.session.post(path, data=json.dumps(body), headers=headers) as answer:
                frames = FrameDecoder().feed(await answer.read())
                assert frames[-1].kind is FrameKind.END
        async with client.session.post("http://rt/v1/completions", data=b"{}") as refused:
            assert refused.status == 400
        async with client.session.delete("http://rt/v1/requests/r1") as deleted:
            assert deleted.status == 204
    finally:
        await client.close()
