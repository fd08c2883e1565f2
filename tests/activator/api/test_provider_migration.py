"""An application moves from another provider by environment variables alone. Wrong base URLs are explained."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from tests.activator.control import KEY
from tests.activator.world import world

APPLICATION = """
import openai
answer = openai.OpenAI(max_retries=0).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
print(answer.choices[0].message.content)
"""


async def test_an_application_moves_by_its_environment(tmp_path: Path) -> None:
    """OPENAI_BASE_URL, OPENAI_API_KEY and SSL_CERT_FILE are enough. Without the last one the CA is not trusted."""

    async def ask(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        application = [sys.executable, "-c", APPLICATION]
        return await asyncio.to_thread(
            subprocess.run, application, env=environment, capture_output=True, text=True, timeout=120
        )

    async with world(tmp_path) as here:
        await here.replica("a")
        untrusting = os.environ | {"OPENAI_BASE_URL": f"{here.url}/v1", "OPENAI_API_KEY": KEY}
        untrusting.pop("SSL_CERT_FILE", None)
        moved = await ask(untrusting | {"SSL_CERT_FILE": str(here.data / "ca.pem")})
        assert (moved.returncode, moved.stdout) == (0, "hello\n"), moved.stderr
        assert "CERTIFICATE_VERIFY_FAILED" in (await ask(untrusting)).stderr


@pytest.mark.parametrize("base", ["", "/v1/v1", "/api/v1"])
async def test_wrong_base_url_is_explained(tmp_path: Path, base: str) -> None:
    """The official client's error names the right route, and how a base URL ends."""

    async with (
        world(tmp_path) as here,
        openai.AsyncOpenAI(
            base_url=here.url + base,
            api_key=KEY,
            http_client=openai.DefaultAsyncHttpxClient(verify=here.tls),
            max_retries=0,
        ) as client,
    ):
        with pytest.raises(openai.NotFoundError, match=r"did you mean '/v1/chat/completions'\? .* ends in /v1"):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
