"""What the text of a key looks like, and how it is kept out of whatever is written down. Pure.

A key is `kv-<id>-<secret>`: the id is public and names it everywhere, the secret is 256 random bits. Nothing of ours
writes a secret; `redact` stands at the two ways out, logs and errors, for what callers put where it does not belong.
"""

import re
from typing import Final

KEY_TEXT: Final = re.compile(r"kv-([a-z0-9]{12})-([A-Za-z0-9_-]{43})")
_SECRET: Final = re.compile(r"(kv-[a-z0-9]{12}-)[A-Za-z0-9_-]{6,}")  # also of a text that was cut short


def redact(text: str) -> str:
    """`text` with the secret of every key in it replaced by an ellipsis."""
    return _SECRET.sub(r"\1…", text) if "kv-" in text else text
