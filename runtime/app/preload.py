"""Import everything that a standby or runtime needs, once, before the first fork.

Each child would import a missing module while a request waits; a test looks for such modules. The exception is ONNX
Runtime, which is imported after the fork: see `predictor/onnx_session.py`.
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
from runtime.app.heap import configure_heap
from runtime.text.chat_template import ChatTemplate
from weightcache.client.lease_protocol import Layout, LeaseReply

# Modules that libraries import at their first use.
_LAZY_IMPORTS: Final = (
    "uvicorn.lifespan.off",
    "uvicorn.loops.uvloop",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.http.httptools_impl",
)
# The messages that a process receives. msgspec builds a type's decoder at its first use and keeps it.
_MESSAGE_TYPES: Final[tuple[type, ...]] = (BindRequest, GateJob, SealJob, LeaseReply, Layout, Manifest, Receipts)
# Uses the features of real templates. Text escapes are among them, because they load a codec.
_TEMPLATE: Final = "{% for message in messages %}{{ message.role + '\\n' }}{% endfor %}"


def load() -> FastAPI:
    """Import everything, and build what all children share and what holds no thread, event loop or device."""
    import_all()
    return build_control_app()


def import_all() -> None:
    """Import and initialise what the first request would otherwise wait for."""
    configure_heap()
    torch.set_num_threads(1)  # before any operation can create a thread pool
    for name in _LAZY_IMPORTS:
        importlib.import_module(name)
    for kind in _MESSAGE_TYPES:
        decoder(kind)
    ChatTemplate(_TEMPLATE, {}).render([])  # fills jinja2's own caches
