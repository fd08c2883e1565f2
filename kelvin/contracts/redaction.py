"""The format of API keys, and how secrets are removed from logs and errors. Pure.

A key is `kv-<id>-<secret>`. The id is public and identifies the key everywhere; the secret is 256 random bits. Kelvin's
own code never writes a secret. `redact` covers the two outputs, logs and errors, in case a caller puts a secret into
the wrong field. A signed token (RFC 7519) is cut after its header.
"""

import re
from typing import Final

KEY_TEXT: Final = re.compile(r"kv-([a-z0-9]{12})-([A-Za-z0-9_-]{43})")
_SECRET: Final = re.compile(r"(kv-[a-z0-9]{12}-)[A-Za-z0-9_-]{6,}")  # also matches a secret that was cut short
_TOKEN: Final = re.compile(r"(eyJ[A-Za-z0-9_-]{6,}\.)[A-Za-z0-9_.-]{6,}")


def redact(text: str) -> str:
    """Return `text` with an ellipsis in place of each key's secret and each token's claims and signature. Lone
    surrogates are written as escapes, because JSON can hold them and UTF-8 can't.
    """
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    if "kv-" in text:
        text = _SECRET.sub(r"\1…", text)
    return _TOKEN.sub(r"\1…", text) if "eyJ" in text else text
