"""An activator that counts JSON decoding: it writes a byte to the file KELVIN_COUNTED each time it decodes a text with
MARK in it. Run as a program. With KELVIN_PLANTED the front door decodes each request body once more.
"""

import json
import os
from typing import Any, Final, Generic, TypeVar

import msgspec

MARK: Final = "decoded-how-often"
T = TypeVar("T")


def note(raw: Any) -> None:
    """Write a byte if the text contains MARK."""
    if MARK.encode() in (raw.encode() if isinstance(raw, str) else bytes(raw)):
        with open(os.environ["KELVIN_COUNTED"], "ab") as counted:
            counted.write(b".")


class Counting(Generic[T]):
    """A counting decoder. It wraps msgspec's, which can't be subclassed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._decoder = Decoder(*args, **options)

    def decode(self, raw: Any) -> Any:
        """Count and decode."""
        note(raw)
        return self._decoder.decode(raw)


Decoder: Final[Any] = msgspec.json.Decoder
decode: Final[Any] = msgspec.json.decode
loads: Final[Any] = json.loads


def counted_decode(raw: Any, **options: Any) -> Any:
    """Count and call `msgspec.json.decode`."""
    note(raw)
    return decode(raw, **options)


def counted_loads(raw: Any, **options: Any) -> Any:
    """Count and call `json.loads`."""
    note(raw)
    return loads(raw, **options)


def main() -> None:
    """Install the counters and run the activator."""
    msgspec.json.Decoder, msgspec.json.decode, json.loads = Counting, counted_decode, counted_loads  # type: ignore[misc,assignment]
    from activator import __main__
    from activator.request import inference_request
    from activator.routing.policy.request_body import read_body

    if "KELVIN_PLANTED" in os.environ:
        vars(inference_request)["read_body"] = lambda raw, path: (read_body(raw, path), read_body(raw, path))[0]
    __main__.main()


if __name__ == "__main__":
    main()
