"""The step loop of one engine, output processing, exchange of KV with other engines, processes, and the front's client."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloister.engine.adapters import AdapterRegister as AdapterRegister
    from cloister.engine.client import EngineClient as EngineClient
    from cloister.engine.core import EngineCore as EngineCore
    from cloister.engine.output_processor import OutputProcessor as OutputProcessor
    from cloister.engine.request_client import Health as Health
    from cloister.engine.request_client import RequestClient as RequestClient
    from cloister.engine.supervision import Supervision as Supervision
    from cloister.engine.transports import ProcessTransport as ProcessTransport
    from cloister.engine.transports import SealedWorkerTransport as SealedWorkerTransport
    from cloister.engine.transports import ThreadTransport as ThreadTransport

_HOMES = {
    "adapters": ("AdapterRegister",),
    "client": ("EngineClient",),
    "core": ("EngineCore",),
    "output_processor": ("OutputProcessor",),
    "request_client": ("Health", "RequestClient"),
    "supervision": ("Supervision",),
    "transports": ("ProcessTransport", "ThreadTransport", "SealedWorkerTransport"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    # lazy: the child must not load the front's half, and `--help` must not load numpy
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
