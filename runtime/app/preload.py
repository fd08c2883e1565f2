"""All that a standby or runtime will ever import, imported once, before any of them exists.

ONNX Runtime alone is imported after the fork, see `predictor/session.py`.

What is missing here is imported by each child while a request waits; a test looks for that.
"""

import importlib
from typing import Final

import torch
from fastapi import FastAPI

import runtime.app.standby  # noqa: F401  (and with it all that a process of ours is made of)
from kelvin.contracts.accounting.usage import Receipts
from kelvin.contracts.artifacts.manifest import Manifest
from kelvin.contracts.artifacts.runtime_control import BindRequest, GateJob, SealJob
from kelvin.contracts.wire import decoder
from runtime.api.control_api import build_control_app
from runtime.app.process_memory import configure_heap
from runtime.text.chat_template import ChatTemplate
from weightcache.client.lease_protocol import Layout, LeaseReply

# Imported by libraries at their first use.
_LAZY_IMPORTS: Final = (
    "uvicorn.lifespan.off",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.http.httptools_impl",
)
# What a process is told. Decoders are made at the first use of each type, and kept with it.
_MESSAGE_TYPES: Final[tuple[type, ...]] = (BindRequest, GateJob, SealJob, LeaseReply, Layout, Manifest, Receipts)
# Uses what templates use, escapes in texts among it: they need a codec.
_TEMPLATE: Final = "{% for message in messages %}{{ message.role + '\\n' }}{% endfor %}"


def load() -> FastAPI:
    """Import the rest, and build what is the same in each child and holds no thread, loop or device."""
    import_all()
    return build_control_app()


def import_all() -> None:
    """What the first request would otherwise wait for."""
    configure_heap()
    torch.set_num_threads(1)  # before any operation could make a pool
    for name in _LAZY_IMPORTS:
        importlib.import_module(name)
    for kind in _MESSAGE_TYPES:
        decoder(kind)
    ChatTemplate(_TEMPLATE, {}).render([])  # fills jinja2's own caches
