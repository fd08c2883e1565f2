"""What the text of a key looks like, and how it is kept out of whatever is written down. Pure.

A key is `kv-<id>-<secret>`: the id is public and names it everywhere, the secret is 256 random bits. Nothing of ours
writes a secret; `redact` stands at the two ways out, logs and errors, for what callers put where it does not belong.
A signed token (RFC 7519) is cut behind its header.
"""

import re
from typing import Final

KEY_TEXT: Final = re.compile(r"kv-([a-z0-9]{12})-([A-Za-z0-9_-]{43})")
_SECRET: Final = re.compile(r"(kv-[a-z0-9]{12}-)[A-Za-z0-9_-]{6,}")  # also of a text that was cut short
_TOKEN: Final = re.compile(r"(eyJ[A-Za-z0-9_-]{6,}\.)[A-Za-z0-9_.-]{6,}")


def redact(text: str) -> str:
    """`text` with the secret of every key, and the claims and signature of every token, replaced by an ellipsis.

    Lone surrogates, which JSON can hold and UTF-8 can't, are written as escapes.
    """
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()
    if "kv-" in text:
        text = _SECRET.sub(r"\1…", text)
    return _TOKEN.sub(r"\1…", text) if "eyJ" in text else text
