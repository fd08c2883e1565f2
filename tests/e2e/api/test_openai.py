"""The unmodified OpenAI client works: completions, chats, streams, models and error types."""

import ssl
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from coldstart_bench.harness.installation import Installation


@pytest.fixture
def client(kelvin: Installation) -> Iterator[openai.OpenAI]:
    """A client with the installation's CA."""
    context = ssl.create_default_context(cafile=str(kelvin.data / "ca.pem"))
    with openai.OpenAI(
        base_url=f"https://localhost:{kelvin.port}/v1",
        api_key=(kelvin.data / "default.key").read_text().strip(),
        http_client=openai.DefaultHttpxClient(verify=context),
        max_retries=0,
    ) as made:
        yield made


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert {"llama", "qwen2"} <= {model.id for model in client.models.list()}


def test_a_chat_completion_and_its_stream_say_the_same(client: openai.OpenAI) -> None:
    """With greedy sampling, the chunks of a stream join to the whole answer."""
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": "w1 w2 w3"}]
    whole = client.chat.completions.create(model="llama", messages=messages, max_tokens=9, temperature=0)
    stream = client.chat.completions.create(
        model="llama",
        messages=messages,
        max_tokens=9,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "length"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 9


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        pytest.param({"model": "nobody"}, openai.NotFoundError, "nobody", id="an unknown model is not found"),
        pytest.param({"temperature": 9}, openai.BadRequestError, "temperature", id="a bad value is named"),
        pytest.param({"max_tokens": 10**6}, openai.BadRequestError, "max_tokens", id="a hard limit is named"),
        pytest.param(
            {"prompt": "w1 " * 5000}, openai.BadRequestError, "5001 tokens", id="a long prompt is refused by count"
        ),
    ],
)
def test_errors_are_the_clients_own(
    client: openai.OpenAI, fields: dict[str, object], error: type[openai.APIStatusError], said: str
) -> None:
    """A refused request raises the client's own exception and names the cause."""
    call: dict[str, object] = {"model": "llama", "prompt": "w1", "max_tokens": 2, **fields}
    with pytest.raises(error) as raised:
        client.completions.create(**call)  # type: ignore[call-overload]
    assert said in raised.value.message


def test_a_wrong_key_is_an_authentication_error(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="kv-nothing").models.list()


def test_stop_and_seed(client: openai.OpenAI) -> None:
    """The same seed gives the same text. A stop string ends the text before it."""
    first, second = (
        client.completions.create(model="llama", prompt="w4 w5", max_tokens=12, temperature=1.0, seed=11)
        for _ in range(2)
    )
    assert first.choices[0].text == second.choices[0].text
    word = first.choices[0].text.split()[5]
    cut = client.completions.create(model="llama", prompt="w4 w5", max_tokens=12, temperature=1.0, seed=11, stop=[word])
    assert word not in cut.choices[0].text.split()
    assert cut.choices[0].finish_reason == "stop"
